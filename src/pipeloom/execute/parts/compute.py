"""Forwards and backwards on a rank's stages."""

from collections.abc import Callable, Mapping, Sequence

from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TokenSlices
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.saved import Parcel
from pipeloom.execute.stages.stage import Portion, Stage, Tally
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
        self._tally = Tally()
        self._portions: dict[int, Portion] = {}
        self._runs_again: set[int] = set()
        self._starter_of: dict[Kind, Callable[[RankRow, int, Action, Stage], Callable[[], None]]] = {
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
        self._tally.begin()
        for stage in self.stages.values():
            stage.documents, stage.tally = row.documents, self._tally
        return ()

    def starter(self, row: RankRow, slot: int) -> Callable[[], None]:
        """The action."""
        action = row.actions[slot]
        return self._starter_of[action.kind](row, slot, action, self.stages[action.stage])

    def held(self) -> Held:
        """Peaks of stage inputs, and of activations that wait for weight gradients."""
        inputs, input_bytes, pending, pending_bytes = self._tally.most
        # In micro-batches, rounded up: the first slice counts as a whole one.
        inputs = -(-inputs // self._num_slices)
        return Held(stage_inputs=inputs, stage_input_bytes=input_bytes, pending=pending, pending_bytes=pending_bytes)

    def forget(self) -> None:
        """Free all activations."""
        for stage in self.stages.values():
            stage.forget()

    def _forward(self, row: RankRow, slot: int, action: Action, stage: Stage) -> Callable[[], None]:
        portion, keeper, source = self._portions[slot], self._keeper, row.sources[slot]
        number, is_last = portion.number(self._num_slices), action.stage == self._last
        trains, runs_again = action.stage >= self._first_that_trains, slot in self._runs_again

        def run() -> None:
            tensor = row.inputs[number] if source is None else row.values.pop(source)
            objective = row.objective if is_last else None
            # Without a backward autograd saves nothing.
            parcel = keeper.parcel(action, owns_input=source is not None) if trains else None
            if runs_again:
                output = stage.forward_once(portion, tensor, objective, parcel)
            else:
                output = stage.forward(portion, tensor, objective, trains=trains, parcel=parcel)
            if trains:
                keeper.after_forward(action, stage)
            if is_last:
                so_far = row.outputs.get(portion.microbatch)
                # The losses of a micro-batch's slices are parts of its loss.
                row.outputs[portion.microbatch] = output if so_far is None else so_far + output
            else:
                row.values[slot] = output

        return run

    def _recompute(self, row: RankRow, slot: int, action: Action, stage: Stage) -> Callable[[], None]:
        portion, keeper, is_last = self._portions[slot], self._keeper, action.stage == self._last

        def run() -> None:
            # The stage owns the input that it keeps, unless it is a part of the batch.
            parcel = keeper.parcel(action, owns_input=action.stage > 0)
            stage.recompute(portion, row.objective if is_last else None, parcel)
            keeper.after_forward(action, stage)

        return run

    def _backward(self, row: RankRow, slot: int, action: Action, stage: Stage) -> Callable[[], None]:
        return self._with_kept(row, slot, action, stage)

    def _backward_input(self, row: RankRow, slot: int, action: Action, stage: Stage) -> Callable[[], None]:
        run_with_kept, tally = self._with_kept(row, slot, action, stage, is_whole=False), self._tally

        def run() -> None:
            before = tally.pending_bytes
            run_with_kept()
            self._keeper.after_input_gradient(action, tally.pending_bytes - before)

        return run

    def _with_kept(
        self, row: RankRow, slot: int, action: Action, stage: Stage, *, is_whole: bool = True
    ) -> Callable[[], None]:
        """Run a backward on the activations of a forward, and store the gradient that it returns."""
        portion, keeper, source = self._portions[slot], self._keeper, row.sources[slot]

        def run() -> None:
            keeper.before_backward(action)
            backward = stage.backward if is_whole else stage.backward_input
            gradient = backward(portion, None if source is None else row.values.pop(source))
            keeper.after_backward(action, stage)
            if gradient is not None:
                row.values[slot] = gradient

        return run

    def _backward_weight(self, row: RankRow, slot: int, action: Action, stage: Stage) -> Callable[[], None]:  # noqa: ARG002
        portion, keeper = self._portions[slot], self._keeper

        def run() -> None:
            stage.backward_weight(portion)
            keeper.after_backward(action, stage)

        return run
