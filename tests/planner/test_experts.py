"""Plans of models with experts: orders that know the loads, and what counts as a parameter."""

from dataclasses import replace

import pytest

from pipeloom import load_run, make_question, plan
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cli.plan_layouts import layout_cells
from pipeloom.cli.plan_text import print_plan
from pipeloom.config import ModelConfig, RunConfig
from pipeloom.cost.flops import shape_model_flops
from pipeloom.errors import ConfigError
from pipeloom.export.hand_over import TARGETS
from pipeloom.export.job import Site, make_job
from pipeloom.families import FAMILIES, ends_forwards_first
from pipeloom.planner.fewer_nodes import question_on
from pipeloom.planner.plan import of_training
from pipeloom.planner.question import Limits
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.search import search
from pipeloom.planner.space import arrangements
from pipeloom.planner.strategies import with_frozen
from pipeloom.predict.describe import described_run
from pipeloom.workload.adapter import Adapter
from pipeloom.workload.layout import Layout
from pipeloom.workload.model_shape import Experts

SHAPE = replace(
    load_model("llama-3-8b"),
    layers=8,
    hidden=1024,
    heads=16,
    ffn=2048,
    experts=Experts(count=8, per_token=2, ffn=1024, every=2, shared=1),
    name="mixed",
)


def question(**limits):
    return make_question(SHAPE, "dgx-h100", num_devices=16, global_batch=64, seq=2048, **limits)


def test_parameters_are_those_that_their_sources_state():
    mixtral, qwen = load_model("mixtral-8x7b"), load_model("qwen3-30b-a3b")
    # Published: 46.7 and 12.9 billion (Mixtral), 30.5 and 3.3 billion (Qwen3).
    assert (round(mixtral.parameters / 1e8), round(mixtral.active_parameters / 1e8)) == (467, 129)
    assert (round(qwen.parameters / 1e8), round(qwen.active_parameters / 1e8)) == (305, 34)
    assert shape_model_flops(mixtral, 1) == pytest.approx(6 * mixtral.active_parameters + 12 * 32 * 4096)


def test_orders_that_know_the_whole_batch_are_searched_unless_the_balance_needs_less():
    assert {name for name, one in FAMILIES.items() if one.has_backward and ends_forwards_first(name)} == {
        "breadth-first",
        "gpipe",
    }
    searched = replace(question(), balance="batch")
    assert set(searched.families) == {"breadth-first", "gpipe"}
    others, unstated = replace(searched, balance="microbatch"), question()
    assert {"1f1b", "breadth-first", "depth-first"} <= set(others.families)
    assert (unstated.families, set(unstated.families_of_parts)) == (others.families, {"breadth-first", "gpipe"})
    assert others.families_of_parts == others.families
    assert "slices" in searched.strategies
    assert "slices" in unstated.strategies
    assert "slices" not in others.strategies
    assert replace(searched, shape=replace(SHAPE, experts=None)).families == others.families


@pytest.mark.parametrize("limits", [{"cp": (2,)}, {"strategies": ("slices",), "pp": (4,), "micro_batch": (4,)}])
def test_where_micro_batches_are_divided_experts_are_balanced_over_the_whole_batch(limits):
    found = plan(question(**limits), explains=False)
    assert found.best is not None
    for step in found.steps:
        assert step.run.rank_seq < step.run.seq or step.knobs.choice.num_slices > 1
        assert ends_forwards_first(step.knobs.choice.family)
        assert run_config(step, None, "dgx-h100", "pipeloom").model.balance is None


def test_a_named_schedule_that_the_stated_balance_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="the backwards of 1f1b do not wait for model.balance batch; leave the"):
        replace(question(families=("1f1b",)), balance="batch")


def test_row_1_names_the_balance_that_follows_from_its_schedule(capsys):
    one_by_one = question(families=("1f1b",), pp=(2,), tp=(1,), micro_batch=(1,))
    print_plan(plan(one_by_one, 1, explains=False))
    words = "row 1 balances experts in each micro-batch, since backwards precede forwards; a run file with"
    assert words in " ".join(capsys.readouterr().out.split())
    print_plan(plan(replace(one_by_one, balance="microbatch"), 1, explains=False))
    assert "row 1 balances" not in " ".join(capsys.readouterr().out.split())


def test_a_stated_balance_that_a_plan_for_another_program_replaces_is_named(capsys):
    sizes = {"num_devices": 16, "global_batch": 64, "seq": 2048, "launcher": "megatron", "pp": (2,)}
    unstated = make_question(SHAPE, "dgx-h100", **sizes)
    print_plan(plan(replace(unstated, balance="batch"), 1, explains=False))
    assert "model.balance batch is left out for Megatron-LM" in " ".join(capsys.readouterr().out.split())
    print_plan(plan(unstated, 1, explains=False))
    assert "model.balance" not in capsys.readouterr().out
    divided = plan(unstated.limited(cp=(2,)), 1, explains=False)
    assert run_config(divided.best, None, "dgx-h100", "megatron-core").model.balance == "none"
    print_plan(divided)
    assert "row 1 does not balance experts, since backwards" in " ".join(capsys.readouterr().out.split())


def test_schedules_that_the_balance_of_the_whole_batch_leaves_out_are_named(capsys):
    unlimited = replace(question(), balance="batch")
    left_out = unlimited.unbalanced_families
    assert "1f1b" in left_out
    assert left_out.isdisjoint(unlimited.families)
    assert left_out | set(unlimited.families) == set(replace(unlimited, balance="microbatch").families)
    named = question(families=("1f1b",))
    assert (named.families, named.unbalanced_families) == (("1f1b",), frozenset())
    assert question().unbalanced_families == frozenset()
    print_plan(plan(replace(unlimited, limits=Limits(tp=(1,), pp=(2,), micro_batch=(1,))), 1, explains=False))
    words = f"left out: {len(left_out)} schedules, such as {min(left_out)}, whose backwards do not wait for the balance"
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_plan_is_the_run_that_its_file_trains():
    best = plan(question(pp=(2,), families=("breadth-first", "gpipe")), explains=False).best
    config = run_config(best, None, "dgx-h100", "pipeloom")
    assert config.model.expert_layout == SHAPE.experts
    assert config.model.balance is None
    other = plan(question(pp=(2,), families=("1f1b",), strategies=("none",)), explains=False).best
    assert run_config(other, None, "dgx-h100", "pipeloom").model.balance == "microbatch"


@pytest.mark.parametrize(("stated", "kept"), [(None, "batch"), ("microbatch", "microbatch")])
def test_a_training_goes_on_with_its_balance_on_fewer_devices(stated, kept):
    model = ModelConfig(num_layers=4, hidden_size=64, num_heads=4, experts=4, expert_ffn=64, balance=stated)
    config = RunConfig(model=model, layout=Layout(pp=2, dp=2, num_microbatches=8))
    remaining = question_on(config, described_run(config, "fp32"), "laptop", "pipeloom", num_devices=2)
    assert remaining.balance == kept
    assert ("1f1b" in remaining.families) == (kept == "microbatch")


def test_experts_of_half_the_width_take_longer_than_one_block():
    plain = replace(SHAPE, experts=None)
    alone = plan(question(pp=(1,), tp=(1,), shards=("full",), micro_batch=(1,), recompute=("none",)), explains=False)
    dense = plan(replace(alone.question, shape=plain), explains=False)
    assert alone.best.prediction.step_time_s > dense.best.prediction.step_time_s


def test_megatron_is_planned_within_the_rules_of_its_export():
    """Tensor-parallel ranks divide all activations, and the balance is that of micro-batches, as 1F1B needs."""
    sizes = {"num_devices": 32, "global_batch": 64, "seq": 4096}
    answer = plan(make_question("mixtral-8x7b", "dgx-h100", launcher="megatron", **sizes), 8, explains=False)
    wide = plan(replace(answer.question, limits=Limits(tp=(2,), ep=(2,))), 1, explains=False)
    for step in (*answer.steps, *wide.steps):
        config = run_config(step, "mixtral-8x7b", "dgx-h100", "megatron-core")
        job = make_job(config, step.cluster, Site())
        assert not TARGETS["megatron"].problems(job)
        assert step.run.tp == 1 or step.run.sequence_parallel
        assert config.model.balance == ("microbatch" if step.run.num_microbatches > 1 else None)
    assert (wide.best.run.tp, wide.best.run.ep) == (2, 2)
    first = answer.error_bar.sentences[0]
    assert first.startswith("No measured step has ")
    assert "experts, so the error here may be larger" in first


def test_megatron_has_no_context_axis_with_windows():
    shape = replace(SHAPE, experts=None, window=1024)
    sizes = {"num_devices": 16, "global_batch": 16, "seq": 8192}
    windows, whole = (
        make_question(one, "dgx-h100", launcher="megatron", **sizes) for one in (shape, replace(shape, window=None))
    )
    sizes_of = [{one.run.cp for one in arrangements(question)[0]} for question in (windows, whole)]
    assert sizes_of == [{1}, {1, 2}]


def test_other_programs_are_refused():
    with pytest.raises(
        ConfigError, match="model.experts needs the training program pipeloom or megatron-core, found fsdp"
    ):
        make_question(SHAPE, "dgx-h100", num_devices=16, global_batch=64, seq=2048, software="fsdp")


MIXTURE = replace(SHAPE, name="mixture", vocab=8192, experts=Experts(count=4, per_token=2, ffn=2048))


def short_of_memory(gigabytes):
    cluster = load_cluster("dgx-1-v100")
    return replace(cluster, name="short", device=replace(cluster.device, memory_bytes=gigabytes * 1e9))


def test_where_memory_is_short_experts_are_shared_and_the_written_run_takes_as_long(ask):
    """On one rank all experts of a layer do not fit; to gather their shards costs more than to send tokens."""
    question = ask(shape=MIXTURE, cluster=short_of_memory(2.8), global_batch=16).limited(strategies=("none",))
    found = plan(question, explains=False)
    alone = plan(question.limited(ep=(1,)), explains=False)
    assert found.best.run.ep > 1
    assert all(step.run.data_ranks % step.run.ep == 0 for step in found.steps)
    if alone.best is not None:
        assert found.best.prediction.step_time_s < alone.best.prediction.step_time_s
    for step in found.steps[:3]:
        run = run_config(step, None, "dgx-1-v100", "pipeloom")
        assert run.layout.ep == step.run.ep
        again_s = predict_step(run, by_seconds=True).prediction.step_time_s
        assert again_s == pytest.approx(step.prediction.step_time_s, rel=1e-9)


def test_halves_of_a_micro_batch_are_searched_where_they_hide_the_exchange(ask):
    question = ask(shape=MIXTURE, global_batch=32, seq=2048).limited(strategies=("none",), ep=(4,))
    found, without = (plan(one, explains=False).best for one in (question, question.limited(ep_overlap=(False,))))
    assert (found.run.ep_overlap, without.run.ep_overlap) == (True, False)
    assert found.prediction.step_time_s < without.prediction.step_time_s
    assert layout_cells(found)["ep"] == "4+o"
    config = run_config(found, None, "dgx-1-v100", "pipeloom")
    again_s = predict_step(config, by_seconds=True).prediction.step_time_s
    assert again_s == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    # None of the runs may count whole micro-batches.
    for other in (replace(question, balance="microbatch"), question.limited(families=("1f1b",))):
        assert not any(one.run.ep_overlap for one in arrangements(other)[0])
    halved = [one for one in arrangements(question)[0] if one.run.ep_overlap]
    choices = [choice for one in halved for cut in one.cuts for choice in one.choices(cut.run.loops, cut.run.placement)]
    assert {choice.family for choice in choices} <= {"breadth-first", "gpipe"}
    assert choices


@pytest.mark.parametrize(("every", "balance"), [(1, "batch"), (2, "batch"), (2, None)])
def test_bounds_leave_no_layout_with_shared_experts_out(ask, every, balance):
    shape = replace(MIXTURE, layers=4, experts=replace(MIXTURE.experts, every=every))
    question = ask(shape=shape, cluster=short_of_memory(2.6), global_batch=8).limited(tp=(1,), strategies=("none",))
    question = replace(question, balance=balance)
    assert {True, False} == {one.run.ep_overlap for one in arrangements(question)[0]}
    pruned, everything = search(question), search(question, prunes=False)
    found, expected = (
        [(step.run, step.knobs, step.prediction.step_time_s) for step in one.steps] for one in (pruned, everything)
    )
    assert found == expected
    assert {run.ep for run, _, _ in found} > {1}
    assert pruned.counts.simulated < everything.counts.simulated


PAIRS = Adapter(rank=8, alpha=16, targets=("q", "v"))


@pytest.mark.parametrize(
    ("shape", "gigabytes", "limits"),
    [({}, 1.85, {}), ({"shape": replace(MIXTURE, layers=4)}, 2.0, {"tp": (1,)})],
    ids=["dense", "experts"],
)
def test_bounds_leave_no_layout_with_adapters_out(ask, shape, gigabytes, limits):
    """Frozen weights have no state to shard, so a higher level may hold more than a lower one."""
    program = with_frozen(load_software("pipeloom"))
    question = ask(cluster=short_of_memory(gigabytes), software=program, adapter=PAIRS, **shape)
    question = question.limited(strategies=("none",), **limits)
    pruned, everything = search(question), search(question, prunes=False)
    found, expected = (
        [(step.run, step.knobs, step.prediction.step_time_s) for step in one.steps] for one in (pruned, everything)
    )
    assert found == expected
    assert pruned.counts.simulated < everything.counts.simulated
    assert not shape or {run.ep for run, _, _ in found} > {1}


def test_a_limit_of_ranks_that_share_experts_needs_experts(ask):
    question = ask(shape=MIXTURE)
    assert question.expert_sizes == (1, 2, 4)
    assert question.limited(ep=(2,)).expert_sizes == (2,)
    with pytest.raises(ConfigError, match="ep shares the experts of a layer, and the model has none"):
        ask(shape=replace(SHAPE, experts=None), limits=Limits(ep=(2,)))
    with pytest.raises(ConfigError, match="ep_overlap is of tokens that travel to experts, and the model has none"):
        ask(shape=replace(SHAPE, experts=None), limits=Limits(ep_overlap=(True,)))


def test_capacity_and_loads_of_a_run_are_planned_with_and_written(ask):
    searched = ask(shape=MIXTURE, cluster=short_of_memory(8), global_batch=16)
    searched = searched.limited(strategies=("none",), pp=(1,), ep=(4,), tp=(1,), families=("breadth-first",))
    config = load_run(
        model={"experts": 4, "expert_capacity": 1.5},
        layout={"dp": 2, "ep": 2, "pp": 1},
        machine={"expert_load": 2.0},
    )
    found = of_training(searched, config)
    assert (found.shape.experts.capacity, found.run.expert_load) == (1.5, 2.0)
    best, even = plan(found, explains=False).best, plan(of_training(searched, load_run()), explains=False).best
    assert best.prediction.step_time_s > even.prediction.step_time_s
    written = run_config(best, None, "dgx-1-v100", "pipeloom")
    assert (written.model.expert_capacity, written.machine.expert_load, written.layout.ep) == (1.5, 2.0, 4)
    again_s = predict_step(written, by_seconds=True).prediction.step_time_s
    assert again_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)
