"""What a rank of a training run notes of itself: its rows, and what it does beside them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeloom.config import RunConfig
from pipeloom.errors import Interrupted, type_and_text
from pipeloom.execute.processes.world import World
from pipeloom.runs.action_log import NOTHING, ActionLog, Activity
from pipeloom.runs.run_folder import RunFolder
from pipeloom.terminal.guard import print_warning

CHECKPOINT_LANE = "checkpoint"
"""Lane of what the thread of the checkpoints does."""


@dataclass(frozen=True)
class CheckpointActivities:
    """What ranks do for a checkpoint.

    Attributes:
        together, behind: the whole of it, on the rank's own thread and on the thread beside training.
        files: writing this rank's files.
        agreement: exchange of the ranks' results, which the slowest one ends.
        wait: of the rank's own thread for the other thread.
    """

    together: Activity = NOTHING
    behind: Activity = NOTHING
    files: Activity = NOTHING
    agreement: Activity = NOTHING
    wait: Activity = NOTHING


NOT_NOTED = CheckpointActivities()


class Noted:
    """The log of a rank in the run folder, with its activities. Construction is collective.

    Args:
        config: resolved.
        world: all ranks.
        folder: of the run; that of rank 0 counts.

    Attributes:
        log: of the rank; ``None`` where there is no folder, such as on a host that does not see it.
        world: the ranks, whose exchanges are noted.
        measuring, reading, updating: activities of the rank's own thread.
        checkpoint: activities of checkpoints.
    """

    def __init__(self, config: RunConfig, world: World, folder: RunFolder) -> None:
        path = world.from_first(folder.make_actions() if world.rank == 0 else None)
        self.log = None if path is None else _open(path, config, world)
        everyone = range(world.size)
        self.world = replace(world, activity=self._activity("exchange of numbers", everyone))
        self.measuring = self._activity("measurement of the stages", everyone)
        self.reading = self._activity("read of the batch")
        self.updating = self._activity("update of the weights")
        self.checkpoint = CheckpointActivities(
            together=self._activity("checkpoint", everyone),
            behind=self._activity("checkpoint beside training", everyone, CHECKPOINT_LANE),
            files=self._activity("write of the checkpoint's files", None, CHECKPOINT_LANE),
            agreement=self._activity("exchange about the checkpoint", everyone, CHECKPOINT_LANE),
            wait=self._activity("wait for the checkpoint beside training", everyone),
        )

    def warn(self) -> None:
        """Print which ranks have no file, if a disk has no room for theirs. Collective."""
        problems = self.world.gather("" if self.log is None else self.log.problem) or []
        ranks = [str(rank) for rank, problem in enumerate(problems) if problem]
        if ranks:
            which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
            reason = next(filter(None, problems))
            text = f"cannot note what {which} did last: {reason}; the run continues, `pipeloom inspect` lacks them"
            print_warning(text)

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        if self.log is not None:
            self.log.begin_step(step)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Note at the end how it was."""
        with self.failing():
            yield
        if self.log is not None:
            self.log.end()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note an error that ends the rank."""
        try:
            yield
        except BaseException as error:
            if self.log is not None:
                is_interrupted = isinstance(error, Interrupted)
                text = str(error) if is_interrupted else type_and_text(error)
                self.log.end(text, is_interrupted=is_interrupted)
            raise

    def _activity(self, name: str, ranks: Sequence[int] | None = None, lane: str = "") -> Activity:
        return NOTHING if self.log is None else self.log.activity(name, ranks, lane)


def _open(folder: Path, config: RunConfig, world: World) -> ActionLog | None:
    try:
        return ActionLog(folder, world.rank, world.size, config.layout.coordinates(world.rank))
    except OSError:  # such as on a host that does not see the folder
        return None
