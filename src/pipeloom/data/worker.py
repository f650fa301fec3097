"""A process that tokenizes: reads a job and numbers of units, writes a line for each (``pipeloom.data.tokenizing``)."""

import json
import signal
import sys

from pipeloom.data.tokenizer import tokenizer_from
from pipeloom.data.tokenizing import Job, encode_unit
from pipeloom.errors import UserError


def main() -> None:
    """Work until the input ends, which it does when the process that started this one ends."""
    # Ctrl-C reaches the processes of a terminal together; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.from_json(sys.stdin.readline())
    units, tokenizer = job.units(), tokenizer_from(job.files)
    for line in sys.stdin:
        try:
            encode_unit(job, units[int(line)], int(line), tokenizer)
            answer = "done"
        except UserError as error:
            answer = json.dumps(["user", str(error)])
        except OSError as error:
            answer = json.dumps(["system", str(error)])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
