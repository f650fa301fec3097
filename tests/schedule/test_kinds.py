"""The table of kinds, against what it must fit: PyTorch's names, and the lanes."""

import pytest

from pipeloom.schedule.kinds import KINDS, STAGE_KINDS, Group, Kind
from pipeloom.schedule.lanes import Lane


def test_codes_number_the_rows():
    assert [kind.code for kind in Kind] == list(range(len(KINDS)))
    assert [KINDS[kind.code] for kind in Kind] == list(Kind)


def test_pytorch_has_the_kinds_that_the_table_says_and_no_other_that_a_row_can_hold():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = {kind.value for kind in schedules._ComputationType}
    # An overlapped pair is two actions of ours.
    assert {kind.value for kind in Kind if kind.in_torch} == theirs - {"OVERLAP_F_B"}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.lane not in {"send", "recv"}])
def test_lanes_are_texts_that_are_read_back(kind):
    assert Lane.parse(kind.lane) == Lane(kind.lane)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.partner_letter])
def test_partners_are_of_opposite_groups_and_one_scope(kind):
    opposite = {Group.SEND: Group.RECEIVE, Group.TIED_SEND: Group.TIED_RECEIVE, Group.MOVE_OUT: Group.MOVE_BACK}
    opposite |= {back: out for out, back in opposite.items()}
    assert kind.partner.group is opposite[kind.group]
    assert (kind.partner in STAGE_KINDS) == (kind in STAGE_KINDS)
