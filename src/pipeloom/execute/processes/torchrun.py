"""torchrun that ends with the status of its processes.

torchrun itself ends with 1 whatever its processes end with, so that a scheduler could not distinguish a failure from a
run that ended in order and resumes later (75). ``torchrun.sh`` of ``pipeloom launch`` starts this module on each node.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from pipeloom.errors import Interrupted


def main() -> int:
    """Run torchrun with the words of the command line; returns the exit status.

    It is that of the process of this node that ended first with an error, or of the signal that torchrun got and
    passed on: 75 for SIGTERM. A process that a signal killed counts as 128 + its number, as in a shell.
    """
    try:
        torchrun()
    except SignalException as error:
        return Interrupted(error.sigval).status
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main())
