"""Token slices of a described run, from the command line's view and from the planner's."""

import json
from dataclasses import replace

import pytest

from pipeloom.cli import main
from pipeloom.config import RunConfig
from pipeloom.errors import UserError
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.slice_lengths import best_slices, modelled_table, plan_slices
from pipeloom.predict.describe import describe
from pipeloom.predict.step import simulate_step
from pipeloom.schedule.ledger import PARTS
from pipeloom.workload.layout import Layout

FEW = RunConfig(layout=Layout(pp=4, loops=1, num_microbatches=2))


def plan(config, unit=None):
    return plan_slices(describe(config), config.knobs(), unit)


def cut(config, slices):
    return replace(config, layout=replace(config.layout, token_slices=slices))


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "breadth-first", "depth-first"])
def test_chosen_slices_beat_even_ones_and_whole_sequences(family):
    found = plan(replace(FEW, schedule=replace(FEW.schedule, family=family)))
    assert len(found.lengths) > 1
    assert sum(found.lengths) == 128
    even_s = [one.step.prediction.step_time_s for one in found.even]
    assert [len(one.lengths) for one in found.even] == [1, 2, 4, 8, 16, 32, 64]
    assert found.step.prediction.step_time_s < min(even_s) < even_s[0]


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "breadth-first"])
def test_no_number_of_even_slices_and_no_choice_of_the_program_is_faster(family):
    placed, knobs = describe(FEW), replace(FEW, schedule=replace(FEW.schedule, family=family)).knobs()
    table = modelled_table(placed, 8)
    program = best_slices(table, 4, knobs.choice.num_microbatches).lengths

    def step_s(lengths):
        sliced = replace(placed.run, slices=lengths if len(lengths) > 1 else ())
        chosen = replace(knobs, choice=replace(knobs.choice, num_slices=len(lengths)))
        return simulate_step(placed.of(sliced), chosen).prediction.step_time_s

    found = plan_slices(placed, knobs, 8).step.prediction.step_time_s
    assert found <= step_s(program)
    assert found <= min(step_s(table.even(number).lengths) for number in range(1, 17))


def test_auto_is_what_the_plan_chooses():
    assert predict_step(cut(FEW, "auto")).run.slices == plan(FEW).lengths


def test_enough_micro_batches_need_no_slices():
    assert plan(RunConfig(layout=Layout(pp=2, loops=2, num_microbatches=64))).lengths == (128,)


def test_slices_hold_fewer_activations_by_their_lengths():
    """1F1B holds P micro-batches on its first rank; with K slices P - 1 + K of them, of which K make a micro-batch."""
    config = replace(FEW, layout=replace(FEW.layout, num_microbatches=8), schedule=replace(FEW.schedule, family="1f1b"))
    whole, even, uneven = (predict_step(cut(config, slices)) for slices in (None, 4, (64, 32, 16, 16)))
    held = [step.prediction.memory_by_rank[0].activations_bytes for step in (whole, even, uneven)]
    # Seven slices may be of three micro-batches, each with all of its keys and values.
    kept = even.sizes.kept(even.schedule)
    first, second, *others = kept.whole[0]
    assert held[1] == pytest.approx(3 * first + 2 * second + sum(others) + 3 * kept.caches[0])
    assert held[1] < held[2] < held[0]
    curves = [step.memory_over_time[0].peak_parts["stage inputs"] for step in (whole, even, uneven)]
    assert "stage inputs" in PARTS
    assert curves == pytest.approx(held)


@pytest.mark.parametrize("unit", [0, 3, 7])
def test_a_unit_that_does_not_fit_is_refused(unit):
    with pytest.raises(UserError, match="the unit must divide data.seq_len 128"):
        plan(FEW, unit)


def test_the_command_prints_the_flag_that_takes_its_answer(capsys):
    words = ["--layout.pp", "4", "--layout.loops", "1", "--layout.num-microbatches", "2"]
    assert main(["slices", *words]) == 0
    text = capsys.readouterr().out
    lengths = plan(FEW).lengths
    assert f"--layout.token-slices {' '.join(map(str, lengths))}" in text
    assert main(["slices", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found["lengths"]) == lengths
    assert found["even"][0]["number"] == 1
    flags = ["--layout.token-slices", *map(str, lengths)]
    assert main(["simulate", *words, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(found["step_time_s"])


@pytest.mark.parametrize("slices", [None, 4, (64, 32, 16, 16)])
def test_a_program_that_blocks_accounts_for_every_slice(slices):
    """Its exchanges are in compute actions, more of them with slices; parts of a rank's step still add up to it."""
    config = cut(replace(FEW, machine=replace(FEW.machine, cluster="dgx-a100", software="megatron-2021")), slices)
    step = predict_step(replace(config, training=replace(config.training, dtype="float16")))
    for account in step.accounts:
        assert sum(account.to_dict().values()) == pytest.approx(step.prediction.step_time_s)
        assert account.to_dict()["exposed_p2p_s"] > 0
        assert account.to_dict()["compute_s"] > 0
