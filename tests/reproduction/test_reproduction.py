"""docs/reproduction: its data files are what the code computes, its tables are the data files, its sentences hold."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_software, names
from pipeloom.cost.flops import hardware_flops
from reproduction import batch, cost_time, facts, kept, loops, sensitivity, tables
from reproduction.fastest import fastest, loop_counts
from reproduction.machine import MEGATRON, MODELS, OWN, base_run, candidate

DATA = {name: tables.read_rows(name) for name in tables.NAMES}


def test_the_facts_are_computed_again_and_all_hold():
    found = facts.facts()
    assert found == DATA["facts"]
    assert {row["group"] for row in found} == set(facts.TITLES)
    assert [row for row in found if row["agrees"] != "yes"] == []


def test_what_the_project_promises_is_among_the_facts():
    gathers = {row["what"]: row["simulated"] for row in DATA["facts"] if row["group"] == "gathers"}
    assert gathers["depth-first, P 4, V 4, M 32"] == "163"
    assert [gathers[f"breadth-first, P 4, V 4, M {count}"] for count in (4, 8, 32)] == ["7"] * 3


def test_the_traffic_of_groups_is_counted_again():
    assert facts.group_traffic() == DATA["group_traffic"]


def test_the_figure_over_the_loops_is_simulated_again():
    assert loops.loop_rows() == DATA["loops"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", batch.METHODS)
def test_the_best_configurations_of_small_batches_are_searched_again(model, method):
    for sequences in (8, 16):
        stored = [
            row
            for row in DATA["batch"]
            if (row["model"], row["messages"], row["method"], row["batch"]) == (model, "cut", method, str(sequences))
        ]
        assert [batch.best(model, "cut", method, sequences)] == stored


def test_the_page_shows_the_data():
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page, DATA) == page


# ---------------------------------------------------------------------------------------------- sentences of the page


def speed(network, schedule, count, loop):
    (row,) = [
        row
        for row in DATA["loops"]
        if (row["network"], row["schedule"], row["num_microbatches"], row["loops"])
        == (network, schedule, str(count), str(loop))
    ]
    return float(row["tflop_per_s"])


def test_depth_first_loses_at_every_number_of_loops():
    for network in loops.NETWORKS:
        for count in (8, 16, 64):
            for loop in (2, 4, 8):
                assert speed(network, "depth-first", count, loop) < speed(network, "breadth-first", count, loop)


def test_the_gap_grows_with_the_micro_batches():
    for network in loops.NETWORKS:
        for loop in (2, 4, 8):
            gaps = [
                speed(network, "breadth-first", count, loop) / speed(network, "depth-first", count, loop)
                for count in (8, 16, 64)
            ]
            assert gaps == sorted(gaps)


def test_with_whole_messages_depth_first_pays_for_eight_loops():
    best = {n: max(loops.LOOPS, key=lambda loop, n=n: speed("whole", "depth-first", n, loop)) for n in (8, 16, 64)}
    assert best == {8: 4, 16: 2, 64: 1}
    for count in (16, 64):
        assert speed("whole", "depth-first", count, 8) < speed("whole", "depth-first", count, 1)
        assert speed("whole", "breadth-first", count, 8) > speed("whole", "breadth-first", count, 1)


def test_on_a_slow_network_every_loop_of_depth_first_is_a_loss_from_sixteen_micro_batches_on():
    for count in (16, 64):
        assert max(speed("slow", "depth-first", count, loop) for loop in (2, 4, 8)) < speed(
            "slow", "depth-first", count, 1
        )


@pytest.mark.parametrize("messages", ["cut", "whole"])
@pytest.mark.parametrize("model", MODELS)
def test_breadth_first_is_ahead_of_megatron_above_the_smallest_batch_and_even_there(model, messages):
    gains = tables.gains(DATA["batch"], model, messages)
    assert set(gains) == set(batch.BATCHES)  # it fits everywhere
    assert min(gain for sequences, (gain, _) in gains.items() if sequences > 8) > 0
    assert abs(gains[8][0]) < 0.1


def test_the_text_about_calibrated_programs():
    programs = [load_software(name) for name in names("software")]
    assert max(program.efficiency.exchange_s for program in programs) < 1e-4
    found = [program.efficiency.data_bus for program in programs]
    assert min(found) < OWN.efficiency.data_bus < max(found)


def test_with_slow_collectives_breadth_first_is_still_ahead_at_the_largest_batch():
    found = [
        float(row["gain"])
        for row in DATA["sensitivity"]
        if row["change"].startswith("data-parallel bandwidth: 0.2") and row["batch"] == str(sensitivity.LARGEST)
    ]
    assert len(found) == 2
    assert min(found) > 0


def test_at_the_smallest_batch_cut_messages_are_worth_more_than_the_order():
    cut = max(speed("cut", "depth-first", 8, loop) for loop in loops.LOOPS)
    whole = max(speed("whole", "breadth-first", 8, loop) for loop in loops.LOOPS)
    assert cut > whole


def test_the_published_gain_lies_between_the_two_kinds_of_messages_against_1f1b():
    found = {
        row["messages"]: float(row["gain_over_1f1b"])
        for row in DATA["sensitivity"]
        if row["change"] == "as in the catalog" and row["batch"] == "8"
    }
    assert found["whole"] < 0.43 < found["cut"]


# --------------------------------------------------------------------------------- cost and time; nothing recomputed

SCALED = cost_time.with_devices(DATA["batch"], DATA["scaled"])


@pytest.mark.parametrize(
    ("model", "messages", "method", "devices", "sequences"),
    [
        ("gpt-52b", "whole", "breadth-first", 4096, 16),
        ("gpt-52b", "cut", "1F1B", 1024, 64),
        ("gpt-6.6b", "cut", "depth-first", 256, 8),
        ("gpt-6.6b", "cut", "no pipeline", 4096, 64),
    ],
)
def test_points_of_larger_clusters_are_searched_again(model, messages, method, devices, sequences):
    row = cost_time.scaled(model, messages, method, devices, sequences)
    assert row in DATA["scaled"]
    assert int(row["tp"]) * int(row["pp"]) * int(row["dp"]) == devices


@pytest.mark.parametrize(("model", "method", "sequences"), [("gpt-52b", "1F1B", 512), ("gpt-6.6b", "GPipe", 8)])
def test_configurations_without_recomputation_are_searched_again(model, method, sequences):
    assert kept.kept(model, method, sequences) in DATA["kept"]


def test_days_and_device_days_follow_from_utilization_and_batch():
    row = {"model": "gpt-52b", "messages": "cut", "method": "1F1B", "devices": "64", "batch_per_device": "2"}
    (found,) = cost_time.curve([{**row, "tflop_per_s": "40"}], "gpt-52b", "cut", "1F1B", "recalled", is_simulated=True)
    shape = MODELS["gpt-52b"]
    tokens = 20 * shape.parameters * (1 + 128 / 6780)
    seconds = tokens * hardware_flops(shape, 1024, "full") / (64 * 40e12)
    assert found.days == pytest.approx(seconds / 86400)
    assert found.device_days == 64 * found.days


@pytest.mark.parametrize("method", batch.METHODS)
def test_the_papers_assumption_is_the_simulation_on_64_and_costs_the_samples_elsewhere(method):
    for model in MODELS:
        simulated, assumed = (
            cost_time.curve(SCALED, model, "cut", method, "recalled", is_simulated=is_simulated)
            for is_simulated in (True, False)
        )
        assert simulated[0] == assumed[0]
        assert [best.devices for best in assumed] == list(cost_time.SIZES)
        costs = [best.device_days for best in assumed]
        assert costs == sorted(costs)
        batches = [best.batch_per_device for best in assumed]
        assert batches == sorted(batches, reverse=True)


def test_breadth_first_is_ahead_of_megatron_on_every_cluster_and_less_so_by_the_papers_extrapolation():
    for model in MODELS:
        for messages in ("cut", "whole"):
            gains = {
                (critical, is_simulated): tables.cost_time_gains(
                    SCALED, model, messages, critical, is_simulated=is_simulated
                )
                for critical in cost_time.CRITICAL
                for is_simulated in (True, False)
            }
            for critical in cost_time.CRITICAL:
                assert min(gains[critical, True].values()) > 0.165
                assert max(gains[critical, True].values()) < 0.325
                assert 0.06 < gains[critical, False][4096] < 0.18
            for devices in cost_time.SIZES:
                assert abs(gains["recalled", True][devices] - gains["fit", True][devices]) < 0.08


@pytest.mark.parametrize("model", MODELS)
def test_no_pipeline_is_the_cheapest_of_small_clusters_and_breadth_first_of_large_ones(model):
    curves = {
        method: cost_time.curve(SCALED, model, "cut", method, "recalled", is_simulated=True) for method in batch.METHODS
    }
    for number, devices in enumerate(cost_time.SIZES):
        best = min(curves, key=lambda method, n=number: curves[method][n].days)
        assert best == ("no pipeline" if devices <= 256 else "breadth-first")


def test_without_recomputation_1f1b_passes_depth_first_and_never_breadth_first():
    found = {
        size: {method: float(row["mfu"]) for method, row in of_size.items()}
        for size, of_size in tables.kept_mfu(DATA["kept"], "gpt-52b").items()
    }
    passes = [size for size, mfu in found.items() if mfu["1F1B"] > mfu.get("depth-first", 1)]
    assert passes == [size for size in found if size >= 1.5]
    assert [size for size, mfu in found.items() if mfu["1F1B"] > mfu.get("breadth-first", 0)] == []
    assert [size for size, mfu in found.items() if max(mfu, key=mfu.get) == "no pipeline"] == [4, 6, 8]
    again = {
        row["batch_per_device"]: row["recompute"]
        for row in DATA["kept"]
        if row["model"] == "gpt-52b" and row["method"] == "breadth-first"
    }
    assert [float(size) for size, kind in again.items() if kind == "full"] == [0.75, 1, 1.5, 2, 3, 4, 6, 8]


# ------------------------------------------------------------------------------------------ the fastest of candidates


@pytest.mark.parametrize("method", batch.METHODS)
def test_the_fastest_candidate_is_that_of_simulating_everything(method):
    candidates = list(batch.METHODS[method](batch.Setting("gpt-6.6b", 16), OWN, MEGATRON))
    steps = [candidate.simulate() for candidate in candidates]
    fitting = [step.prediction.step_time_s for step in steps if step.prediction.fits]
    found = fastest(candidates)
    assert found is not None
    assert found.prediction.step_time_s == min(fitting)


def test_nothing_is_fastest_where_nothing_fits():
    run = replace(base_run("gpt-52b"), global_batch=8)
    assert fastest([candidate(run, OWN, "breadth-first")]) is None


def test_loops_divide_the_layers():
    assert loop_counts(12, 4) == [1, 3]
    assert loop_counts(12, 5) == []
