"""PyTorch's pipelining schedules and ours read, check and reproduce each other."""

import csv
import itertools

import pytest
from families import fitting
from torch.distributed.pipelining import _schedule_visualizer as visualizer
from torch.distributed.pipelining import schedules as torch_schedules

from pipeloom.errors import ScheduleError, ScheduleTextError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import Level
from pipeloom.schedule.kinds import COMPUTE_KINDS

LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
SHAPES = [(2, 2, 2), (2, 2, 6), (2, 3, 4), (3, 2, 6), (4, 2, 8), (4, 3, 4)]


def order(name, pp, loops, count):
    """The compute order of one of torch's schedules, a list of texts for each rank."""
    rows = visualizer.get_schedule_ops(name, pp, count, loops)
    return [[str(a) for a in row if a is not None and a.is_compute_op] for row in rows]


def lowered_by_torch(rows, pp, num_stages, count, stage_to_rank):
    """What torch makes of compute rows: unshard and reshard, gradient reduction, sends and receives."""
    actions = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    sharded = {rank: torch_schedules._add_unshard_reshard(row) for rank, row in actions.items()}
    reduced = {rank: torch_schedules._add_reduce_grad(row, count) for rank, row in sharded.items()}
    lowered = torch_schedules._add_send_recv(reduced, stage_to_rank, num_stages)
    return [[str(action) for action in lowered[rank]] for rank in range(pp)]


def as_csv(rows):
    return "".join(",".join(row) + "\n" for row in rows)


def our_rows(name, pp, loops, count):
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    return [list(map(str, row)) for row in schedule.rows]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("placement", ["looped", "v", "linear"])
def test_torch_reads_every_cell_of_our_export_as_the_same_action(name, placement):
    compute = make_schedule(name, pp=3, num_microbatches=4, **fitting(name, 2, placement))
    for schedule in (compute, lower(compute)):
        with_reductions = parse_torch_csv(format_torch_csv(schedule))
        for row, cells in zip(with_reductions.rows, csv.reader(format_torch_csv(schedule).splitlines()), strict=True):
            for action, cell in zip(row, cells, strict=True):
                stage, kind, microbatch, sub_actions = torch_schedules._Action.from_str(cell)
                assert (stage, kind.value, microbatch) == (action.stage, action.kind.value, action.microbatch)
                assert sub_actions is None


def test_torch_reads_stage_actions_as_the_same_action():
    text = "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    (row,) = parse_torch_csv(text).rows
    for action, cell in zip(row, text.strip().split(","), strict=True):
        stage, kind, microbatch, _ = torch_schedules._Action.from_str(cell)
        assert (stage, kind.value, microbatch) == (action.stage, action.kind.value, action.microbatch)


@pytest.mark.parametrize("level", Level)
def test_torchs_runtime_loads_our_csv(tmp_path, level):
    schedule = make_schedule("breadth-first", pp=3, loops=2, num_microbatches=4)
    schedule = lower(schedule) if level is Level.COMMUNICATION else schedule
    file = tmp_path / "schedule.csv"
    file.write_text(format_torch_csv(schedule), encoding="utf-8")
    stage = visualizer.mock.create_autospec(visualizer.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, 3, None, 6
    runtime = torch_schedules._PipelineScheduleRuntime([stage, stage], 4)
    runtime._load_csv(str(file), format="compute_only" if level is Level.COMPUTE else "compute_comms")
    loaded = runtime.pipeline_order if level is Level.COMPUTE else runtime.pipeline_order_with_comms
    expected = {rank: [torch_schedules._Action.from_str(str(a)) for a in row] for rank, row in enumerate(schedule.rows)}
    if level is Level.COMMUNICATION:
        expected = {rank: torch_schedules._add_reduce_grad(row, 4) for rank, row in expected.items()}
    assert loaded == expected
    assert tuple(runtime.stage_index_to_group_rank[stage] for stage in range(6)) == schedule.placement.rank_by_stage


@pytest.mark.parametrize(("pp", "loops", "count"), [*SHAPES, (3, 2, 3), (4, 2, 10), (4, 2, 3), (3, 4, 8), (2, 2, 1)])
def test_depth_first_is_torchs_interleaved_1f1b(pp, loops, count):
    assert our_rows("depth-first", pp, loops, count) == order("Interleaved1F1B", pp, loops, count)


@pytest.mark.parametrize(("pp", "loops", "count"), [*SHAPES, (4, 2, 3), (3, 2, 5)])
def test_breadth_first_is_torchs_looped_bfs_but_for_the_microbatches_of_the_backward(pp, loops, count):
    expected = []
    for row in order("LoopedBFS", pp, loops, count):
        half = len(row) // 2
        backward = [row[half + i * count : half + (i + 1) * count][::-1] for i in range(loops)]
        expected.append(row[:half] + list(itertools.chain(*backward)))
    assert our_rows("breadth-first", pp, loops, count) == expected


@pytest.mark.parametrize(("pp", "count"), [(1, 2), (2, 2), (3, 5), (4, 8)])
def test_gpipe_is_torchs_gpipe(pp, count):
    assert our_rows("gpipe", pp, 1, count) == order("GPipe", pp, None, count)


@pytest.mark.parametrize(("pp", "count"), [(2, 2), (3, 5), (4, 8)])
def test_1f1b_is_torchs_1f1b_on_the_ranks_where_torch_counts_right(pp, count):
    ours, theirs = our_rows("1f1b", pp, 1, count), order("1F1B", pp, None, count)
    assert ours[:-1] == theirs[:-1]
    with pytest.raises(ScheduleError, match="rule 'complete'"):
        parse_torch_csv(as_csv(theirs))  # its last rank skips micro-batch 0 and names one too many


@pytest.mark.parametrize(("pp", "loops", "count"), SHAPES)
@pytest.mark.parametrize("name", [*LOOPED, "ZBVZeroBubble"])
def test_torchs_own_lowering_is_accepted_and_so_is_what_it_started_from(name, pp, loops, count):
    loops = 2 if name == "ZBVZeroBubble" else loops
    rows = order(name, pp, loops, count)
    compute = parse_torch_csv(as_csv(rows))
    assert compute.level is Level.COMPUTE
    owner = compute.placement.rank_by_stage
    assert owner == tuple(next(r for r in range(pp) if f"{s}F0" in rows[r]) for s in range(pp * loops))
    theirs = lowered_by_torch(rows, pp, pp * loops, count, lambda stage: owner[stage])
    with_messages = parse_torch_csv(as_csv(theirs))
    assert with_messages.level is Level.COMMUNICATION
    assert [[str(a) for a in row] for row in with_messages.rows] == theirs
    runtime = visualizer.get_schedule_ops(name, pp, count, loops, with_comms=True)
    assert parse_torch_csv(as_csv([[str(a) for a in row] for row in runtime])) == with_messages


@pytest.mark.parametrize(("pp", "count"), [(2, 3), (4, 6)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_torchs_lowering_of_our_rows_without_loops_is_accepted(name, pp, count):
    rows = our_rows(name, pp, 1, count)
    theirs = lowered_by_torch(rows, pp, pp, count, lambda stage: stage)
    assert parse_torch_csv(as_csv(theirs)).num_microbatches == count


@pytest.mark.parametrize(("pp", "loops", "count"), SHAPES)
@pytest.mark.parametrize("name", ["depth-first", "breadth-first", "hybrid"])
def test_torch_sends_the_same_tensors_in_the_same_order(name, pp, loops, count):
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    rows = [list(map(str, row)) for row in schedule.rows]
    theirs = lowered_by_torch(rows, pp, pp * loops, count, lambda stage: stage % pp)
    for row, other in zip(lower(schedule).rows, theirs, strict=True):
        ours = list(map(str, row))
        assert [a for a in ours if "SEND" in a] == [a for a in other if "SEND" in a]
        assert sorted(a for a in ours if "RECV" in a) == sorted(a for a in other if "RECV" in a)


def test_torchs_deferred_receives_are_refused_where_they_take_tensors_in_another_order_than_they_are_sent():
    rows = visualizer.get_schedule_ops("ZBVZeroBubble", 2, 4, 2, with_comms=True, defer_pp_recv=True)
    texts = [[str(action) for action in row] for row in rows]
    # stages 0 and 3 on rank 0, 1 and 2 on rank 1: what rank 1 takes from rank 0, and what rank 0 sends
    taken = [a for a in texts[1] if a.startswith(("1RECV_F", "2RECV_B"))]
    sent = [a for a in texts[0] if a.startswith(("0SEND_F", "3SEND_B"))]
    matching = [a.replace("0SEND", "1RECV").replace("3SEND", "2RECV") for a in sent]
    assert sorted(taken) == sorted(matching)
    assert taken != matching
    with pytest.raises(ScheduleError, match="rule 'sends-match-receives' at rank 1"):
        parse_torch_csv(as_csv(texts))


def gathers(rows):
    return [sum(str(action).endswith("UNSHARD") for action in row) for row in rows]


@pytest.mark.parametrize("name", ["breadth-first", "depth-first"])
@pytest.mark.parametrize(("pp", "loops", "count"), [(4, 4, 8), (4, 4, 32), (4, 8, 32), (2, 3, 4), (3, 2, 6)])
def test_torch_gathers_as_often_with_one_stage_resident_and_never_less_often_with_more(name, pp, loops, count):
    schedule = lower(make_schedule(name, pp=pp, loops=loops, num_microbatches=count))
    compute = [[a for a in row if a.kind in COMPUTE_KINDS] for row in schedule.rows]
    for residency in range(1, loops + 1):
        theirs = gathers(
            torch_schedules._add_unshard_reshard([torch_schedules._Action.from_str(str(a)) for a in row], residency)
            for row in compute
        )
        ours = gathers(add_unshard(schedule, residency, 1).rows)
        assert ours == theirs if residency == 1 else all(a <= b for a, b in zip(ours, theirs, strict=True))


def test_torch_gathers_more_often_than_needed_where_two_stages_are_resident():
    rows = make_schedule("depth-first", pp=4, loops=4, num_microbatches=32).rows
    theirs = torch_schedules._add_unshard_reshard([torch_schedules._Action.from_str(str(a)) for a in rows[0]], 2)
    ours = add_unshard(lower(make_schedule("depth-first", pp=4, loops=4, num_microbatches=32)), 2, 1).rows
    assert gathers([theirs])[0] > gathers(ours)[0]


@pytest.mark.parametrize(("residency", "buffers"), [(None, None), (2, None), (1, 1)])
def test_torchs_runtime_loads_gathers_and_reductions_as_they_stand(tmp_path, residency, buffers):
    schedule = lower(make_schedule("depth-first", pp=3, loops=2, num_microbatches=6))
    schedule = add_reduce_grad(add_unshard(schedule, residency, 1), buffers)
    file = tmp_path / "schedule.csv"
    file.write_text(format_torch_csv(schedule), encoding="utf-8")
    stage = visualizer.mock.create_autospec(visualizer.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, 3, None, 6
    runtime = torch_schedules._PipelineScheduleRuntime([stage, stage], 6)
    runtime._load_csv(str(file), format="compute_comms")
    loaded = runtime.pipeline_order_with_comms
    assert [[str(a) for a in loaded[rank]] for rank in range(3)] == [list(map(str, row)) for row in schedule.rows]


def test_an_overlapped_pair_of_dual_pipe_is_refused_with_a_clear_message():
    rows = visualizer.get_schedule_ops("DualPipeV", 2, 4, 2)
    text = as_csv([["" if action is None else str(action) for action in row] for row in rows])
    assert "OVERLAP_F_B" in text
    with pytest.raises(ScheduleTextError, match="is an overlapped pair, which pipeloom does not read"):
        parse_torch_csv(text)
