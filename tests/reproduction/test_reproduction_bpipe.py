"""docs/reproduction/bpipe.md: its data files are computed again, its tables are the data files, its sentences hold."""

import re

import pytest

from pipeloom.accuracy.schedules import predict
from pipeloom.catalog import load_software
from pipeloom.cost.placed import Placed
from pipeloom.families import Choice
from pipeloom.passes import Moves
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Kind
from pipeloom.simulation import simulate
from reproduction import bpipe, bpipe_cases, bpipe_tables, tables
from reproduction.bpipe_cases import COUNTED, FUSED, GPT_96B, LLAMA_65B, OTHER, PROGRAM, PROGRAMS, SMALL, Setting
from reproduction.bpipe_links import link_rows
from reproduction.bpipe_tables import best_balanced, best_plain, best_short, find, gain, gain_over_short, of

ROWS, LINKS = (tables.read_rows(name) for name in bpipe_tables.NAMES)
PAGE = bpipe_tables.PAGE.read_text(encoding="utf-8")
TWO = Setting("fused-softmax", "selective", 2)


def fused(case, program=PROGRAM):
    return of(ROWS, case, program, "fused-softmax")


def flash(case, program=PROGRAM):
    return of(ROWS, case, program, "flash2")


def cases(model):
    return [case for case in bpipe_cases.CASES if case.model == model]


@pytest.mark.parametrize("case", [GPT_96B, LLAMA_65B], ids=lambda case: case.model)
@pytest.mark.parametrize("program", [PROGRAM, COUNTED, OTHER])
def test_configurations_are_simulated_again(case, program):
    for setting in (TWO, Setting("flash2", "none", 4), Setting("fused-softmax", "full", 1)):
        assert bpipe.described(case, program, setting) in ROWS


@pytest.mark.parametrize("case", bpipe_cases.CASES, ids=lambda case: case.name)
def test_every_case_is_simulated_again_at_one_place(case):
    assert bpipe.described(case, PROGRAM, TWO) in ROWS


def test_the_data_has_every_point_once():
    keys = [(row["case"], row["program"], row["attention"], row["recompute"], row["micro_batch"]) for row in ROWS]
    requested = [
        (case.name, program, one.attention, one.recompute, str(one.micro_batch))
        for case, program, one in bpipe_cases.points()
    ]
    assert keys == requested
    assert len(set(keys)) == len(keys)


def test_the_links_are_simulated_again():
    assert link_rows() == LINKS


def test_the_page_shows_the_data():
    assert bpipe_tables.filled(PAGE, ROWS, LINKS) == PAGE


# ------------------------------------------------------------------------------------------- what is simulated is BPipe


def test_the_balanced_schedule_keeps_the_order_and_the_time_of_1f1b():
    run, software = bpipe.run_of(GPT_96B, TWO), bpipe_cases.program_of(GPT_96B, PROGRAM)
    costs = bpipe.costs_of(bpipe.paired(run), software)
    plain, balanced = bpipe.plain(run), bpipe.balanced(run, costs)
    assert balanced.partners == (7, 6, 5, 4, 3, 2, 1, 0)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    assert [[a for a in row if a.kind in kinds] for row in balanced.rows] == [
        [a for a in row if a.kind in kinds] for row in plain.rows
    ]
    assert simulate(balanced, costs).end_s == pytest.approx(simulate(plain, costs).end_s)


def test_no_rank_of_a_balanced_step_holds_more_than_five_micro_batches():
    run, software = bpipe.run_of(GPT_96B, TWO), bpipe_cases.program_of(GPT_96B, PROGRAM)
    costs = bpipe.costs_of(bpipe.paired(run), software)
    balanced = bpipe.balanced(run, costs)
    _, curves = bpipe.held_curves(run, software, balanced, simulate(balanced, costs))
    each = max(bpipe.kept_bytes(run, software))
    for curve in curves:
        assert curve.peak_parts["stage inputs"] + curve.peak_parts["accepted"] <= 5 * each
    plain = bpipe.plain(run)
    _, before = bpipe.held_curves(run, software, plain, simulate(plain, costs))
    assert before[0].peak_parts["stage inputs"] == 8 * bpipe.kept_bytes(run, software)[0]


def test_a_step_without_bpipe_is_what_the_project_predicts():
    run, software = bpipe.run_of(GPT_96B, TWO), bpipe_cases.program_of(GPT_96B, PROGRAM)
    step = bpipe.steps(GPT_96B, PROGRAM, TWO)["1f1b"]
    assert step.seconds == pytest.approx(
        predict(Placed(run, bpipe_cases.CLUSTER, software), "1f1b").prediction.step_time_s
    )


def test_a_balanced_step_is_what_the_project_simulates():
    run, software = bpipe.paired(bpipe.run_of(GPT_96B, TWO)), bpipe.program_of(GPT_96B, PROGRAM)
    choice = Choice(family="1f1b", pp=run.pp, num_microbatches=run.num_microbatches)
    own = simulate_step(Placed(run, bpipe_cases.CLUSTER, software), Knobs(choice=choice, moves=Moves(balance=True)))
    step = bpipe.steps(GPT_96B, PROGRAM, TWO)["bpipe"]
    assert step.seconds == pytest.approx(own.prediction.step_time_s)
    assert step.fits
    assert own.prediction.fits


def test_costs_come_from_calibrations_on_other_models():
    megatron, plain, flash2 = map(load_software, ("megatron-2021", "scaling-2023a", "scaling-2023b"))
    use = PROGRAMS[PROGRAM].efficiency
    assert (use.matmul, use.memory, use.tensor_bus) == (
        megatron.efficiency.matmul,
        megatron.efficiency.memory,
        megatron.efficiency.tensor_bus,
    )
    assert use.softmax_bytes == plain.efficiency.softmax_bytes
    assert use.flash2 == flash2.efficiency.flash2
    assert f"({use.softmax_bytes:.1f} bytes moved for each score)" in PAGE
    assert f"{bpipe_cases.COUNTED_SOFTMAX_BYTES:g} bytes for each score" in PAGE


# ---------------------------------------------------------------------------------------------- sentences of the page


def test_against_whole_layers_the_published_gain_is_reproduced():
    assert gain(fused(GPT_96B), "full") == pytest.approx(1.24, abs=0.006)
    gains = [gain(fused(case), "full") for case in cases("134B") if case.pp == 12]
    assert min(gains) == pytest.approx(1.23, abs=0.006)
    assert max(gains) == pytest.approx(1.27, abs=0.005)


def test_against_the_best_it_is_reproduced_with_the_counted_softmax_alone():
    calibrated, counted = (fused(GPT_96B, program) for program in (PROGRAM, COUNTED))
    assert gain(calibrated, "selective") == gain(calibrated) == pytest.approx(1.13, abs=0.005)
    assert gain(counted, "selective") == pytest.approx(1.27, abs=0.005)
    assert 1.24 < gain(counted) < 1.25


def test_it_is_the_kernel():
    assert [find(fused(GPT_96B), "selective", size)["kernel"] for size in (1, 2, 4)] == [
        "plain",
        "fused-softmax",
        "fused-softmax",
    ]
    assert gain(fused(GPT_96B, FUSED)) == pytest.approx(1.0, abs=0.006)
    assert {row["kernel"] for row in fused(LLAMA_65B)} == {"fused-softmax"}


def test_flash_attention_removes_the_gain():
    for program in (PROGRAM, COUNTED, FUSED, OTHER):
        assert gain(flash(GPT_96B, program)) == pytest.approx(1.015, abs=0.006)


def test_llama_hardly_gains():
    gains = [gain(fused(LLAMA_65B, program)) for program in (PROGRAM, COUNTED, FUSED, OTHER)]
    assert 1.0 < min(gains) <= max(gains) < 1.03
    assert gain(flash(LLAMA_65B)) < 1
    for rows, recompute in ((fused(LLAMA_65B), "selective"), (flash(LLAMA_65B), "none")):
        two, four = (find(rows, recompute, size) for size in (2, 4))
        assert float(four["bpipe_mfu"]) < float(two["1f1b_mfu"])


def test_the_largest_published_gain_is_not_reached():
    assert bpipe_tables.most(ROWS)[0] < bpipe_tables.PUBLISHED_GAIN[1]


def test_it_hangs_on_three_gigabytes():
    row = find(fused(GPT_96B), "selective", 2)
    assert float(row["1f1b_fullest_gb"]) - bpipe_cases.CLUSTER.device.memory_bytes / 1e9 == pytest.approx(3.1, abs=0.1)
    lack = bpipe.steps(GPT_96B, PROGRAM, TWO)["1f1b"]
    assert sum(held > bpipe_cases.CLUSTER.device.memory_bytes for held in lack.rank_bytes) == 1
    assert best_balanced(fused(GPT_96B, SMALL)) is None
    assert find(fused(GPT_96B, SMALL), "selective", 2)["1f1b_fits"] == "yes"


def test_a_few_micro_batches_recomputed_are_nearly_as_good():
    again = best_short(fused(GPT_96B))
    assert (again["recompute"], again["micro_batch"], again["again"]) == ("selective", "2", str(64 // 4))
    assert gain_over_short(fused(GPT_96B)) == pytest.approx(1.04, abs=0.005)
    assert all(float(row["short_fullest_gb"]) <= 85 for row in ROWS if row["short_fits"] == "yes")


def test_how_far_off_the_remembered_figures_are():
    off = [
        100 * (float(find(of(ROWS, case, PROGRAM, attention), recompute, size)[f"{order}_mfu"]) - mfu)
        for case in (GPT_96B, LLAMA_65B)
        for attention in bpipe_cases.ATTENTION
        for (recompute, size, order), mfu in bpipe_tables.RECALLED[case.name, attention].items()
    ]
    assert 5 < min(off) <= max(off) < 16.5


def test_order_of_the_remembered_pairs():
    same = {}
    for (name, attention), recalled in bpipe_tables.RECALLED.items():
        (case,) = [case for case in bpipe_cases.CASES if case.name == name]
        rows = of(ROWS, case, PROGRAM, attention)
        found = {key: float(find(rows, *key[:2])[f"{key[2]}_mfu"]) for key in recalled}
        same[case.model, attention] = sorted(found, key=found.get) == sorted(recalled, key=recalled.get)
    assert [key for key, is_same in same.items() if not is_same] == [("96B", "flash2")]


def test_balancing_levels_memory_and_costs_no_time():
    row = find(fused(GPT_96B), "selective", 2)
    levels = [float(row[f"{order}_fullest_gb"]) - float(row[f"{order}_emptiest_gb"]) for order in bpipe_tables.ORDERS]
    assert levels == pytest.approx([25.2, 6.5], abs=0.3)
    for row in ROWS:
        assert float(row["bpipe_mfu"]) == pytest.approx(float(row["1f1b_mfu"]), rel=1e-3)
    for row in fused(GPT_96B):
        if row["recompute"] == "none" or (row["micro_batch"], row["recompute"]) == ("4", "selective"):
            assert row["bpipe_fits"] == "no"


def test_unpublished_settings_decide():
    by_heads = {
        case.shape.heads: (gain(fused(case)), gain(fused(case, COUNTED))) for case in cases("134B") if case.pp == 12
    }
    assert by_heads[88] == pytest.approx((1.08, 1.18), abs=0.006)
    for heads in (84, 96, 112):
        assert by_heads[heads] == pytest.approx((1.0, 1.0), abs=0.012)
    twelve = best_plain(fused(next(case for case in cases("96B") if case.pp == 12)))
    assert twelve["micro_batch"] == "2"
    wide = [case for case in bpipe_cases.CASES if case.tp == 8]
    runs = [bpipe.run_of(case, TWO) for case in wide]
    assert [bpipe.paired(run) for run in runs] == runs
    assert [
        (case.shape.heads, round(gain(rows), 2), round(gain(counted), 2))
        for case in wide
        for rows, counted in [(fused(case), fused(case, COUNTED))]
        if best_balanced(rows) is not None
    ] == [(88, 1.06, 1.15)]
    assert max(gain(flash(case)) or 0 for case in wide) < 1
    small = {case.batch: case for case in cases("96B") if case.pp == 8 and case.tp == 4}
    gains = [gain(fused(small[batch])) for batch in sorted(small)]
    assert gains == sorted(gains)
    assert gain(flash(small[32])) < 0.92


@pytest.mark.parametrize("case", [GPT_96B, LLAMA_65B], ids=lambda case: case.model)
def test_the_estimate_is_half_a_percent_from_the_simulation(case):
    for rows, recompute in ((fused(case), "selective"), (flash(case), "none")):
        for pair in bpipe_tables.PAIRS:
            estimate, simulated = bpipe_tables.compared(case, *(find(rows, recompute, size) for size in pair))
            assert simulated / estimate - 1 == pytest.approx(0, abs=0.006)


def test_what_a_stage_has_to_gain():
    assert f"{1 / bpipe_tables.bubble_factor(GPT_96B, 1, 2) - 1:.1%}" == "5.2%"
    assert f"{1 / bpipe_tables.bubble_factor(GPT_96B, 2, 4) - 1:.1%}" == "9.9%"
    for case in (GPT_96B, LLAMA_65B):
        one, two, four = (float(find(flash(case), "none", size)["stage_mfu"]) for size in (1, 2, 4))
        assert 1.06 < two / one < 1.08
        assert four / two < 1.099


def test_over_nvlink_nothing_waits_and_over_infiniband_only_what_was_not_made_for_it():
    by_link = {}
    for row in LINKS:
        by_link.setdefault(row["link"], []).append(row)
    near, far, wrong, enough = by_link.values()
    assert [float(row["slower"]) for row in near + far] == [0.0] * 8
    shares = [float(row["swap_ms"]) / float(row["forward_ms"]) for row in near]
    assert 0.11 < min(shares) <= max(shares) < 0.2
    assert all(float(row["swap_ms"]) > float(row["forward_ms"]) for row in far)
    more = [float(a["fullest_gb"]) - float(b["fullest_gb"]) for a, b in zip(far, near, strict=True)]
    assert more == pytest.approx([3.6, 3.7, 12.7, 12.6], abs=0.5)
    assert float(far[3]["fullest_gb"]) * 1e9 > bpipe_cases.CLUSTER.device.memory_bytes
    losses = [float(row["slower"]) for row in wrong]
    assert 0.04 < min(losses) <= max(losses) < 0.15
    assert [(row["moved"], row["slower"]) for row in enough[:2]] == [("24", "0.0000")] * 2
    assert near[0]["moved"] == "138"
    assert min(float(row["in_the_way"]) for row in near) > 0.03
    assert max(float(row["in_the_way"]) for row in near) < 0.051
    assert all(1 < float(row["message_ms"]) < 2 for row in LINKS)


def test_the_page_names_the_blocks_in_order():
    assert re.findall(r"<!-- (?!end)([\w ]+) -->", PAGE) == list(bpipe_tables.blocks(ROWS, LINKS))
