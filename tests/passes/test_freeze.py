"""The pass that freezes stages: what it removes, and that the rest is a schedule that trains."""

import pytest

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, Choice, make_schedule
from pipeloom.passes import add_data_parallel, exchanges, freeze, lower
from pipeloom.schedule import Kind
from pipeloom.simulation import simulate

WHOLE = sorted(name for name, one in FAMILIES.items() if one.has_backward and not one.splits_backward)


def test_frozen_stages_run_forwards_only():
    schedule = freeze(make_schedule("1f1b", pp=2, num_microbatches=3), 1)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 0F2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert schedule.first_backward_stage == 1


@pytest.mark.parametrize("family", WHOLE)
def test_every_family_is_proven_with_frozen_stages_and_takes_no_longer(family):
    loops = FAMILIES[family].loops or (2 if FAMILIES[family].is_looped else 1)
    sizes = {"pp": 3, "loops": loops, "num_microbatches": 6}
    unshard, reduce_grad = exchanges("full", residency=2, prefetch=1, gradient_buffers=None)
    before = None
    for frozen in range(3 * loops):
        schedule = add_data_parallel(
            lower(Choice(family=family, **sizes, frozen_stages=frozen).make()), unshard, reduce_grad
        )
        assert schedule.first_backward_stage == frozen
        reduced = {a.stage for _, _, a in schedule.actions() if a.kind is Kind.REDUCE_GRAD}
        assert reduced == set(range(frozen, 3 * loops))
        gathered = {a.stage for _, _, a in schedule.actions() if a.kind is Kind.UNSHARD}
        assert gathered == set(range(3 * loops))
        step_s = simulate(schedule, Costs(1, 2, 0.01)).end_s
        assert before is None or step_s <= before
        before = step_s


def test_nothing_frozen_is_the_schedule_itself():
    schedule = make_schedule("gpipe", pp=2, num_microbatches=2)
    assert freeze(schedule, 0) is schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: freeze(s, 2), "expected at least one of 2 stages that trains, found 2 frozen"),
        (lambda s: freeze(s, -1), "expected at least one of 2 stages that trains, found -1 frozen"),
        (lambda s: freeze(lower(s), 1), "start from a compute-only schedule"),
    ],
)
def test_what_cannot_be_frozen_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        change(make_schedule("1f1b", pp=2, num_microbatches=2))
