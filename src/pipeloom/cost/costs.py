"""Costs: action -> seconds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pipeloom.calls import checked_class
from pipeloom.errors import UserError
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import HOST_MOVES, PARTNER_MOVES, SEND_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.stage_swaps import NONE, NOTHING, Amounts, Content
from pipeloom.terminal.words import count


class ActionCosts(Protocol):
    """Action -> seconds.

    Attributes:
        ignores_microbatch: whether the seconds do not depend on the micro-batch.
    """

    ignores_microbatch: ClassVar[bool]

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` occupies its lane; for a swap, those of all contents of the stage."""
        ...

    def move_s(self, stage: int, content: Content) -> float:
        """Seconds of moving contents of a stage between device and host, in either direction."""
        ...


_NAMES: dict[Kind, str] = {
    Kind.FORWARD: "forward_s",
    Kind.RECOMPUTE: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.UNSHARD: "unshard_s",
    Kind.REDUCE_GRAD: "reduce_s",
    **dict.fromkeys(PARTNER_MOVES, "evict_s"),
    **dict.fromkeys(HOST_MOVES, "offload_s"),
    Kind.RECV_TIED: "tied_s",
    Kind.RECV_TIED_GRAD: "tied_grad_s",
    Kind.UPDATE: "update_s",
}
"""Kind -> attribute of the costs with its seconds."""

# The receive has the seconds of a message; dropping gathered weights takes no time.
_FREE = SEND_KINDS | TIED_SEND_KINDS | {Kind.RESHARD}


class _Named(ABC):
    """Costs whose attributes are seconds: one number, or one for each stage; an empty tuple for 0."""

    ignores_microbatch: ClassVar[bool] = True

    @abstractmethod
    def move_s(self, stage: int, content: Content) -> float:
        """Seconds of moving contents of a stage between device and host, in either direction."""

    @abstractmethod
    def half_s(self, stage: int) -> float:
        """Seconds of the weight half of a stage's split backward."""

    def over_s(self, boundary: int) -> float:
        """Seconds of moving one tensor between the stages ``boundary`` and ``boundary + 1``."""
        return self._of("transfer_s", boundary)

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` occupies its lane."""
        stage = action.stage
        match action.kind:
            case Kind.BACKWARD_INPUT:
                return self._of("backward_s", stage) - self.half_s(stage)
            case Kind.BACKWARD_WEIGHT:
                return self.half_s(stage)
            case Kind.RECV_F:
                return self.over_s(stage - 1)
            case Kind.RECV_B:
                return self.over_s(stage)
            case Kind.SWAP_IN | Kind.SWAP_OUT:
                return self.move_s(stage, ~NOTHING)
        # A kind without costs raises an error instead of being free, which would make the step too short.
        return 0.0 if action.kind in _FREE else self._of(_NAMES[action.kind], stage)

    def _of(self, name: str, stage: int) -> float:
        value: float | tuple[float, ...] = getattr(self, name)
        if isinstance(value, tuple):
            return value[stage] if value else 0.0
        return value


@checked_class
@dataclass(frozen=True)
class Costs(_Named):
    """Seconds of each action, equal for all stages. By default a backward takes two forwards, all else no time.

    Examples:
        >>> Costs(forward_s=0.010, backward_s=0.021, transfer_s=0.001).transfer_s
        0.001

    Attributes:
        forward_s: seconds of one stage's forward for one micro-batch.
        backward_s: seconds of the full backward; the halves of a split backward add up to it.
        transfer_s: seconds of a message from when both sides are ready until it has arrived. They are the receive's, so
            that an edge moves one message at a time.
        unshard_s: seconds of all-gathering one stage's weights; dropping them takes no time.
        reduce_s: seconds of reducing one stage's gradient.
        evict_s: seconds of evicting what a stage keeps for a micro-batch, and of loading it.
        offload_s: seconds of moving what a stage keeps for a micro-batch to the host, and of bringing it back.
        tied_s: seconds of sending a tied embedding's weights to the head, for its receive.
        tied_grad_s: seconds of sending the head's gradient of them back, for its receive.
        move: seconds of moving each content of a stage between device and host.
        update_s: seconds of the optimizer's step on one stage.
        weight_share: share of the weight half of a split backward: for each matrix product of the forward, one product
            computes the input's gradient and one the weights' (arXiv 2401.10241, section 2).
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    transfer_s: float = 0.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0
    evict_s: float = 0.0
    offload_s: float = 0.0
    tied_s: float = 0.0
    tied_grad_s: float = 0.0
    move: Amounts = NONE
    update_s: float = 0.0
    weight_share: float = 0.5

    def half_s(self, stage: int) -> float:  # noqa: ARG002  all stages are equal
        """Seconds of the weight half of a stage's split backward."""
        return self.backward_s * self.weight_share

    def move_s(self, stage: int, content: Content) -> float:  # noqa: ARG002  all stages are equal
        """Seconds of moving contents of a stage between device and host, in either direction."""
        return self.move.of(content)


@checked_class
@dataclass(frozen=True)
class StageCosts(_Named):
    """Seconds of each action, for each stage.

    Examples:
        >>> StageCosts(forward_s=(1.0, 1.5), backward_s=(2.0, 3.0)).over_s(boundary=0)
        0.0

    Attributes:
        forward_s: for each stage, seconds of its forward for one micro-batch.
        backward_s: for each stage, seconds of its full backward.
        transfer_s: seconds of a message between two stages, for its receive; the minimum, if ``boundary_s`` is given.
        unshard_s: for each stage, seconds of all-gathering its weights; empty for 0.
        reduce_s: for each stage, seconds of reducing its gradient; empty for 0.
        evict_s: for each stage, seconds of evicting what it keeps for a micro-batch, and of loading it; empty for 0.
        offload_s: for each stage, seconds of moving what it keeps for a micro-batch to the host, and of bringing it
            back; empty for 0.
        weight_share: share of the weight half of a split backward, if ``weight_s`` is empty.
        tied_s: seconds of sending a tied embedding's weights to the head, for its receive.
        tied_grad_s: seconds of sending the head's gradient of them back, for its receive.
        boundary_s: for each boundary between consecutive stages, seconds of a message in either direction; empty if all
            take ``transfer_s``.
        moves: for each stage, seconds of moving each of its contents between device and host; empty for 0.
        update_s: for each stage, seconds of the optimizer's step on it; empty if no action does it.
        weight_s: for each stage, seconds of the weight half of its split backward; empty to use ``weight_share``.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float = 0.0
    unshard_s: tuple[float, ...] = ()
    reduce_s: tuple[float, ...] = ()
    evict_s: tuple[float, ...] = ()
    offload_s: tuple[float, ...] = ()
    weight_share: float = 0.5
    tied_s: float = 0.0
    tied_grad_s: float = 0.0
    boundary_s: tuple[float, ...] = ()
    moves: tuple[Amounts, ...] = ()
    update_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()

    def check(self, num_stages: int) -> None:
        """Compare the numbers of values with the number of a schedule's stages.

        Raises:
            UserError: some differ; names all of them.
        """
        values = {name: value for name, value in vars(self).items() if isinstance(value, tuple) and value}
        wanted = {name: num_stages - (name == "boundary_s") for name in values}
        problems = [
            f"{name} must have {count(wanted[name], 'value')}, found {len(value)}"
            for name, value in values.items()
            if len(value) != wanted[name]
        ]
        if problems:
            raise UserError(f"costs of a schedule of {count(num_stages, 'stage')}: {'; '.join(problems)}")

    def move_s(self, stage: int, content: Content) -> float:
        """Seconds of moving contents of a stage between device and host, in either direction."""
        return self.moves[stage].of(content) if self.moves else 0.0

    def half_s(self, stage: int) -> float:
        """Seconds of the weight half of a stage's split backward."""
        return self.weight_s[stage] if self.weight_s else self.backward_s[stage] * self.weight_share

    def over_s(self, boundary: int) -> float:
        """Seconds of moving one tensor between the stages ``boundary`` and ``boundary + 1``."""
        return self.boundary_s[boundary] if self.boundary_s else self.transfer_s
