"""The protocol of an executor's parts, and the row that they work on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pipeloom.execute.clock import Mark
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transport, UnderWay
from pipeloom.execute.stages.stage import Objective
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS, MOVE_KINDS, RECEIVE_KINDS, SEND_KINDS
from pipeloom.schedule.lanes import Lane, lane_of


@dataclass(frozen=True)
class Held:
    """The most that a rank held at any moment of a step.

    Attributes:
        gathered: stages whose whole weights were gathered or being gathered.
        weights_bytes: of weights: whole ones while they are here, and shards.
        gradients: stages with a gradient that was not reduced, or being reduced.
        gradients_bytes: of all gradients and the buffers that they are reduced from.
        lent_bytes: of a tied matrix that was borrowed as a copy.
        lent_gradient_bytes: of its gradient, where it is collected and where it is received.
        stage_inputs: (stage, part of the batch) that went forward and not yet back, both halves where that is split.
        stage_input_bytes: of the inputs that they kept for a backward.
        pending: (stage, part of the batch) between the halves of their backward.
        pending_bytes: of what they kept for the gradients of the weights.
        live_bytes: saved by autograd for backwards and held by nobody else, these inputs among them, own ones and those
            accepted from ranks that evict, and ``pending_bytes``; 0 where nobody counts.
        swapped_bytes: of whole stages that are swapped and were on the device, or on their way.
    """

    gathered: int = 0
    weights_bytes: int = 0
    gradients: int = 0
    gradients_bytes: int = 0
    lent_bytes: int = 0
    lent_gradient_bytes: int = 0
    stage_inputs: int = 0
    stage_input_bytes: int = 0
    pending: int = 0
    pending_bytes: int = 0
    live_bytes: int = 0
    swapped_bytes: int = 0

    def most(self, other: "Held") -> "Held":
        """Of each number the larger one."""
        mine, theirs = vars(self), vars(other)
        return Held(**{name: max(mine[name], theirs[name]) for name in mine})


class Service(NamedTuple):
    """A job of a step that no action of the rank's row stands for.

    Attributes:
        what: it is, for people.
        job: under way.
    """

    what: str
    job: UnderWay


class RankRow:
    """A rank's row, as the parts of its executor see it, with what they hand to each other in a step.

    Args:
        schedule: with communication.
        rank: the pipeline rank.
        transport: to the other ranks.

    Attributes:
        actions: of the row, by slot.
        lanes: for each slot the lane.
        before, after: for each slot what parts do right before its action, and right after it; see ``Part.bind``.
        inputs: of this step, the first stage's for each micro-batch or each of its slices.
        objective: of this step, applied to the last stage's output.
        values: tensors that an action of the row made and another one will take.
        outputs: by micro-batch what the objective returned, added up over slices.
    """

    def __init__(self, schedule: Schedule, rank: int, transport: Transport) -> None:
        self.schedule, self.rank = schedule, rank
        self.actions = tuple(schedule.rows[rank])
        self.lanes: list[Lane] = [lane_of(action, schedule.placement) for action in self.actions]
        self.before: list[list[Callable[[], None]]] = [[] for _ in self.actions]
        self.after: list[list[Callable[[], None]]] = [[] for _ in self.actions]
        self._transport = transport
        # Computed once: the relation works on numbers, which takes longer than an
        # action without compute.
        self._sources = [_source_of(action, schedule) for action in self.actions]
        self.begin((), None)

    def begin(self, inputs: Sequence[Tensor], objective: Objective | None) -> None:
        """Before a step, and after one, which nothing of it outlives."""
        self.inputs, self.objective = inputs, objective
        self.values: dict[Action, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def slots_of(self, *kinds: Kind) -> list[int]:
        """The slots of the actions of some kinds."""
        return [slot for slot, action in enumerate(self.actions) if action.kind in kinds]

    def needed(self, slot: int) -> list[int]:
        """The slots of this row that the action of a slot waits for, by the dependency relation."""
        first = int(self.schedule.facts.columns.first[self.rank])
        found = [node - first for node in self.schedule.graph.needed(first + slot)]
        # A receive needs a send, which is on another rank, before or behind this row.
        return [other for other in found if 0 <= other < len(self.actions)]

    def input(self, slot: int) -> Tensor | None:
        """The result of another action that an action takes, handed over; ``None`` for the batch or the loss."""
        source = self._sources[slot]
        return None if source is None else self.values.pop(source)

    def send(self, slot: int, tensor: Tensor) -> UnderWay:
        """Start sending to the rank at the other end of the action's lane."""
        peer = self.lanes[slot].peer
        assert peer is not None
        return self._transport.send(tensor, peer)

    def receive(self, slot: int, spec: TensorSpec) -> UnderWay:
        """Start receiving from the rank at the other end of the action's lane."""
        peer = self.lanes[slot].peer
        assert peer is not None
        return self._transport.receive(spec, peer)


def _source_of(action: Action, schedule: Schedule) -> Action | None:
    """The action whose result is this action's input, if it is not the batch or the loss."""
    if action.microbatch is None or action.kind in MOVE_KINDS:
        return None
    for needed in schedule.facts.needs(action):
        is_kept = needed.stage == action.stage and needed.kind in COMPUTE_KINDS | MOVE_KINDS  # the stage has it
        if action.kind in SEND_KINDS or not is_kept:
            return None if action.kind in RECEIVE_KINDS else needed
    return None


class Part:
    """What an executor does for some kinds of actions. A part may serve several executors, one step at a time.

    Attributes:
        kinds: that it runs.
        waits_by_itself: whether its jobs wait for each other on their lanes. Where they do not, the executor starts an
            action when what it needs on other lanes of its rank has ended.
    """

    kinds: ClassVar[frozenset[Kind]]
    waits_by_itself: ClassVar[bool] = False

    def bind(self, row: RankRow) -> None:
        """Once for each executor: check the schedule, and add to ``row.before`` and ``row.after``.

        Raises:
            UserError: the part cannot run the schedule.
        """

    def begin(self, row: RankRow) -> Sequence[Service]:  # noqa: ARG002  few parts have to do something
        """Before a step; what is to end with the step beside the row."""
        return ()

    def start(self, row: RankRow, slot: int) -> UnderWay | None:
        """Run the action of a slot, or start it, if it runs beside compute."""
        raise NotImplementedError

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Use what an action brought that this part started: once, before the first action that needs it."""

    def span(self, slot: int, done: Mapping[int, UnderWay], seconds: Callable[[Mark], float]) -> tuple[float, float]:
        """Start and end of an action that this part started, among all that a step started beside compute, by slot."""
        return seconds(done[slot].begin), seconds(done[slot].end)

    def other_end(self, row: RankRow, slot: int) -> str:
        """With whom an action works, for people."""
        return f"rank {row.lanes[slot].peer}"

    def held(self) -> Held:
        """The most that was held in the step."""
        return Held()

    def end(self, row: RankRow) -> None:
        """After the row, when all that was started has ended."""

    def forget(self) -> None:
        """Drop what a failed step left behind."""


class MessagePart(Part):
    """A part whose actions are messages to another rank, and what these bring."""

    def span(self, slot: int, done: Mapping[int, UnderWay], seconds: Callable[[Mark], float]) -> tuple[float, float]:  # noqa: ARG002
        """From when it was started to when it had ended, by the host's clock: both ranks have that one."""
        return done[slot].begin, done[slot].end
