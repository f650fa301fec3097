"""Profiles of chosen steps by torch.profiler: kernels and calls of every rank, for ui.perfetto.dev."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pipeloom.config import RunConfig
from pipeloom.errors import RunError, reason_of
from pipeloom.execute.processes.world import World
from pipeloom.runs.run_folder import PROFILES
from pipeloom.system.room import FULL
from pipeloom.terminal.guard import print_warning


class StepProfiles:
    """Records the steps of ``output.profile``. Construction is collective.

    Args:
        config: of the run.
        world: all ranks.
        folder: of the run; that of rank 0 is used.
    """

    def __init__(self, config: RunConfig, world: World, folder: Path) -> None:
        self._steps = frozenset(config.output.profile or ())
        self._rank = world.rank
        self._activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        # Ranks of a launcher may have chosen other names from the clock.
        self._folder = Path(world.from_first(str(folder.absolute()))) / PROFILES if self._steps else Path()

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Record what runs inside if the step is one of those chosen.

        Raises:
            RunError: other than on a full disk, the profile cannot be written.
        """
        if step not in self._steps:
            yield
            return
        with profile(activities=self._activities) as found:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        file = self._folder / f"step-{step:06}-rank-{self._rank:04}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            found.export_chrome_trace(str(file))
        except OSError as error:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            problem = f"cannot write the profile {file}: {reason_of(error)}"
            if error.errno not in FULL:
                raise RunError(problem) from None
            print_warning(f"{problem}; the run continues without it")
