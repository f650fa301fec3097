"""Losses of merged models over preferences between two texts, for models near their base and far from it.

python benchmarks/merged_front.py          # writes docs/reproduction/pwemoe_front.csv, in about half an hour

Cases are processes with one thread each, one for each core.
"""

import os
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
)
from pipeloom.data.text import load_data
from pipeloom.model import Transformer
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.converted import read_run
from pipeloom.training.conversions.export import load_stored, stored_parameters
from pipeloom.training.conversions.router_training import train_routers
from pipeloom.training.conversions.routers import Routed, block_of, merged
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from reproduction.machine import Row
from reproduction.pwemoe import (
    ARITHMETIC,
    FEED_FORWARD,
    FROM_CONSTANTS,
    FROM_PREFERENCE,
    INTERPOLATED,
    NAME,
    SEEDS,
)
from reproduction.tables import write_rows

CASES = {"300": 3e-3, "800": 5e-3}
"""Steps of the runs from the base -> their learning rate."""
BASE_STEPS, BASE_RATE, ROUTER_STEPS = 400, 3e-3, 1500
SEQ, WINDOWS = 64, 96
MOST_CHARACTERS = 1_500_000
PREFERENCES = [number / 40 for number in range(41)]
ROUTED: dict[str, tuple[Routed, bool]] = {
    FEED_FORWARD: ("feed-forward", False),
    FROM_CONSTANTS: ("all", False),
    FROM_PREFERENCE: ("all", True),
}
"""What has routers, and whether they begin with the preference."""
Parameters = dict[str, Tensor]


def write_texts(folder: Path) -> dict[str, Path]:
    """The code of Python's standard library, its documentation, and the C headers of Python."""
    paths = sysconfig.get_paths()
    texts = {
        "base": _joined(Path(paths["stdlib"]).glob("*.py")),
        "documentation": "\n\n".join(pydoc_data.topics.topics.values()),
        "headers": _joined(Path(paths["include"]).rglob("*.h")),
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text[:MOST_CHARACTERS], encoding="utf-8")
    return {name: folder / f"{name}.txt" for name in texts}


def _joined(files: Iterable[Path]) -> str:
    return "".join(file.read_text(encoding="utf-8", errors="ignore") for file in sorted(files))


def run_of(folder: Path, data: DataConfig, *, steps: int, rate: float, init: Path | None, seed: int) -> Path:
    """Train four layers of width 64; the run folder."""
    config = RunConfig(
        model=ModelConfig(num_layers=4, hidden_size=64, num_heads=4),
        data=data,
        layout=Layout(pp=1, loops=1, num_microbatches=1, microbatch_size=16),
        optimizer=OptimizerConfig(lr=rate, lr_warmup_steps=20),
        training=TrainingConfig(
            steps=steps, seed=seed, sample_tokens=0, validation_batches=0, predict=False, dtype="float32"
        ),
        checkpoint=CheckpointConfig(final="checkpoint", init=init),
        output=OutputConfig(folder=folder),
    )
    return train(config, quiet=True).folder


def parameters_of(run: Path) -> Parameters:
    """The weights of a run by name."""
    stored = stored_parameters(CheckpointReader(find_checkpoint(run)))
    found = {name: torch.empty(shape, dtype=stored.dtypes[name]) for name, shape in stored.shapes.items()}
    load_stored(stored, found)
    return found


class Losses:
    """Losses of merged models on the windows that both texts hold out.

    Args:
        runs: the base, and the runs from it.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self.parameters = list(map(parameters_of, runs))
        configs = [read_run(run).config for run in runs]
        self._model = Transformer(configs[0].model, SEQ)
        texts = [load_data(one.data, 0) for one in configs[1:]]
        self._windows = [torch.from_numpy(text.validation.batch(0, WINDOWS).copy()) for text in texts]

    def of(self, weights_of: Callable[[str], Sequence[float]]) -> tuple[float, float]:
        """Both losses of the model whose parameters have these weights of the runs."""
        base, *models = self.parameters
        self._model.load_state_dict(
            {name: merged(one, [each[name] for each in models], weights_of(name)) for name, one in base.items()}
        )
        with torch.no_grad():
            first, second = (
                float(cross_entropy(self._model(one[:, :-1].contiguous()).flatten(0, 1), one[:, 1:].flatten()))
                for one in self._windows
            )
        return first, second


def rows_of(folder: Path, case: str, seed: int) -> list[Row]:
    """All methods for runs of so many steps; behind the first seed only what is compared over seeds."""
    texts = write_texts(folder)
    cache = folder / "cache"
    runs: list[Path] = []
    for name, file in texts.items():
        data, init = DataConfig(path=file, seq_len=SEQ, cache=cache), runs[0] if runs else None
        steps, rate = (int(case), CASES[case]) if runs else (BASE_STEPS, BASE_RATE)
        runs.append(run_of(folder / name, data, steps=steps, rate=rate, init=init, seed=seed))
    losses, found = Losses(runs), list[Row]()

    def add(method: str, preference: float, numbers: int, weights_of: Callable[[str], Sequence[float]]) -> None:
        first, second = losses.of(weights_of)
        row = {
            "steps": case,
            "seed": str(seed),
            "method": method,
            "preference": f"{preference:g}",
            "numbers": str(numbers),
        }
        found.append({**row, "documentation": f"{first:.4f}", "headers": f"{second:.4f}"})
        print(*found[-1].values(), flush=True)

    for name, weights in {"base": (0.0, 0.0), "documentation": (1.0, 0.0), "headers": (0.0, 1.0)}.items():
        add(name, 0.0, 0, lambda _, weights=weights: weights)
    for one in PREFERENCES:
        add(INTERPOLATED, one, 0, lambda _, one=one: (one, 1 - one))
    for number in range(1, 11):
        add(ARITHMETIC, number / 10, 0, lambda _, number=number: (number / 10, number / 10))
    sources = [read_run(run) for run in runs]
    for method, (routed, interpolates) in ROUTED.items():
        if seed != SEEDS[0] and method != FROM_PREFERENCE:
            continue
        how: dict[str, Any] = {"routed": routed, "interpolates": interpolates, "steps": ROUTER_STEPS, "lr": 0.01}
        routers = train_routers(sources[0], sources[1:], (0.5, 0.5), **how)
        assert routers is not None
        for one in PREFERENCES:
            weights = routers.by_block([one, 1 - one])
            blocks = routers.blocks
            add(
                method,
                one,
                routers.num_parameters,
                lambda name, weights=weights, blocks=blocks: weights[block_of(name, blocks)],
            )
    return found


def _case(case_and_seed: tuple[str, int]) -> list[Row]:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        return rows_of(Path(folder), *case_and_seed)


def main() -> None:
    """Train all."""
    # Training starts processes of its own, which a forked one with threads of PyTorch must not.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        rows = [row for found in pool.map(_case, product(CASES, SEEDS)) for row in found]
    write_rows(NAME, rows)


if __name__ == "__main__":
    main()
