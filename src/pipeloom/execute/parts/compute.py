"""Forwards and backwards on a rank's stages."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TokenSlices
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.saved import Parcel
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import COMPUTE_KINDS


class Keeper:
    """Hooks at points where activations are saved and freed; these do nothing."""

    def parcel(self, action: Action, *, owns_input: bool) -> Parcel | None:  # noqa: ARG002
        """Container for the tensors that a forward or recomputation saves; ``None`` leaves them to autograd."""
        return None

    def after_forward(self, action: Action, stage: Stage) -> None:
        """After a forward or a recomputation."""

    def before_backward(self, action: Action) -> None:
        """Before a backward, which frees one tensor after the other."""

    def after_backward(self, action: Action, stage: Stage) -> None:
        """After a whole backward or a weight gradient: the activations are free."""

    def after_input_gradient(self, action: Action, pending_bytes: int) -> None:
        """After an input gradient, which keeps ``pending_bytes`` until the weight gradient."""


class Compute(Part):
    """Runs compute actions on the stages of one rank.

    Args:
        stages: by global index.
        slices: token slices of a micro-batch; ``None`` for whole sequences.
        keeper: hooks for activations.

    Attributes:
        stages: as given.
    """

    kinds = COMPUTE_KINDS

    def __init__(
        self, stages: Mapping[int, Stage], *, slices: TokenSlices | None = None, keeper: Keeper | None = None
    ) -> None:
        self.stages, self._keeper = stages, keeper or Keeper()
        self._num_slices = 1 if slices is None else len(slices.lengths)
        self._most: tuple[int, ...] = (0, 0, 0, 0)
        self._portions: dict[int, Portion] = {}
        self._runs_again: set[int] = set()
        self._run_of: dict[Kind, Callable[[RankRow, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.RECOMPUTE: self._recompute,
        }

    def bind(self, row: RankRow) -> None:
        """Look up the stage of each slot.

        Raises:
            UserError: the schedule has another number of token slices.
        """
        schedule = row.schedule
        if schedule.num_slices != self._num_slices:
            raise UserError(
                f"the schedule cuts micro-batches into {schedule.num_slices} token slices, found lengths for "
                f"{self._num_slices}"
            )
        self._last, self._first_that_trains = schedule.num_stages - 1, schedule.first_backward_stage
        is_recomputed = schedule.facts.is_recomputed
        for slot in row.slots_of(*self.kinds):
            _, stage, microbatch, part = row.actions[slot]
            assert microbatch is not None
            self._portions[slot] = Portion(microbatch, part)
            if is_recomputed[stage, microbatch, part]:
                self._runs_again.add(slot)

    def begin(self, row: RankRow) -> Sequence[Service]:
        """Reset the peaks, and set what the stages' tokens see in this step."""
        self._most = (0, 0, 0, 0)
        for stage in self.stages.values():
            stage.documents = row.documents
        return ()

    def start(self, row: RankRow, slot: int) -> None:
        """Run the action."""
        self._run_of[row.actions[slot].kind](row, slot)

    def held(self) -> Held:
        """Peaks of stage inputs, and of activations that wait for weight gradients."""
        inputs, input_bytes, pending, pending_bytes = self._most
        return Held(stage_inputs=inputs, stage_input_bytes=input_bytes, pending=pending, pending_bytes=pending_bytes)

    def forget(self) -> None:
        """Free all activations."""
        for stage in self.stages.values():
            stage.forget()

    def _forward(self, row: RankRow, slot: int) -> None:
        action, portion = row.actions[slot], self._portions[slot]
        stage, index = self.stages[action.stage], action.stage
        tensor = row.input(slot)
        owns_input = tensor is not None
        if tensor is None:
            tensor = row.inputs[portion.number(self._num_slices)]
        objective = row.objective if index == self._last else None
        trains = index >= self._first_that_trains
        # Without a backward autograd saves nothing.
        parcel = self._keeper.parcel(action, owns_input=owns_input) if trains else None
        if slot in self._runs_again:
            output = stage.forward_once(portion, tensor, objective, parcel)
        else:
            output = stage.forward(portion, tensor, objective, trains=trains, parcel=parcel)
        if trains:
            self._keeper.after_forward(action, stage)
            self._count()
        if index == self._last:
            so_far = row.outputs.get(portion.microbatch)
            # The losses of a micro-batch's slices are parts of its loss.
            row.outputs[portion.microbatch] = output if so_far is None else so_far + output
        else:
            row.values[action] = output

    def _recompute(self, row: RankRow, slot: int) -> None:
        action = row.actions[slot]
        objective = row.objective if action.stage == self._last else None
        # The stage owns the input that it keeps, unless it is a part of the batch.
        parcel = self._keeper.parcel(action, owns_input=action.stage > 0)
        stage = self.stages[action.stage]
        stage.recompute(self._portions[slot], objective, parcel)
        self._keeper.after_forward(action, stage)
        self._count()

    def _backward(self, row: RankRow, slot: int) -> None:
        self._use_kept(row, slot, self.stages[row.actions[slot].stage].backward)

    def _backward_input(self, row: RankRow, slot: int) -> None:
        action = row.actions[slot]
        stage = self.stages[action.stage]
        before = stage.pending_bytes
        self._use_kept(row, slot, stage.backward_input)
        self._keeper.after_input_gradient(action, stage.pending_bytes - before)
        self._count()

    def _use_kept(self, row: RankRow, slot: int, run: Callable[[Portion, Tensor | None], Tensor | None]) -> None:
        """Run an action on the activations of a forward, and store the gradient that it returns."""
        action = row.actions[slot]
        self._keeper.before_backward(action)
        gradient = run(self._portions[slot], row.input(slot))
        self._keeper.after_backward(action, self.stages[action.stage])
        if gradient is not None:
            row.values[action] = gradient

    def _backward_weight(self, row: RankRow, slot: int) -> None:
        action = row.actions[slot]
        stage = self.stages[action.stage]
        stage.backward_weight(self._portions[slot])
        self._keeper.after_backward(action, stage)

    def _count(self) -> None:
        """Update the peaks, after a forward or an input gradient."""
        stages = self.stages.values()
        now = (
            # In micro-batches, rounded up: the first slice counts as a whole one.
            -(-sum(stage.num_held for stage in stages) // self._num_slices),
            sum(stage.held_bytes for stage in stages),
            sum(stage.num_pending for stage in stages),
            sum(stage.pending_bytes for stage in stages),
        )
        self._most = tuple(map(max, self._most, now))  # plain numbers: this runs at every forward
