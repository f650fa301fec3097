"""torchtitan: flags, names of modules, and everything that it cannot express."""

import ast
import re

import pytest
from launch_runs import command_of, reasons_of, values_of, written_for

from pipeloom.export.torch_csv import parse_torch_csv


def command(folder, **sections):
    script = next(file for file in written_for("torchtitan", folder, **sections).files if file.suffix == ".sh")
    return command_of(script, TOKENIZER="/tokenizer", DATASET="c4")


def value(found, name):
    (one,) = values_of(found, f"--{name}")
    return one


def test_flags_say_the_whole_layout_and_the_schedule_comes_from_the_csv(tmp_path):
    layout = {"dp": 4, "replicate": 2, "shard": "full", "microbatch_size": 3, "recompute": "full"}
    found = command(tmp_path, layout=layout, checkpoint={"every": 5})
    assert found[found.index("-m", 2) + 1] == "torchtitan.train"
    for name, expected in {
        "training.local_batch_size": "24",
        "training.global_batch_size": "96",
        "training.seq_len": "128",
        "parallelism.pipeline_parallel_degree": "4",
        "parallelism.pipeline_parallel_microbatch_size": "3",
        "parallelism.data_parallel_replicate_degree": "2",
        "parallelism.data_parallel_shard_degree": "2",
        "parallelism.tensor_parallel_degree": "1",
        "parallelism.fsdp_reshard_after_forward": "never",
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "parallelism.pipeline_parallel_schedule_csv": str(tmp_path / "torchtitan_schedule.csv"),
        "checkpoint.interval": "5",
    }.items():
        assert value(found, name) == expected
    assert "--training.disable_cuda_graphs" in found  # torchtitan 0.3.0 refuses a pipeline without it
    assert found[-1] == "activation_checkpoint:full"
    assert parse_torch_csv((tmp_path / "torchtitan_schedule.csv").read_text()).placement.num_ranks == 4


def test_context_parallelism_multiplies_the_ranks_that_share_state(tmp_path):
    found = command(tmp_path, layout={"dp": 4, "cp": 2, "replicate": 2, "shard": "full"})
    for name, expected in {"context_parallel": "2", "data_parallel_replicate": "2", "data_parallel_shard": "2"}.items():
        assert value(found, f"parallelism.{name}_degree") == expected
    notes = written_for("torchtitan", tmp_path, layout={"cp": 2}).notes.differs
    assert sum("layout.cp 2" in one for one in notes) == 2
    assert sum("data.attention window: attention ends at the borders of documents" in one for one in notes) == 1


def test_stages_are_named_by_their_modules(tmp_path):
    found = command(tmp_path)
    stages = values_of(found, "--parallelism.module_fqns_per_model_part")
    assert stages[0] == "tok_embeddings,layers.0"
    assert stages[-1] == "layers.9,norm,lm_head"
    assert re.findall(r"layers\.(\d+)", ",".join(stages)) == [str(layer) for layer in range(10)]


@pytest.mark.parametrize(("family", "name"), [("1f1b", "1F1B"), ("gpipe", "GPipe")])
def test_orders_that_torch_has_go_by_name(tmp_path, family, name):
    found = command(tmp_path, layout={"loops": 1}, schedule={"family": family})
    assert value(found, "parallelism.pipeline_parallel_schedule") == name
    assert values_of(found, "--parallelism.pipeline_parallel_schedule_csv") is None
    assert not (tmp_path / "torchtitan_schedule.csv").exists()


def test_a_v_takes_the_placement_of_a_schedule_that_has_it(tmp_path):
    found = command(tmp_path, schedule={"family": "breadth-first", "placement": "v"})
    assert value(found, "parallelism.pipeline_parallel_schedule") == "ZBVZeroBubble"
    assert "0F0" in (tmp_path / "torchtitan_schedule.csv").read_text()


def test_without_a_pipeline_micro_batches_are_accumulated(tmp_path):
    found = command(tmp_path, layout={"pp": 1, "loops": 1, "dp": 4, "shard": "full", "microbatch_size": 2})
    assert value(found, "training.local_batch_size") == "2"
    assert value(found, "training.global_batch_size") == "64"
    assert value(found, "parallelism.fsdp_reshard_after_forward") == "always"
    assert values_of(found, "--parallelism.pipeline_parallel_degree") is None


def test_tensor_and_sequence_parallelism_precision_and_compilation_are_flags(tmp_path):
    layout = {"pp": 2, "tp": 2, "sequence_parallel": True}
    found = command(
        tmp_path, layout=layout, training={"dtype": "bfloat16", "compile": True, "compile_backend": "aot_eager"}
    )
    assert value(found, "parallelism.tensor_parallel_degree") == "2"
    assert value(found, "training.mixed_precision_param") == "bfloat16"
    assert value(found, "compile.backend") == "aot_eager"
    assert {"--parallelism.enable_sequence_parallel", "--compile.enable"} <= set(found)
    assert "--parallelism.no-enable_sequence_parallel" in command(tmp_path, layout={"pp": 2, "tp": 2})


def test_the_model_has_the_sizes_of_the_run(tmp_path):
    written_for("torchtitan", tmp_path, model={"rope_theta": 5e5})
    tree = ast.parse((tmp_path / "torchtitan_run.py").read_text())
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            for name, item in zip(node.targets[0].elts, ast.literal_eval(node.value), strict=True):
                constants[name.id] = item
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants[node.targets[0].id] = node.value.value
    sizes = {"DIM": 64, "LAYERS": 10, "VOCAB": 512, "HEADS": 4, "KV_HEADS": 2, "ROPE_THETA": 5e5, "FFN_DIM": 192}
    assert sizes.items() <= constants.items()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"family": "qwen3", "head_size": 32}, ("qwen3", None, 32)),
        ({"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 8192}, ("llama", 8.0, 16)),
    ],
)
def test_the_family_its_heads_and_its_positions_are_those_of_the_run(tmp_path, model, expected):
    written_for("torchtitan", tmp_path, model=model)
    text = (tmp_path / "torchtitan_run.py").read_text()
    family, factor, head = expected
    assert f"FAMILY, ROPE_FACTOR = {family!r}, {factor!r}\n" in text
    assert f"HEADS, KV_HEADS, HEAD_DIM = 4, 2, {head}\n" in text


REFUSED = {
    "tied": ({"model": {"tied": True}}, "model.tied"),
    "gpt2": ({"model": {"family": "gpt2", "num_kv_heads": 4}}, "model.family gpt2"),
    "qwen2": ({"model": {"family": "qwen2"}}, "model.family qwen2"),
    "experts": ({"model": {"experts": 4, "balance": "none"}}, "model.experts"),
    "window": ({"model": {"window": 64}}, "model.window"),
    "float64": ({"training": {"dtype": "float64"}}, "training.dtype float64"),
    "fp16": (
        {"training": {"dtype": "float16"}, "machine": {"cluster": "dgx-1-v100"}},
        "training.dtype float16",
    ),
    "selective": ({"layout": {"recompute": "selective"}}, "layout.recompute selective"),
    "mixture": ({"layout": {"recompute_layers": ["full"] * 5 + ["none"] * 5}}, "layout.recompute_layers"),
    "linear": ({"schedule": {"placement": "linear"}}, "schedule.placement linear"),
    "wide v": ({"layout": {"loops": 3}, "schedule": {"placement": "v"}}, "schedule.placement v with layout.loops 3"),
    "accumulation": ({"layout": {"pp": 1}, "schedule": {"family": "breadth-first"}}, "layout.pp 1 with"),
    "nodes": ({"layout": {"pp": 3, "dp": 2}}, "6 processes do not fill"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchtitan_cannot_express_is_refused(tmp_path, name):
    sections, words = REFUSED[name]
    (reason,) = reasons_of("torchtitan", tmp_path, **sections)
    assert reason.startswith(words)
    assert not list(tmp_path.iterdir())


def test_all_reasons_come_at_once(tmp_path):
    sections = {"model": {"tied": True, "family": "gpt2", "num_kv_heads": 4}, "layout": {"recompute": "selective"}}
    assert len(reasons_of("torchtitan", tmp_path, **sections)) == 3
