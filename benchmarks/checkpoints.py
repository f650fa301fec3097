"""Steps beside a checkpoint to a slow disk, and steps without. Run by ``make bench-checkpoints``.

Two ranks train a small model, and a thread of each writes a checkpoint every so many steps, to an emulated disk of
20 MB/s for both together: the writer sleeps whenever it is ahead of such a disk. The steps that begin and end while a
checkpoint is written are compared with those of the same run that begin and end while none is.

    python benchmarks/checkpoints.py [--rounds 5] [--every 40] [--rate 20]
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from pipeloom.config import CheckpointConfig, DataConfig, ModelConfig, OutputConfig, RunConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.checkpoints.saving import Saving
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

_RANKS = 2
_MEGA = 1e6
_FIRST = 5
"""Number of first steps that are not counted."""
_AHEAD_S = 0.01
"""Time by which a writer may be ahead of the disk. A checkpoint has thousands of small writes; a sleep after each takes
twice the processor time of the writing itself, which a disk does not."""


class SlowFile:
    """A file whose writes take at least the time of a slow disk, which caches the writes of a moment."""

    def __init__(self, file: Any, bytes_per_s: float) -> None:
        self._file, self._bytes_per_s = file, bytes_per_s
        self._free_s = time.monotonic()  # when the disk has written everything

    def write(self, data: Any) -> int:
        """Write, then sleep if the disk is too far behind."""
        size = memoryview(data).nbytes
        self._file.write(data)
        self._free_s = max(self._free_s, time.monotonic()) + size / self._bytes_per_s
        self.settle(_AHEAD_S)
        return size

    def settle(self, ahead_s: float = 0.0) -> None:
        """Sleep until the disk has written everything, if it is behind by more than this time."""
        behind_s = self._free_s - time.monotonic()
        if behind_s > ahead_s:
            time.sleep(behind_s)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file's."""
        return getattr(self._file, name)


def train(config: RunConfig, bytes_per_s: float, rendezvous: Path, rank: int, size: int) -> None:
    """Train on one rank; rank 0 writes the times of its steps and checkpoints to ``times.json``."""
    folder = Path(config.output.folder or "")
    create, write, begin, after = FileSystem.create_stream, Checkpoints._write, Saving.begin_step, Saving.after_step
    times: dict[str, list[float]] = {name: [] for name in ("begins", "ends", "write begins", "write ends")}

    @contextmanager
    def slow(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create(self, path, mode) as file:
            if "w" not in mode:
                yield file
                return
            yield (disk := SlowFile(file, bytes_per_s))
            disk.settle()

    def timed_write(self: Checkpoints, *arguments: Any) -> None:
        assert threading.current_thread() is not threading.main_thread(), "training waits for checkpoints"
        times["write begins"].append(time.monotonic())
        write(self, *arguments)
        times["write ends"].append(time.monotonic())

    def timed_begin(self: Saving) -> None:
        begin(self)
        times["begins"].append(time.monotonic())

    def timed_after(self: Saving, step: int) -> None:
        times["ends"].append(time.monotonic())
        after(self, step)

    FileSystem.create_stream, Checkpoints._write = slow, timed_write  # type: ignore[method-assign]
    Saving.begin_step, Saving.after_step = timed_begin, timed_after  # type: ignore[method-assign]
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    data = load_data(config.data, config.training.seed)
    Trainer(resolve(config, data), world, data, RunFolder(folder), quiet=True).run()
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
    world.leave()


def main() -> None:
    """Train and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints")
    parser.add_argument("--every", type=int, default=40, help="steps between them")
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s of the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 4000, encoding="utf-8")
        config = RunConfig(
            model=ModelConfig(num_layers=4, hidden_size=256, num_heads=4),
            data=DataConfig(path=text, seq_len=64, cache=folder / "cache"),
            layout=Layout(pp=_RANKS, loops=2, num_microbatches=4, microbatch_size=2),
            training=TrainingConfig(
                # The last step has no checkpoint in the background.
                steps=(options.rounds + 1) * options.every - 1,
                validation_batches=0,
                sample_tokens=0,
                predict=False,
            ),
            output=OutputConfig(folder=folder / "run"),
            checkpoint=CheckpointConfig(final="none", every=options.every, every_s=0, keep=1),
        )
        load_data(config.data, config.training.seed)
        (folder / "run").mkdir()
        run_workers(partial(train, config, options.rate * _MEGA / _RANKS), _RANKS)
        times = json.loads((folder / "run" / "times.json").read_text(encoding="utf-8"))
        newest = max((folder / "run" / "checkpoints").iterdir())
        megabytes = sum(file.stat().st_size for file in newest.iterdir()) / _MEGA
    writes = list(zip(times["write begins"], times["write ends"], strict=True))
    beside, without = list[float](), list[float]()
    for begin_s, end_s in list(zip(times["begins"], times["ends"], strict=True))[_FIRST:]:
        if any(first <= begin_s and end_s <= last for first, last in writes):
            beside.append(end_s - begin_s)
        elif all(end_s < first or last < begin_s for first, last in writes):
            without.append(end_s - begin_s)
    write_s = statistics.median(last - first for first, last in writes)
    one, other = (statistics.median(found) for found in (beside, without))
    print(
        f"{len(writes)} checkpoints of {megabytes:.0f} MB, {write_s:.1f} s each at {options.rate:g} MB/s\n"
        f"{len(beside)} steps beside a checkpoint: {one * 1e3:.1f} ms; {len(without)} without: {other * 1e3:.1f} ms; "
        f"ratio of medians {one / other:.3f}, of means {statistics.mean(beside) / statistics.mean(without):.3f}"
    )


if __name__ == "__main__":
    main()
