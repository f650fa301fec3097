"""The protocol of an executor's parts, and the row that they work on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from pipeloom.execute.clock import Mark
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.stages.stage import Objective, StepDocuments
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS, MOVE_KINDS, RECEIVE_KINDS, SEND_KINDS
from pipeloom.schedule.lanes import Lane, lane_of


@dataclass(frozen=True)
class Held:
    """Peaks of a rank in a step.

    Attributes:
        gathered: stages with gathered weights, or whose gather was in progress.
        weights_bytes: of weights: gathered ones and shards.
        gradients: stages with an unreduced gradient, or whose reduction was in progress.
        gradients_bytes: of all gradients and the buffers that they are reduced from.
        lent_bytes: of the copy of a tied matrix.
        lent_gradient_bytes: of its gradient, where it is accumulated and where it is received.
        stage_inputs: (stage, micro-batch or slice) in flight: after the forward, before the end of the whole backward.
        stage_input_bytes: of their inputs.
        pending: (stage, micro-batch or slice) between input gradient and weight gradient.
        pending_bytes: of what they kept for the weight gradient.
        live_bytes: of activations: tensors that only autograd holds, stage inputs, those accepted from other ranks, and
            ``pending_bytes``; 0 where they are not counted.
        swapped_bytes: of swapped stages on the device, transfers in progress included.
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
        """The element-wise maximum."""
        mine, theirs = vars(self), vars(other)
        return Held(**{name: max(mine[name], theirs[name]) for name in mine})


class Service(NamedTuple):
    """A job of a step that is not an action of the rank's row.

    Attributes:
        what: its name in messages.
        job: in progress.
    """

    what: str
    job: UnderWay


class RankRow:
    """A rank's row for the parts of its executor, with the tensors that they pass to each other in a step.

    Args:
        schedule: with communication.
        rank: the pipeline rank.
        transport: to the other ranks.

    Attributes:
        actions: of the row, by slot.
        lanes: for each slot the lane.
        sources: for each slot that of the action whose result it uses; ``None`` for the batch or the loss.
        before, after: for each slot the hooks of parts right before and right after its action; see ``Part.bind``.
        inputs: of this step: the first stage's, for each micro-batch or slice.
        objective: of this step: applied to the last stage's output.
        documents: of this step: what its tokens see; ``None`` where attention has no borders.
        values: results that another action will take, by the slot of their action.
        outputs: for each micro-batch the objective's result, summed over slices.
    """

    def __init__(self, schedule: Schedule, rank: int, transport: Transport) -> None:
        self.schedule, self.rank = schedule, rank
        self.actions = tuple(schedule.rows[rank])
        self.lanes: list[Lane] = [lane_of(action, schedule.placement) for action in self.actions]
        self.before: list[list[Callable[[], None]]] = [[] for _ in self.actions]
        self.after: list[list[Callable[[], None]]] = [[] for _ in self.actions]
        self._transport = transport
        # Computed once: a query of the dependency relation takes longer than an
        # action without compute.
        slots = {action: slot for slot, action in enumerate(self.actions)}
        sources = (_source_of(action, schedule) for action in self.actions)
        self.sources = [None if source is None else slots[source] for source in sources]
        self.begin((), None)

    def begin(
        self, inputs: Sequence[Tensor], objective: Objective | None, documents: StepDocuments | None = None
    ) -> None:
        """Reset before a step, and after one, to free its tensors."""
        self.inputs, self.objective, self.documents = inputs, objective, documents
        self.values: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def slots_of(self, *kinds: Kind) -> list[int]:
        """The slots of the actions of some kinds."""
        return [slot for slot, action in enumerate(self.actions) if action.kind in kinds]

    def needed(self, slot: int) -> list[int]:
        """Slots of this row that the action of a slot waits for, by the dependency relation."""
        first = int(self.schedule.facts.columns.first[self.rank])
        found = [node - first for node in self.schedule.graph.needed(first + slot)]
        # A receive needs a send, which is on another rank, before or behind this row.
        return [other for other in found if 0 <= other < len(self.actions)]

    def input(self, slot: int) -> Tensor | None:
        """Take the result that an action uses; ``None`` for the batch or the loss."""
        source = self.sources[slot]
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
    """The implementation of some kinds of actions. Several executors may share a part, one step at a time.

    Attributes:
        kinds: that it implements.
        waits_by_itself: whether its jobs wait for each other on their lanes. If not, the executor starts an action only
            after the actions of other lanes that it waits for.
    """

    kinds: ClassVar[frozenset[Kind]]
    waits_by_itself: ClassVar[bool] = False

    def bind(self, row: RankRow) -> None:
        """Check the schedule and add hooks to ``row.before`` and ``row.after``; called once for each executor.

        Raises:
            UserError: the part cannot run the schedule.
        """

    def begin(self, row: RankRow) -> Sequence[Service]:  # noqa: ARG002  few parts have to do something
        """Called before a step; returns jobs that run concurrently with the row and end with the step."""
        return ()

    def starter(self, row: RankRow, slot: int) -> Callable[[], UnderWay | None]:
        """``start`` for a slot; called once, so that what the row decides need not be looked up in every step."""
        return partial(self.start, row, slot)

    def start(self, row: RankRow, slot: int) -> UnderWay | None:
        """Run the action of a slot, or start it and return its operation, if it runs concurrently with compute."""
        raise NotImplementedError

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Use the result of a started operation; called once, before the first action that needs it."""

    def span(self, slot: int, done: Mapping[int, UnderWay], seconds: Callable[[Mark], float]) -> tuple[float, float]:
        """Start and end of a started action; ``done`` has all operations of the step by slot."""
        return seconds(done[slot].begin), seconds(done[slot].end)

    def other_end(self, row: RankRow, slot: int) -> str:
        """The other end of an action, as text."""
        return f"rank {row.lanes[slot].peer}"

    def held(self) -> Held:
        """Peaks of the step."""
        return Held()

    def end(self, row: RankRow) -> None:
        """Called after the row, when all operations have ended."""

    def forget(self) -> None:
        """Reset after a failed step."""


class MessagePart(Part):
    """A part whose actions are messages between ranks."""

    def span(self, slot: int, done: Mapping[int, UnderWay], seconds: Callable[[Mark], float]) -> tuple[float, float]:  # noqa: ARG002
        """From its start to its end by the host's clock, which both ranks have in common."""
        return done[slot].begin, done[slot].end
