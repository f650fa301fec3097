"""Stages that come to the device and go, on the clock of costs: what hides, and what is held."""

import pytest

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.memory import memory_over_time
from pipeloom.analysis.summary import communication
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.families import make_schedule
from pipeloom.passes import add_stage_swaps, add_updates, lower
from pipeloom.schedule import Action, Kind, parse_schedule
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.simulation import simulate

SIZES = [(8, 8), (4, 3), (5, 16)]


def swapped(stages, count, resident=2, place="at once", ahead=1, family="breadth-first"):
    schedule = lower(make_schedule(family, pp=1, loops=stages, num_microbatches=count))
    return add_stage_swaps(add_updates(schedule, place), resident, ahead=ahead)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_a_load_as_long_as_a_forward_visit_is_exposed_once(stages, count):
    move = Amounts(weights=count)
    end_s = simulate(swapped(stages, count), Costs(1, 2, move=move)).end_s
    assert end_s == 3 * stages * count + 2 * count  # the first stage's weights come, the last one's go
    late_s = simulate(swapped(stages, count, ahead=0), Costs(1, 2, move=move)).end_s
    assert late_s > end_s


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_whatever_moves_hides_behind_long_enough_visits(stages, count):
    """Weights, gradient and two moments, with clipping: a forward visit hides what an update moves, seven parts."""
    part = count / 8
    move = Amounts(weights=part, gradient=part, state=2 * part)
    schedule = swapped(stages, count, place="in the next step")
    trace = simulate(schedule, Costs(1, 2, move=move))
    assert trace.end_s == 3 * stages * count + (4 + 1) * part  # the first stage comes, its new gradient goes
    (account,) = account_bubble(schedule, trace)
    assert account.startup_s == 4 * part
    assert account.exposed_swaps_s == part
    assert account.exposed_p2p_s == account.host_s == account.imbalance_s == 0
    uses = {str(use.lane): use for use in communication(trace)}
    assert uses["from host"].exposed_s == 4 * part
    assert uses["to host"].exposed_s == part
    at_end = simulate(swapped(stages, count, place="at the end"), Costs(1, 2, move=move))
    assert at_end.end_s > trace.end_s


def test_depth_first_waits_most_of_the_time():
    found = {}
    for family in ("depth-first", "breadth-first"):
        schedule = swapped(8, 8, family=family)
        trace = simulate(schedule, Costs(1, 2, move=Amounts(weights=8)))
        (account,) = account_bubble(schedule, trace)
        found[family] = account.compute_s / trace.end_s
    assert found["depth-first"] < 0.25
    assert found["breadth-first"] > 0.9


def test_the_same_swap_costs_what_the_row_makes_it_move():
    schedule = parse_schedule(
        "0SWAP_IN 0F0 0SWAP_OUT 1SWAP_IN 1F0 1B0 1SWAP_OUT 0SWAP_IN 0B0 0UPDATE 0SWAP_OUT 1SWAP_IN 1UPDATE 1SWAP_OUT"
    )
    costs = StageCosts(
        (1.0, 1.0),
        (2.0, 2.0),
        moves=(Amounts(weights=1, gradient=10, state=100), Amounts(weights=2, gradient=20, state=200)),
        update_s=(0.5, 0.25),
    )
    found = [(str(span.action), span.end_s - span.start_s) for span in simulate(schedule, costs).spans]
    assert found == [
        ("0SWAP_IN", 1),
        ("0F0", 1),
        ("0SWAP_OUT", 0),  # nothing has changed
        ("1SWAP_IN", 2),
        ("1F0", 1),
        ("1B0", 2),
        ("1SWAP_OUT", 20),  # the gradient alone
        ("0SWAP_IN", 101),
        ("0B0", 2),
        ("0UPDATE", 0.5),
        ("0SWAP_OUT", 101),
        ("1SWAP_IN", 222),
        ("1UPDATE", 0.25),
        ("1SWAP_OUT", 202),
    ]
    assert costs.seconds(Action(Kind.SWAP_IN, 1)) == 222  # all that there is of it


def test_a_stage_is_held_from_the_start_of_its_swap_in_to_the_end_of_its_swap_out():
    schedule = swapped(3, 1, place="at once")
    costs = Costs(1, 2, move=Amounts(weights=1))
    amounts = (Amounts(weights=1, gradient=1, state=2),) * 3
    held = HeldBytes(always_bytes=(1000.0,), kept=KeptBytes([0.0] * 3), stages=amounts)
    (curve,) = memory_over_time(schedule, simulate(schedule, costs), held)
    # 0 comes 0-1, 1 comes 1-2 and stays, 0 goes at 2; 2 comes 2-3, F1 2-3, F2 3-4, B2 4-6, its update at 6; 2 goes 6-7,
    # 0 comes 7-8; B1 6-8, its update at 8; 1 goes 8-9; B0 8-10, 0 goes 10-11. Stages 1 and 2 hold all that there is.
    assert curve.points == ((0, 1001), (1, 1005), (2, 1008), (9, 1004), (11, 1000))
    assert curve.peak_parts["resident stages"] == 8
