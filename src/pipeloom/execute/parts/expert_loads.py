"""Loads of experts: counted in forwards, summed over replicas before the backwards that need them."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.errors import UserError
from pipeloom.execute.communication.group import Finish, Group
from pipeloom.execute.parts.part import Part, RankRow, Service
from pipeloom.model.experts import Balance, balances_of
from pipeloom.schedule.kinds import GOES_BACK, GOES_FORTH
from pipeloom.schedule.whole_batch import WHOLE_BATCH, interleaved_stage


class ExpertLoads(Part):
    """Sums the counts of a stage's experts over the replicas, while the rank continues, and sets the stages' mode.

    The sum starts behind the last forward of the stage. Where a balance loss has the loads of the whole batch, it ends
    before the stage's first backward, otherwise with the step. Rows of all replicas are equal, so that they start
    their sums in one order.

    Args:
        modules: this rank's stages by index.
        group: the replicas; used for nothing else.
        device: of the stages.
        size: number of ranks that share the experts.
    """

    kinds = frozenset()

    def __init__(self, modules: Mapping[int, nn.Module], group: Group, device: torch.device, size: int) -> None:
        found = {stage: list(balances_of(module).values()) for stage, module in modules.items()}
        self._balances = {stage: every for stage, every in found.items() if every}
        self._modules = [modules[stage] for stage in self._balances]
        self._group, self._device, self._size = group, device, size
        self._sums: dict[int, tuple[Tensor, Finish]] = {}
        self._trains = False

    def bind(self, row: RankRow) -> None:
        """Add hooks behind the last forward of each stage, and before its first backward."""
        forwards, backwards = row.slots_of(*GOES_FORTH), row.slots_of(*GOES_BACK)
        last = {row.actions[slot].stage: slot for slot in forwards}
        first = {row.actions[slot].stage: slot for slot in reversed(backwards)}
        for stage in self._balances.keys() & first.keys():
            row.after[last[stage]].append(partial(self._start, stage))
            if self._balances[stage][0].kind == "batch":
                row.before[first[stage]].append(partial(self._finish, stage))
        if any(every[0].kind == "batch" for every in self._balances.values()):
            found = interleaved_stage(row.schedule)
            if found is not None:
                raise UserError(WHOLE_BATCH.format(found))

    def begin(self, row: RankRow) -> Sequence[Service]:
        """Count from zero; stages drop tokens beyond a capacity only where the row trains."""
        self._trains = row.schedule.first_backward_stage < row.schedule.num_stages
        self._set_training(self._trains)
        for one in self._every if self._trains else ():
            one.begin(self._device)
        return ()

    def end(self, row: RankRow) -> None:  # noqa: ARG002
        """Finish the sums that no backward needed."""
        for stage in list(self._sums):
            self._finish(stage)
        self._set_training(True)

    def forget(self) -> None:
        """Sums of a failed step do not count."""
        self._sums.clear()
        self._set_training(True)

    @property
    def most(self) -> float:
        """Sum over this rank's layers of the load of the expert with most tokens / the mean load, in the last step."""
        every = (one.counts for one in self._every)
        return sum(
            float(counts.max() * len(counts) / counts.sum().clamp(min=1)) for counts in every if counts is not None
        )

    @property
    def most_of_ranks(self) -> float:
        """As ``most``, of the ranks that share experts: tokens of the fullest one / the mean."""
        size, every = self._size, (one.counts for one in self._every)
        of_ranks = (counts.view(size, -1).sum(1) for counts in every if counts is not None)
        return sum(float(counts.max() * size / counts.sum().clamp(min=1)) for counts in of_ranks)

    @property
    def dropped(self) -> float:
        """Sum over this rank's layers of the share of dropped pairs of a token and an expert, in the last step."""
        return sum(one.dropped for one in self._every)

    @property
    def _every(self) -> list[Balance]:
        return [one for balances in self._balances.values() for one in balances]

    def move_biases(self) -> None:
        """Move the biases of experts by the counts of the last training step."""
        for one in self._every:
            one.move()

    def _set_training(self, trains: bool) -> None:
        for module in self._modules:
            if module.training != trains:
                module.train(trains)

    def _start(self, stage: int) -> None:
        tallies = torch.stack([one.tally for one in self._balances[stage] if one.tally is not None])
        self._sums[stage] = tallies, self._group.all_reduce(tallies)

    def _finish(self, stage: int) -> None:
        tallies, finish = self._sums.pop(stage)
        finish()
        for one, own in zip(self._balances[stage], tallies, strict=True):
            one.tally = own
