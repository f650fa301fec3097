"""Buffers for whole gradients of stages, which reductions or updates free."""

from collections import deque
from collections.abc import Mapping

from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.schedule import Schedule
from pipeloom.schedule.stage_swaps import gradient_rooms


class GradientBuffers:
    """Buffers for whole gradients.

    Args:
        count: buffers.
        size: elements of each.
        like: a tensor of their dtype and device.
        reuses: whether a buffer can be used again in the same step, in the order in which buffers are freed. Reductions
            end in row order, so that is the buffer whose reduction the backward waits for by the dependency relation.
            Without such waits a freed buffer is not used before the next step.
    """

    def __init__(self, count: int, size: int, like: Tensor, *, reuses: bool) -> None:
        self._count = count
        self._size = size
        self._like = like
        self._reuses = reuses
        self.forget()

    def begin(self) -> None:
        """Before a step; no reduction may be in progress."""
        self._free.extend(self._resting)
        self._resting.clear()

    def forget(self) -> None:
        """Replace all buffers: collectives of a failed step may still write to the old ones."""
        # All together, so that their number does not depend on when reductions end.
        self._free = deque(self._like.new_empty(self._size) for _ in range(self._count))
        self._resting: deque[Tensor] = deque()

    @property
    def num_taken(self) -> int:
        """Number of buffers in use."""
        return self._count - len(self._free) - len(self._resting)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._count * self._size * self._like.element_size()

    def take(self) -> Tensor:
        """A free buffer, uninitialized."""
        assert self._free, "no gradient buffer is free: the schedule did not wait for its reduction"
        return self._free.popleft()

    def give_back(self, buffer: Tensor) -> None:
        """Free a buffer; the lane's thread calls it."""
        (self._free if self._reuses else self._resting).append(buffer)


def rooms_of(schedule: Schedule) -> dict[int, int]:
    """Stage -> number of its gradient's buffer on its rank (``gradient_rooms``), of all ranks."""
    return {stage: room for row in schedule.rows for stage, room in (gradient_rooms(row) or {}).items()}


def refuse_parts_of_sums(num_reductions: Mapping[int, int]) -> None:
    """Check that stages which are updated within the step are reduced once: there is no memory for parts of sums."""
    found = [stage for stage, number in num_reductions.items() if number > 1]
    if found:
        raise UserError(f"stage {found[0]} is reduced more than once before its update; reduce it once")


def pools(weights: Mapping[int, StageWeights], rooms: Mapping[int, int]) -> dict[StageWeights, GradientBuffers]:
    """For each stage the pool of its room, which has one buffer of the size of its largest stage."""
    sizes: dict[int, int] = {}
    own = [(rooms[index], one) for index, one in weights.items() if index in rooms]
    for number, one in own:
        sizes[number] = max(sizes.get(number, 0), one.order.size)
    like = {number: one.gradient for number, one in own}
    pools = {number: GradientBuffers(1, size, like[number], reuses=True) for number, size in sizes.items()}
    return {one: pools[rooms[index]] for index, one in weights.items() if index in rooms}


def buffers_of(
    weights: Mapping[int, StageWeights], count: int | None, num_reductions: Mapping[int, int]
) -> dict[StageWeights, GradientBuffers]:
    """For each stage without a gradient of its own the pool of its buffers: one for all stages, or one for each."""
    if count is None:
        return {
            one: GradientBuffers(max(1, num_reductions[stage]), one.order.size, one.gradient, reuses=False)
            for stage, one in weights.items()
            if one.whole_gradient is None
        }
    largest = max(weights.values(), key=lambda one: one.order.size)
    # With as many buffers as stages no stage is reduced early.
    shared = GradientBuffers(min(count, len(weights)), largest.order.size, largest.gradient, reuses=True)
    return {one: shared for one in weights.values() if one.whole_gradient is None}
