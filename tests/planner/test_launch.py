"""Plans for other programs: every layout of the answer is one that the program's export accepts."""

from dataclasses import replace
from itertools import accumulate

import pytest

from pipeloom import make_question, plan
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.errors import ConfigError
from pipeloom.export.hand_over import TARGETS
from pipeloom.export.job import Site, make_job
from pipeloom.export.megatron import layer_layout
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.space import arrangements
from pipeloom.workload.launchers import LAUNCHERS, first_layers_recomputed, with_first_layers

QUESTIONS = {
    "wide": ("llama-13b", "dgx-h100", 16, 64, 2048, {}),
    "pipeline": ("llama-13b", "dgx-a100", 16, 24, 4096, {"pp": (2, 4, 8), "micro_batch": (1,)}),
    "odd": ("llama-3-8b", "dgx-h100", 24, 42, 8192, {}),
    # Memory for some layers only.
    "short of memory": ("llama-13b", "a100-40gb", 16, 32, 4096, {"tp": (2, 4), "micro_batch": (1, 2)}),
}


def question_for(name, launcher):
    model, cluster, devices, batch, seq, limits = QUESTIONS[name]
    sizes = {"num_devices": devices, "global_batch": batch, "seq": seq}
    return make_question(model, cluster, launcher=launcher, **sizes, **limits)


@pytest.mark.parametrize("launcher", ["megatron", "torchtitan"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_export_of_a_program_accepts_every_layout_of_a_plan_for_it(name, launcher):
    answer = plan(question_for(name, launcher), 6, explains=False)
    model, cluster = QUESTIONS[name][:2]
    assert answer.best is not None
    for step in answer.steps:
        job = make_job(run_config(step, model, cluster, LAUNCHERS[launcher].software), step.cluster, Site())
        assert not TARGETS[launcher].problems(job)
        assert step.software.name == LAUNCHERS[launcher].software
        assert step.run.loops == 1 or step.run.pp > 1
        held = max(memory.total_bytes for memory in step.prediction.memory_by_rank)
        assert held <= step.cluster.device.memory_bytes * (1 - answer.question.headroom)


@pytest.mark.parametrize("launcher", ["megatron", "torchtitan"])
def test_a_plan_for_a_program_has_balanced_stages_which_its_run_and_its_export_have(launcher):
    # The head takes longer than a layer, so that even stages are slower.
    sizes = {"num_devices": 24, "global_batch": 48, "seq": 8192, "pp": (6,), "tp": (1,), "families": ("1f1b",)}
    question = make_question("llama-3-8b", "dgx-h100", launcher=launcher, **sizes)
    best = plan(question, 1, explains=False).best
    program = load_software(LAUNCHERS[launcher].software)
    assert program.partition == "even"
    even = plan(replace(question, software=program), 1, explains=False).best
    assert best is not None
    assert even is not None
    layers = best.run.layers_by_stage
    assert layers is not None
    assert layers[-1] == min(layers) < max(layers)
    assert best.prediction.step_time_s < even.prediction.step_time_s
    config = run_config(best, "llama-3-8b", "dgx-h100", program.name)
    assert predict_step(config).prediction.step_time_s == pytest.approx(best.prediction.step_time_s)
    written = "".join(TARGETS[launcher].make(make_job(config, best.cluster, Site())).files.values())
    modules = ",".join(f"layers.{layer}" for layer in range(32 - layers[-1], 32))
    flags = {"megatron": layer_layout(layers), "torchtitan": f" {modules},norm,lm_head"}
    assert flags[launcher] in written


def test_a_v_of_stages_is_planned_for_the_program_that_runs_it():
    sizes = {"num_devices": 8, "global_batch": 8, "seq": 2048, "pp": (4,), "loops": (2,)}
    questions = {name: make_question("llama-13b", "dgx-h100", launcher=name, **sizes) for name in LAUNCHERS}
    placements = {
        name: {cut.run.placement for arrangement in arrangements(question)[0] for cut in arrangement.cuts}
        for name, question in questions.items()
    }
    assert placements == {"pipeloom": {"looped", "v"}, "megatron": {"looped"}, "torchtitan": {"looped", "v"}}


def test_without_the_rules_of_the_program_its_export_refuses_some_layouts():
    # As the test above would be without rules: the same question, priced alike.
    software = LAUNCHERS["megatron"].software
    model, cluster, devices, batch, seq, limits = QUESTIONS["pipeline"]
    sizes = {"num_devices": devices, "global_batch": batch, "seq": seq}
    free = plan(make_question(model, cluster, software=software, **sizes, **limits), 12, explains=False)
    jobs = [make_job(run_config(step, model, cluster, software), step.cluster, Site()) for step in free.steps]
    assert any(TARGETS["megatron"].problems(job) for job in jobs)


def test_a_model_that_a_program_cannot_train_is_refused_before_the_search():
    sizes = {"num_devices": 8, "global_batch": 8, "seq": 2048}
    with pytest.raises(ConfigError, match="model.family gpt2: the export to torchtitan supports llama and qwen3 only"):
        make_question("gpt-6.6b", "dgx-a100", launcher="torchtitan", **sizes)
    with pytest.raises(ConfigError, match="both name the program"):
        make_question("llama-13b", "dgx-a100", launcher="torchtitan", software="fsdp", **sizes)
    with pytest.raises(ConfigError, match="do not fill nodes of 8"):
        make_question("llama-13b", "dgx-a100", launcher="megatron", **(sizes | {"num_devices": 12, "global_batch": 12}))


def test_a_limit_that_the_program_does_not_have_is_refused_with_its_name():
    sizes = {"num_devices": 8, "global_batch": 8, "seq": 2048}
    limits = {"recompute": ("selective",), "shards": ("optimizer",)}
    with pytest.raises(ConfigError) as refused:
        make_question(load_model("llama-13b"), "dgx-a100", launcher="torchtitan", **sizes, **limits)
    assert [problem.split(";")[0] for problem in refused.value.problems] == [
        "torchtitan has no recomputation 'selective'",
        "torchtitan (priced as fsdp) has no sharding level 'optimizer'",
    ]


def test_layers_to_recompute_become_the_first_ones_of_every_stage():
    stages = [["full", "full", "none"], ["none", "none"], ["full"]]
    assert with_first_layers(stages) == [["full", "full", "none"], ["full", "full"], ["full"]]
    assert first_layers_recomputed(with_first_layers(stages)) == 2
    assert first_layers_recomputed(stages) is None


def test_a_predicted_mfu_above_95_percent_is_named_with_the_settings_that_make_it():
    cluster = load_cluster("dgx-a100")
    device = cluster.device
    ideal = replace(device, matmul_curve=((1.0, 1.0),), matmul_curves={}, memory_bytes_per_s=1e15, kernel_s=1e-9)
    question = make_question(
        "llama-13b", replace(cluster, device=ideal), num_devices=8, global_batch=64, seq=512, tp=(1,), pp=(1,)
    )
    best = replace(question.software.efficiency, matmul=0.98, flash2=0.6)
    ideal_question = replace(question, software=replace(question.software, efficiency=best))
    advice = " ".join(plan(ideal_question, 1, explains=False).advice)
    assert "is above 95%" in advice
    assert "matmul_fraction of dgx-a100 (up to 1.00) times matmul of pipeloom (0.98)" in advice
    assert "is above 95%" not in " ".join(plan(question.limited(tp=(2,)), 1, explains=False).advice)


def test_a_question_takes_a_code_for_messages_that_other_programs_do_not_have():
    sizes = {"num_devices": 16, "global_batch": 32, "seq": 1024}
    question = make_question("gpt-6.6b", "dgx-a100", **sizes, boundary="int8", pp=(4,), strategies=("none",))
    assert plan(question, count=1, explains=False).best.run.boundary == "int8"
    with pytest.raises(ConfigError, match="layout.boundary needs the training program pipeloom"):
        make_question("gpt-6.6b", "dgx-a100", **sizes, boundary="int8", launcher="megatron")


def test_layers_that_another_program_recomputes_are_the_first_ones_of_stages_of_any_size():
    """The table has its partition from the seconds of each layer, after the recomputed layers were chosen."""
    shape = replace(load_model("llama-3-8b"), layers=28, hidden=3072, heads=24, ffn=8192, tied=True, name="tied")
    question = make_question(shape, "rtx-4090", num_devices=4, global_batch=64, seq=4096, launcher="megatron")
    steps = plan(question, explains=False).steps
    some = [step.run for step in steps if {"none", "full"} <= set(step.run.recompute_kinds)]
    assert len(some) > 3
    for run in some:
        ends = [*accumulate(run.layers_by_stage)]
        stages = [run.recompute_layers[end - size : end] for end, size in zip(ends, run.layers_by_stage, strict=True)]
        assert first_layers_recomputed(stages) is not None, run.layers_by_stage
