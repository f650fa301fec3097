"""One run with 50 faults of nine kinds, and the same run without: equal weights, losses and windows?

Run by ``make chaos``. Also prints how long each kind of fault delays the run, and how many completed steps were
repeated.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from faults import GAP, KINDS, STALL_S, Chaos, differences, faults, repeated, restarts

NUMBER = 50


def main() -> int:
    """Print each fault, then what differs."""
    sys.stdout.reconfigure(line_buffering=True)
    number = int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER
    steps = GAP * (number + 2)
    with tempfile.TemporaryDirectory(prefix="pipeloom-chaos-") as name:
        begin_s = time.monotonic()
        quiet = Chaos(Path(name) / "quiet", steps)
        quiet.start()
        quiet.finish()
        print(f"{steps} steps without faults: {time.monotonic() - begin_s:.0f} s")
        chaos = Chaos(Path(name) / "chaos", steps, f"--restart.times {number}", STALL_S)
        chaos.start()
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for fault in faults(number):
            seconds = chaos.do(fault)
            times[fault.kind].append(seconds)
            print(f"step {fault.step:>4} {fault.kind:<13} rank {fault.rank}  {seconds:5.1f} s")
        chaos.finish()
        for kind, found in times.items():
            if found:
                print(
                    f"{kind:<13} {len(found):>2} times, {median(found):4.1f} s at the median, {max(found):4.1f} s most"
                )
        again = repeated(chaos.folder)
        whole = [one for found in times.values() for one in found]
        differing = differences(chaos, quiet)
        print(f"{number} faults, {len(restarts(chaos))} restarts; {median(whole):.1f} s to the next step at the median")
        print(f"completed steps that were repeated: at most {max(again, default=0)} in a restart, {sum(again)} in all")
        print(f"different from the quiet run: {', '.join(differing) or 'nothing'}")
        return int(bool(differing) or median(whole) > 5 or max(again, default=0) > 1)


if __name__ == "__main__":
    sys.exit(main())
