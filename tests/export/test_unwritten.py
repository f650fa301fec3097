"""No setting of a run is dropped in silence: it is written, refused, named, or means nothing for another program."""

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from launch_runs import CLUSTER, command_of, run_of, values_of, written_for

from pipeloom.config import RunConfig
from pipeloom.config.run import value_of
from pipeloom.export import hand_over
from pipeloom.export.unwritten import COMMON, MEANINGLESS, setting_names

TARGETS = ["megatron", "torchtitan"]


def example(hint: Any, default: Any) -> Any:
    """A value that differs from the default, by its type."""
    origin = get_origin(hint)
    if origin is Annotated:
        return example(get_args(hint)[0], default)
    if origin in (Union, types.UnionType):
        return example(next(one for one in get_args(hint) if one is not type(None)), default)
    if origin is Literal:
        return next(one for one in get_args(hint) if one != default)
    if origin is tuple:
        return [example(get_args(hint)[0], None)] * 2
    if hint is bool:
        return not default
    if hint is int:
        return (default or 0) + 3
    if hint is float:
        return (default or 0.5) * 2
    return "another"


OTHERWISE = {
    "model.preset": "its sizes become those of the run",
    "model.file": "its sizes become those of the run",
    "model.adapted": "model.file sets it",
    "schedule.file": "the order is that of the file, which is compared",
    "optimizer.settings": "of the rule of a plug-in, which the programs do not have",
}
"""Setting without an example -> why."""
_EXPERTS = {"model": {"experts": 4, "balance": "microbatch"}}
_LLAMA3 = {"model": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 8192}}
_YARN = {"model": {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_len": 8192}}
_SPARSE = {"model": {"density": 0.5, "density_block": 8}}
_SHARDED = {"layout": {"pp": 1, "loops": 1, "dp": 4, "shard": "full"}}
_REPLICAS = {"layout": {"dp": 2}}
_PAIRS = {"adapter": {"rank": 4}}
_AVERAGED = {"layout": {"dp": 2, "average_every": 2}}
_OFTEN = {"checkpoint": {"every": 5}}
EXAMPLES: dict[str, Any] = {
    "model.family": "qwen3",
    "model.num_layers": 12,
    "model.hidden_size": 128,
    "model.num_heads": 2,
    "model.head_size": 32,
    "model.num_kv_heads": 4,
    "model.rope_factor": 4.0,
    "model.rope_slow_turns": 2.0,
    "model.rope_fast_turns": 8.0,
    "model.full_attention_layers": [0, 9],
    "model.share_layers": 2,
    "model.density": 0.5,
    "model.density_block": 16,
    "model.experts_per_token": 3,
    "model.balance": "none",
    "data.pack": "best-fit",
    "layout.pp": 2,
    "layout.num_microbatches": 12,
    "layout.microbatches": [8, 5],
    "layout.partition": [1, 2, 1, 2, 2, 1, 1, 2],
    "layout.tp": 2,
    "layout.ep": 2,
    "layout.replicate": 2,
    "layout.recompute_layers": ["full", *["none"] * 9],
    "layout.pipeline_order": [3, 2, 1, 0],
    "schedule.family": "breadth-first",
    "schedule.group_size": 8,
    "schedule.placement": "linear",
    "schedule.keep": [1, 1, 1, 1],
    "schedule.activation_budget": "8MiB",
    "schedule.device_budget": "64MiB",
    "optimizer.name": "sgd",
    "optimizer.betas": [0.8, 0.9],
    "optimizer.clip_grad_norm": 2.0,
    "training.dtype": "bfloat16",
    "training.spike_loss": 3.0,
    "training.spike_grad_norm": 3.0,
    "checkpoint.keep_every": 10,
    "checkpoint.final": "none",
    "machine.attention": "plain",
}
"""Setting -> value, where none follows from the type."""
WITH = {
    "model.rope_scaling": {"rope_factor": 8.0},
    "model.experts": {"balance": "microbatch"},
    "model.density": {"density_block": 8},
    "schedule.offload": {"activation_budget": "8MiB"},
}
"""Setting -> others of its section that mean nothing without it."""
BESIDE: dict[str, dict[str, Any]] = {
    "model.num_layers": {"layout": {"pp": 4, "loops": 2}},
    "model.rope_local_theta": {"model": {"family": "gemma3", "window": 64}},
    **{f"model.{one}": _LLAMA3 for one in ("rope_factor", "rope_original_len", "rope_slow_turns", "rope_fast_turns")},
    "model.rope_attention_factor": _YARN,
    "model.full_attention_layers": {"model": {"window": 64}},
    **{
        f"model.{one}": _EXPERTS
        for one in (
            *("experts_per_token", "expert_every", "expert_ffn", "shared_experts"),
            *("expert_capacity", "balance", "balance_weight"),
        )
    },
    "model.balance_rate": {"model": {"experts": 4, "balance": "bias"}},
    "model.density_block": _SPARSE,
    "model.density_seed": _SPARSE,
    "layout.pp": {"layout": {"loops": 2}},
    "layout.microbatches": {"layout": {"dp": 2, "num_microbatches": 8}},
    "layout.ep": {**_EXPERTS, **_REPLICAS},
    "layout.ep_overlap": {"model": {"experts": 4, "balance": "none"}, "layout": {"dp": 2, "ep": 2}},
    "layout.replicate": {"layout": {"dp": 4, "shard": "optimizer"}},
    "layout.shard": _REPLICAS,
    "layout.sequence_parallel": {"layout": {"tp": 2}},
    "layout.average_every": _REPLICAS,
    "schedule.group_size": {"schedule": {"family": "hybrid", "group_size": 4}},
    "schedule.residency": _SHARDED,
    "schedule.prefetch": _SHARDED,
    "schedule.gradient_buffers": _SHARDED,
    "schedule.activation_budget": {"schedule": {"balance": True}},
    "schedule.device_budget": {"layout": {"pp": 1, "loops": 4}},
    "schedule.swap_folder": {"layout": {"pp": 1, "loops": 4}, "schedule": {"device_budget": "64MiB"}},
    "optimizer.lr_wsd_decay_steps": {"optimizer": {"lr_decay_style": "wsd"}},
    "optimizer.momentum": {"optimizer": {"name": "sgd"}},
    "optimizer.outer_lr": _AVERAGED,
    "optimizer.outer_momentum": _AVERAGED,
    "optimizer.outer_delayed": _AVERAGED,
    "optimizer.update": {"optimizer": {"clip": "none"}},
    "optimizer.wide_weights": {"optimizer": {"name": "lomo"}, "training": {"dtype": "bfloat16"}},
    "adapter.targets": _PAIRS,
    "adapter.alpha": _PAIRS,
    "adapter.init": _PAIRS,
    "training.matmul_dtype": {"machine": {"cluster": "dgx-h100"}},
    "training.compile_backend": {"training": {"compile": True}},
    "training.divide_every": {"layout": {"dp": 2, "microbatches": [8, 5]}},
    "checkpoint.keep": _OFTEN,
    "checkpoint.keep_every": {"checkpoint": {"every": 5, "keep": 1}},
    "restart.layout": {"restart": {"times": 2}},
    "restart.keep_every": {"restart": {"times": 2}},
}
"""Setting -> the sections of a run in which it means something."""


def code(folder: Path) -> dict[str, str]:
    """The files without their comments."""
    return {
        file.name: "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
        for file in folder.iterdir()
    }


def fate(target: str, name: str, folder: Path) -> str:
    """What becomes of a setting in the files of a target."""
    section, _, key = name.partition(".")
    default = value_of(RunConfig(), name)
    hint = get_type_hints(type(getattr(RunConfig(), section)), include_extras=True)[key]
    value = EXAMPLES[name] if name in EXAMPLES else example(hint, default)
    beside = {one: dict(settings) for one, settings in BESIDE.get(name, {}).items()}
    changed = {**beside, section: {**beside.get(section, {}), **WITH.get(name, {}), key: value}}
    before = hand_over(run_of(**beside), CLUSTER, folder / "before", [target])
    if before.refused:
        # The program lacks what the setting is of.
        return "refused" if beside else f"refused without it: {before.refused[0].reasons}"
    after = hand_over(run_of(**changed), CLUSTER, folder / "after", [target])
    if after.refused:
        return "refused"  # the run without it is not
    printed = [{*done.written[0].notes.left_out, *done.written[0].notes.differs} for done in (before, after)]
    if any(re.search(rf"{re.escape(name)}\b", sentence) for sentence in printed[0] | printed[1]):
        return "named"
    return "written" if code(folder / "before") != code(folder / "after") else "dropped"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in setting_names() if name not in {*MEANINGLESS, *OTHERWISE}])
def test_a_setting_is_written_refused_or_named(tmp_path, target, name):
    assert fate(target, name, tmp_path) in ("written", "refused", "named")


def test_every_name_is_that_of_a_setting_or_a_section():
    sections = {name.partition(".")[0] for name in setting_names()}
    known = {*setting_names(), *sections}
    assert {*MEANINGLESS, *COMMON, *OTHERWISE, *EXAMPLES, *WITH, *BESIDE} <= known
    assert not {*MEANINGLESS} & {*COMMON, *OTHERWISE}


def test_a_setting_of_which_nothing_is_known_is_named_with_its_value(tmp_path):
    changed = {"training": {"check_every": 7}, "restart": {"times": 2}, "output": {"profile": [3, 4]}}
    for target in TARGETS:
        (written,) = hand_over(run_of(**changed), CLUSTER, tmp_path, [target]).written
        for words in ("training.check_every 7: ", "restart.times 2: ", "output.profile 3 4: "):
            assert any(one.startswith(words) for one in written.notes.left_out)
        text = (tmp_path / f"{target}.sh").read_text()
        assert "# - training.check_every 7: the files have no counterpart" in text


@pytest.mark.parametrize(
    ("checkpoint", "megatron", "torchtitan"),
    [
        ({"every": 5}, None, "0"),
        ({"every": 5, "keep": 3}, None, "3"),
        ({"every": 5, "keep": 1}, "5000000", "2"),
        ({"every": 5, "keep": 1, "keep_every": 10}, "10", "2"),
        ({"every": 5, "keep": 1, "keep_every": 12}, None, "2"),
        ({}, "newest", "2"),
        ({"every_s": 0}, None, "2"),
    ],
)
def test_as_many_checkpoints_stay_as_the_programs_can_keep(tmp_path, checkpoint, megatron, torchtitan):
    variables = {"MEGATRON": "/megatron", "DATA": "mock", "TOKENIZER": "/tokenizer", "DATASET": "c4"}
    found = command_of(written_for("megatron", tmp_path, checkpoint=checkpoint).files[0], **variables)
    retained = values_of(found, "--save-retain-interval")
    if megatron == "newest":
        ((retained,), (interval,)) = retained, values_of(found, "--save-interval")
        assert (int(retained) % int(interval), int(retained) > 1_000_000) == (0, True)
    else:
        assert retained == (None if megatron is None else [megatron])
    found = command_of(written_for("torchtitan", tmp_path, checkpoint=checkpoint).files[0], **variables)
    assert values_of(found, "--checkpoint.keep_latest_k") == [torchtitan]


def test_validations_and_metrics_go_where_the_program_has_them(tmp_path):
    sections = {"training": {"validate_every": 20}, "output": {"log": "tensorboard"}}
    (script,) = written_for("megatron", tmp_path, **sections).files
    found = command_of(script, MEGATRON="/megatron", DATA="mock", RUN="/run")
    assert values_of(found, "--eval-interval") == ["20"]
    assert values_of(found, "--tensorboard-dir") == ["/run/tensorboard"]
    written = written_for("torchtitan", tmp_path, **sections)
    found = command_of(written.files[0], TOKENIZER="/tokenizer", DATASET="c4")
    assert "--metrics.enable_tensorboard" in found
    assert values_of(found, "--metrics.log_freq") == ["1"]
    assert any(one.startswith("training.validate_every 20: ") for one in written.notes.left_out)
