"""A frozen model that answers about images, with one projection and one soft token: three seeds of the example.

python benchmarks/perceived.py          # writes docs/reproduction/ep_alm_accuracy.csv, in about 10 minutes
"""

import sys
from pathlib import Path

import torch

from reproduction.ep_alm import NAME
from reproduction.tables import write_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import perceive

SEEDS = (0, 1, 2)


def main() -> None:
    """Train all, one after the other."""
    torch.set_num_threads(1)
    rows = []
    for seed in SEEDS:
        found = perceive.perceive(seed, model_steps=perceive.MODEL_STEPS, steps=perceive.STEPS)
        print(found, flush=True)
        rows.append(
            {
                "seed": str(seed),
                "trained": str(found["trained"]),
                "share": f"{found['share']:.5f}",
                **{name: f"{found[name]:.3f}" for name in ("untrained", "withheld", "accuracy")},
                "frozen": "equal" if found["frozen"] else "changed",
                "backwards": " ".join(map(str, found["backwards"])),
            }
        )
    write_rows(NAME, rows)


if __name__ == "__main__":
    main()
