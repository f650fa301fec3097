"""Every kind of action has a price, or is free on purpose."""

import pytest

from pipeloom.cost import costs
from pipeloom.cost.costs import Costs
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import STAGE_KINDS

COSTS = Costs(forward_s=1, backward_s=2, transfer_s=3)


def action_of(kind):
    return Action(kind, 1, None if kind in STAGE_KINDS else 0)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_seconds(kind):
    assert COSTS.seconds(action_of(kind)) >= 0


def test_a_kind_without_a_price_is_not_free(monkeypatch):
    monkeypatch.delitem(costs._NAMES, Kind.UPDATE)
    with pytest.raises(KeyError):
        COSTS.seconds(action_of(Kind.UPDATE))
