"""A configuration as the cost model sees it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hugging_face import require_transformers

from pipeloom.catalog import load_model, names
from pipeloom.config import DataConfig, MachineConfig, ModelConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.cost.partition import default_partition
from pipeloom.cost.stages import layers_of_pieces, stage_layers
from pipeloom.errors import ConfigError
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.describe import describe, machine_problems, with_model_sizes
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import shape_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def model_file(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not None}))
    return RunConfig(model=ModelConfig(file=file))


@pytest.mark.parametrize("name", names("models"))
def test_a_preset_gives_every_size_and_comes_back_as_the_same_shape(name):
    config, problems = with_model_sizes(RunConfig(model=ModelConfig(preset=name)))
    assert problems == []
    model = config.model
    recipe = {"norm_eps": model.norm_eps, "rope_theta": model.rope_theta}  # of some models the user has to set it
    assert model == replace(model.resolve(vocab_size=7), **recipe)  # nothing else is left to fill in
    assert replace(shape_of(config.model), name="") == replace(load_model(name), name="")
    assert with_model_sizes(config) == (config, [])  # so a run folder's configuration repeats the run


def test_without_a_preset_nothing_changes():
    assert with_model_sizes(RunConfig()) == (RunConfig(), [])


def test_a_hugging_face_file_gives_the_sizes(tmp_path):
    config, problems = with_model_sizes(model_file(tmp_path))
    assert problems == []
    model = config.model
    assert (model.num_layers, model.num_kv_heads, model.ffn_size, model.vocab_size) == (32, 8, 14336, 128256)
    assert (model.family, model.tied) == ("llama", False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number of at least 1, found None"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, found 'many'"),
        ({"num_local_experts": 8}, "num_local_experts is not a supported key of llama, found 8"),
        ({"head_dim": 127}, "rotary positions need an even head_dim, found 127"),
    ],
)
def test_a_file_that_lacks_or_bends_a_key_is_named_with_the_key(tmp_path, changes, sentence):
    config = model_file(tmp_path, **changes)
    unchanged, (problem,) = with_model_sizes(config)
    assert unchanged == config
    assert problem.startswith(f"{config.model.file}: {sentence}")


def test_a_size_that_disagrees_with_the_preset_is_named():
    model = ModelConfig(preset="llama-13b", num_layers=12, vocab_size=128000)
    _, problems = with_model_sizes(RunConfig(model=model))
    assert problems == [
        "model.num_layers must be 40, as in model.preset llama-13b, found 12; leave model.num_layers out"
    ]


def test_a_size_that_a_model_of_transformers_does_not_read_is_named(tmp_path):
    require_transformers()
    config = model_file(tmp_path, model_type="gpt_neox", num_attention_heads=2, num_key_value_heads=None)
    for heads in (4, 6):  # another one, and pipeloom's own default
        wrong = replace(config, model=replace(config.model, num_heads=heads, num_layers=8))
        _, problems = with_model_sizes(wrong, ["model.num_heads", "model.num_layers"])
        source = f"model.file {config.model.file}"
        assert problems == [
            f"model.num_layers must be 32, as in {source}, found 8; leave model.num_layers out",
            f"model.num_heads has no effect on a model that classes of transformers compute, of {source}; leave it out",
        ]


SCALED = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 2048}
"""Of positions; the rest has usual values."""
USUAL = {
    "head_size": (128, 64),
    "query_pre_attn_scalar": (128, 64.0),
    "rope_fast_turns": (32.0, 16.0),
    "rope_slow_turns": (1.0, 2.0),
    "logit_softcap": (0.0, 5.0),
    "num_kv_heads": (8, 4),
    "ffn_size": (14336, 14335),
}
"""Setting -> the value of the file, of most of them a usual one, and another."""


@pytest.mark.parametrize("name", USUAL)
def test_the_value_that_a_file_leaves_to_a_default_is_right_and_named_where_another_is_found(tmp_path, name):
    config = model_file(tmp_path, rope_scaling=SCALED, rope_theta=5e5)
    expected, problems = with_model_sizes(config)
    assert problems == []
    right, wrong = USUAL[name]
    model = replace(config.model, **{name: right})
    assert with_model_sizes(replace(config, model=model)) == (expected, [])
    _, problems = with_model_sizes(replace(config, model=replace(model, **{name: wrong})))
    of_file = f"as in model.file {model.file}"
    assert problems == [f"model.{name} must be {right}, {of_file}, found {wrong}; leave model.{name} out"]


def test_settings_of_experts_that_are_defaults_are_right():
    right = {"experts": 8, "experts_per_token": 2, "expert_every": 1, "expert_ffn": 14336}
    model = ModelConfig(preset="mixtral-8x7b", **right)
    assert with_model_sizes(RunConfig(model=model))[1] == []
    _, problems = with_model_sizes(RunConfig(model=replace(model, experts_per_token=3, expert_every=2)))
    assert [problem.partition(", as")[0] for problem in problems] == [
        "model.experts_per_token must be 2",
        "model.expert_every must be 1",
    ]


def test_the_epsilon_and_the_rotary_base_of_the_preset_are_those_of_the_run():
    config, problems = with_model_sizes(RunConfig(model=ModelConfig(preset="llama-3-8b")))
    assert problems == []
    assert (config.model.norm_eps, config.model.rope_theta) == (1e-5, 500000.0)
    _, problems = with_model_sizes(RunConfig(model=ModelConfig(preset="llama-3-8b", rope_theta=2e4)))
    assert problems == [
        "model.rope_theta must be 500000.0, as in model.preset llama-3-8b, found 20000.0; leave model.rope_theta out"
    ]


def test_a_preset_that_is_not_there_is_named_with_the_nearest():
    _, (problem,) = with_model_sizes(RunConfig(model=ModelConfig(preset="llama13b")))
    assert problem.startswith("there is no model 'llama13b': did you mean 'llama-13b'?")


def test_every_size_of_the_layout_reaches_the_cost_model():
    layout = Layout(
        pp=2, loops=3, dp=4, tp=2, replicate=2, shard="full", microbatch_size=5, num_microbatches=7,
        sequence_parallel=True, recompute="selective", partition=(2, 1, 1, 2, 2, 2),
    )  # fmt: skip
    machine = MachineConfig(attention="plain", fused_norm=False, cluster="dgx-a100")
    config = RunConfig(
        layout=layout,
        machine=machine,
        training=TrainingConfig(dtype="bfloat16"),
        data=DataConfig(tokenizer="bpe", seq_len=64),
    )
    run = describe(config).run
    assert (run.pp, run.loops, run.dp, run.tp, run.replicate, run.shard) == (2, 3, 4, 2, 2, "full")
    assert (run.micro_batch, run.num_microbatches, run.global_batch) == (5, 7, 4 * 5 * 7)
    assert (run.sequence_parallel, run.recompute, run.layers_by_stage) == (True, "selective", (1, 1, 1, 2, 2, 1))
    assert (run.precision, run.attention, run.fused_norm, run.seq) == ("bf16", "plain", False, 64)
    assert run.shape.vocab == config.data.bpe_vocab_size
    assert run.num_devices == layout.num_ranks


def test_our_program_divides_layers_as_training_does():
    described = describe(RunConfig())
    config = RunConfig()
    model = config.model.resolve(config.data.vocab_size)
    recompute = config.layout.recompute_by_layer(model.num_layers)
    partition = default_partition(model, config.data.seq_len, config.choice().placed(), recompute)
    assert stage_layers(described.run, described.software) == (layers_of_pieces(partition), 7)


def test_layers_are_divided_as_training_does_where_ranks_are_not_equally_fast():
    machine = MachineConfig(cluster=str(Path(__file__).parents[2] / "examples" / "a100-and-v100.toml"))
    config = RunConfig(
        model=ModelConfig(num_layers=32, hidden_size=4096, num_heads=32),
        data=DataConfig(seq_len=1024),
        machine=machine,
        layout=Layout(pp=2, loops=2, dp=32),
        training=TrainingConfig(dtype="float16"),
    )
    model = config.model.resolve(config.data.vocab_size)
    placed = describe(config)
    recompute = config.layout.recompute_by_layer(model.num_layers)
    partition = default_partition(model, config.data.seq_len, config.choice().placed(), recompute)
    assert placed.slowness[0] < placed.slowness[1]
    assert placed.layers == layers_of_pieces(partition)
    step = predict_step(config)
    assert step.run.layers_by_stage == placed.layers
    faster = predict_step(replace(config, layout=replace(config.layout, partition=step.fastest_partition)))
    assert faster.fastest_partition is None
    assert faster.prediction.step_time_s < step.prediction.step_time_s


def test_another_program_divides_as_it_does_unless_a_partition_is_given():
    config = RunConfig(machine=MachineConfig(software="megatron-2021"), layout=Layout(loops=1))
    described = describe(replace(config, schedule=ScheduleConfig(family="1f1b")))
    assert stage_layers(described.run, described.software)[0] == (2, 2, 2, 2)
    described = describe(replace(config, layout=Layout(loops=1, partition=(4, 2, 2, 2))))
    assert stage_layers(described.run, described.software)[0] == (3, 2, 2, 1)


def test_all_problems_of_the_machine_are_reported_at_once(tmp_path):
    cluster = tmp_path / "mine.toml"
    cluster.write_text('name = "mine"\n')
    config = RunConfig(machine=MachineConfig(cluster=str(cluster), software="megatron"))
    problems = machine_problems(config)
    assert any(problem.startswith(f"{cluster}: devices_per_node must be") for problem in problems)
    assert any(problem.startswith("there is no software 'megatron': did you mean 'megatron-") for problem in problems)
    with pytest.raises(ConfigError, match="devices_per_node"):
        describe(config)


def test_a_precision_that_the_device_does_not_have_is_named():
    config = RunConfig(machine=MachineConfig(cluster="dgx-1-v100"), training=TrainingConfig(dtype="bfloat16"))
    (problem,) = machine_problems(config)
    assert problem.startswith(
        "training.dtype must be one that v100-sxm-32gb computes in: float32, float16, found bfloat16"
    )


def test_a_model_file_is_named_by_its_path(tmp_path):
    config, _ = with_model_sizes(model_file(tmp_path))
    assert Path(shape_of(config.model).name) == tmp_path / "config.json"
