"""Twenty layouts, each of which goes on from the checkpoint of each other one: 380 pairs with equal losses?

Run by ``make resume-pairs``: with AdamW, then a circle of the layouts with frozen layers and one with SGD. With
``ARGS=circle`` a circle of all three, in some minutes.
"""

import sys
import tempfile
import time
from itertools import pairwise, permutations
from pathlib import Path

from resumed import KINDS, LAYOUTS, SAVED, config_of, last, losses, middle, train_all

TOLERANCE = 1e-11


def differing(folder: Path, kind: str, pairs: list[tuple[str, str]]) -> tuple[float, list[str]]:
    """The largest relative difference of a loss, and the pairs whose losses differ by more than rounding."""
    whole = {name: folder / kind / name for name in LAYOUTS}
    train_all({path: config_of(folder, name, kind, every=SAVED) for name, path in whole.items()})
    expected = losses(whole["one rank"])
    most, wrong = 0.0, list[str]()
    for name, path in whole.items():
        error = max(abs(loss / expected[step] - 1) for step, loss in losses(path).items())
        most, wrong = max(most, error), wrong + ([name] if error > TOLERANCE else [])
    for new in LAYOUTS:  # by the layout that goes on, so that processes are few at a time
        mine = {folder / kind / f"{old} to {new}": old for old, other in pairs if other == new}
        train_all({path: config_of(folder, new, kind, resume=middle(whole[old])) for path, old in mine.items()})
        for path in mine:
            found = losses(path)
            wanted = last(expected)
            error = max(abs(found[step] / loss - 1) for step, loss in wanted.items())
            most, wrong = max(most, error), wrong + ([path.name] if error > TOLERANCE else [])
    return most, wrong


def main() -> int:
    """Print how many pairs differ, for each kind of run."""
    names, failed, is_short = list(LAYOUTS), False, "circle" in sys.argv[1:]
    circle = list(pairwise([*names, names[0]]))
    with tempfile.TemporaryDirectory(prefix="pipeloom-resumed-") as folder:
        for kind in KINDS:
            pairs, begin_s = (
                list(permutations(names, 2)) if kind == "adamw" and not is_short else circle,
                time.monotonic(),
            )
            most, wrong = differing(Path(folder), kind, pairs)
            failed |= bool(wrong)
            right = len(pairs) - sum(" to " in one for one in wrong)
            seconds = time.monotonic() - begin_s
            print(f"{kind}: {len(names)} layouts, {right} of {len(pairs)} pairs equal to {most:.1e} ({seconds:.0f} s)")
            print("\n".join(wrong), end="\n" if wrong else "", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
