"""The clock: dependencies hold, lanes never overlap, and transfers cost what the formulas give."""

from collections import defaultdict
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from families import named_sizes
from hypothesis import given, settings

from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Action, Kind, parse_schedule
from pipeloom.simulation import simulate

quick = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class OddCosts:
    """Every action takes another number of seconds."""

    transfer_s: int = 0
    ignores_microbatch = False

    def seconds(self, action: Action) -> float:
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            return self.transfer_s
        if "SEND" in action.kind.value:
            return 0
        return 3 + (7 * action.stage + 5 * (action.microbatch or 0) + 11 * (action.kind is not Kind.FORWARD)) % 13


@st.composite
def schedules(draw):
    name, fits = draw(named_sizes())
    pp, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return make_schedule(name, pp=pp, num_microbatches=count, **fits)


def gradient_letters(schedule):
    """For each stage and micro-batch the half that makes its input's gradient, or the whole; some mix them."""
    makers = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    actions = (action for row in schedule.rows for action in row if action.kind in makers)
    return {(action.stage, action.microbatch): action.kind.value for action in actions}


def start_times(schedule, costs):
    """Earliest starts of a compute-level schedule, found rank by rank from what F, B, I and W mean."""
    ends, letters = {}, gradient_letters(schedule)
    position, free, starts = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks, {}
    while any(position[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        before = list(position)
        for rank, row in enumerate(schedule.rows):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            stage, microbatch = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                needs = [("F", stage - 1, microbatch)] if stage else []
            elif action.kind is Kind.BACKWARD_WEIGHT:
                needs = [("I", stage, microbatch)]
            else:
                above = letters.get((stage + 1, microbatch))
                needs = [("F", stage, microbatch)] + ([(above, stage + 1, microbatch)] if above else [])
            if all(need in ends for need in needs):
                starts[action] = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = ends[action.kind.value, stage, microbatch] = starts[action] + costs.seconds(action)
                position[rank] += 1
        assert position != before, "nothing can start"
    return starts


@quick
@given(schedules())
def test_every_action_starts_when_its_rank_and_its_inputs_are_ready_and_no_later(schedule):
    trace = simulate(schedule, OddCosts())
    assert {span.action: span.start_s for span in trace.spans} == start_times(schedule, OddCosts())
    assert all(span.end_s - span.start_s == OddCosts().seconds(span.action) for span in trace.spans)


@quick
@given(schedules(), st.integers(1, 3))
def test_messages_that_take_no_time_change_nothing(schedule, buffers):
    without = {span.action: span for span in simulate(schedule, OddCosts()).spans}
    lowered = simulate(lower(schedule, buffers), OddCosts(transfer_s=0))
    assert {span.action: span for span in lowered.compute()} == without


@quick
@given(schedules(), st.integers(1, 3), st.integers(0, 9))
def test_a_lane_runs_one_action_at_a_time_in_the_order_of_its_row(schedule, buffers, transfer):
    lowered = lower(schedule, buffers)
    trace = simulate(lowered, OddCosts(transfer))
    last_end = defaultdict(float)
    for span in trace.spans:
        assert span.start_s >= last_end[span.rank, span.lane]
        last_end[span.rank, span.lane] = span.end_s
    assert [span.action for span in trace.spans] == [action for row in lowered.rows for action in row]
    for rank in range(lowered.num_ranks):
        assert [s.action for s in trace.spans if s.rank == rank] == list(lowered.rows[rank])


@quick
@given(schedules(), st.integers(1, 3), st.integers(0, 9))
def test_nothing_starts_before_what_it_uses_has_arrived(schedule, buffers, transfer):
    trace = simulate(lower(schedule, buffers), OddCosts(transfer))
    span_of = {str(span.action): span for span in trace.spans}
    owner, letters = schedule.placement.rank_by_stage, gradient_letters(schedule)
    for span in trace.compute():
        stage, microbatch = span.action.stage, span.action.microbatch
        if span.action.kind is Kind.FORWARD:
            source, letter = stage - 1, "F"
        elif span.action.kind is Kind.BACKWARD_WEIGHT:
            source, letter = stage, "I"
        else:
            source, letter = stage + 1, letters.get((stage + 1, microbatch))
            assert span.start_s >= span_of[f"{stage}F{microbatch}"].end_s
        if not 0 <= source < schedule.num_stages:
            continue
        made = span_of[f"{source}{letter}{microbatch}"]
        crosses = owner[source] != owner[stage]
        message = letter if letter == "F" else "B"
        assert span.start_s >= made.end_s + (transfer if crosses else 0)
        if crosses:
            send = span_of[f"{source}SEND_{message}{microbatch}"]
            receive = span_of[f"{stage}RECV_{message}{microbatch}"]
            assert made.end_s <= send.start_s <= send.end_s <= receive.start_s <= receive.end_s <= span.start_s


def test_the_same_schedule_and_costs_give_the_same_trace():
    schedule = lower(make_schedule("depth-first", pp=3, loops=2, num_microbatches=6))
    again = lower(make_schedule("depth-first", pp=3, loops=2, num_microbatches=6))
    assert simulate(schedule, OddCosts(2)) == simulate(again, OddCosts(2))


@pytest.mark.parametrize(("weight_s", "found"), [(3.0, "-1"), (float("nan"), "nan")])
def test_a_negative_time_is_refused_with_its_action(weight_s, found):
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1I0 1W0 1F1 1I1 1W1")
    costs = StageCosts((1.0, 1.0), (2.0, 2.0), weight_s=(1.0, weight_s))
    message = f"at least 0 seconds, found {found} for 1I0 on rank 1, the first of {4 if found == 'nan' else 2} such"
    with pytest.raises(UserError, match=message):
        simulate(schedule, costs)
    simulate(parse_schedule("0F0 0B0\n1F0 1B0"), costs)  # half a backward does not matter there


def makespans(name, pp, loops, count, buffers, transfer):
    """Makespan of an ideal step, and what transfers add to it; a forward takes 8, a backward 16."""
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    ideal = simulate(schedule, Costs(8, 16)).end_s
    return ideal, simulate(lower(schedule, buffers), Costs(8, 16, transfer)).end_s - ideal


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
def test_breadth_first_pays_for_a_transfer_only_at_both_ends_of_the_step(pp):
    checked = 0
    for loops in (1, 2, 4):
        for count in range(1, 13):
            for transfer in (1, 2, 4):
                if count * 8 >= pp * (8 + transfer):
                    for buffers in (2, 5):
                        _, extra = makespans("breadth-first", pp, loops, count, buffers, transfer)
                        assert extra == 2 * (pp - 1) * transfer
                        checked += 1
    assert checked >= 50


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_depth_first_pays_for_a_transfer_at_every_stage(pp):
    for loops in (1, 2, 4):
        for groups in (1, 2, 3):
            for transfer in (1, 2, 4):
                for buffers in (2, 5):
                    _, extra = makespans("depth-first", pp, loops, pp * groups, buffers, transfer)
                    assert extra == 2 * (pp * loops - 1) * transfer


def test_breadth_first_without_micro_batches_to_spare_pays_at_every_loop():
    _, extra = makespans("breadth-first", 4, 4, 4, 2, 4)
    assert extra == 2 * (4 * 4 - 1) * 4  # one round of four leaves nothing to hide the way round the ranks behind


def test_groups_a_little_above_the_ranks_hide_transfers_as_well_as_breadth_first():
    schedule = make_schedule("hybrid", pp=4, loops=4, num_microbatches=12, group_size=6)
    ideal = simulate(schedule, Costs(8, 16)).end_s
    assert simulate(lower(schedule), Costs(8, 16, 4)).end_s - ideal == 2 * 3 * 4


def test_a_single_receive_buffer_exposes_every_transfer():
    _, one = makespans("breadth-first", 2, 2, 4, 1, 2)
    _, two = makespans("breadth-first", 2, 2, 4, 2, 2)
    assert two == 2 * (2 - 1) * 2
    assert one == 2 * 4 * 2 * 2  # both directions, each micro-batch, each loop


def test_a_receive_starts_no_earlier_than_its_place_in_the_row():
    early = parse_schedule("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1")
    late = parse_schedule("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1")
    costs = Costs(forward_s=10, backward_s=20, transfer_s=10)
    assert [span.start_s for span in simulate(early, costs).spans if span.rank == 1] == [10, 20, 20, 30]
    assert [span.start_s for span in simulate(late, costs).spans if span.rank == 1] == [10, 20, 30, 40]


def test_one_edge_moves_one_message_at_a_time():
    schedule = lower(make_schedule("forward-only", pp=2, loops=1, num_microbatches=4), receive_buffers=9)
    ends = [s.end_s for s in simulate(schedule, Costs(1, 2, transfer_s=5)).spans if s.action.kind is Kind.RECV_F]
    assert ends == [6, 11, 16, 21]


def test_a_gather_delays_the_compute_that_needs_it_and_a_reduction_delays_nothing():
    @dataclass(frozen=True)
    class Costs:
        ignores_microbatch = True

        def seconds(self, action):
            return {"UNSHARD": 5, "REDUCE_GRAD": 50}.get(action.kind.value, 1)

    rows = parse_schedule("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD")
    trace = simulate(rows, Costs())
    assert [(str(s.action), s.start_s) for s in trace.spans] == [
        ("0UNSHARD", 0),
        ("1UNSHARD", 5),
        ("0F0", 5),
        ("1F0", 10),
        ("1B0", 11),
        ("1REDUCE_GRAD", 12),
        ("0B0", 12),
        ("0REDUCE_GRAD", 62),
    ]


def test_a_split_backward_takes_as_long_as_a_whole_one():
    costs = Costs(forward_s=1, backward_s=6)
    whole = simulate(parse_schedule("0F0 0B0"), costs)
    split = simulate(parse_schedule("0F0 0I0 0W0"), costs)
    assert (whole.end_s, split.end_s) == (7, 7)
    assert [span.start_s for span in split.spans] == [0, 1, 4]


def test_the_input_half_unblocks_the_stage_before():
    split = parse_schedule("0F0 0I0 0W0\n1F0 1I0 1W0")
    spans = {str(span.action): span for span in simulate(split, Costs(1, 6)).spans}
    assert spans["0I0"].start_s == spans["1I0"].end_s == spans["1W0"].start_s == 5


def test_slices_wait_for_each_other_ascending_forward_and_descending_backward():
    sliced = parse_schedule("0F0 0F0.1 0B0.1 0B0\n1F0 1F0.1 1B0.1 1B0")
    starts = {str(span.action): span.start_s for span in simulate(sliced, Costs(1, 2)).spans}
    assert starts["1F0"] == 1
    assert starts["1F0.1"] == 2
    assert starts["1B0.1"] == 3
    assert starts["0B0.1"] == 5
    assert starts["1B0"] == 5
    assert starts["0B0"] == 7


def test_costs_of_another_number_of_stages_are_refused():
    """Too few would fail at an index, and too many would be ignored."""
    schedule = make_schedule("1f1b", pp=2, num_microbatches=2)
    costs = StageCosts((1.0,), (2.0, 2.0, 2.0), boundary_s=(0.5,))
    with pytest.raises(
        UserError, match="2 stages: forward_s must have 2 values, found 1; backward_s must have 2 values"
    ):
        simulate(schedule, costs)
