"""The parsers of Megatron-LM and torchtitan take the exports of a grid of plans, with the figures of the runs."""

from collections.abc import Callable, Mapping
from math import isinf
from typing import Any

import pytest
from planned_exports import EACH, MEGATRON, PARSERS, Export, given_exports, parsed, planned_exports

from pipeloom.workload.model_families import MODELS

pytestmark = [pytest.mark.parsers, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _installed(request):
    if "parsers" not in request.config.getoption("-m") or not (MEGATRON.is_dir() and (PARSERS / "bin").is_dir()):
        pytest.skip("`make launch-parsers` installs the parsers of Megatron-LM and torchtitan, and runs this")


def megatron_values(export: Export) -> Mapping[str, Any]:
    """Values of Megatron-LM -> those of the run."""
    job, layout, setting = export.job, export.job.config.layout, export.setting
    own, model, steps = job.config.optimizer.values, export.job.model, setting("training.steps")
    is_rotary, clip = MODELS[model.family].is_rotary, job.config.optimizer.known_clip_grad_norm
    loops = layout.num_loops if layout.pp > 1 and layout.num_loops > 1 else None
    kinds = set(layout.recompute_by_layer(model.num_layers))
    return {
        "num_layers": model.num_layers,
        "layers_of_config": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "vocab_size": model.vocab_size - 1,  # its tokenizer adds one
        "layernorm_epsilon": setting("model.norm_eps"),
        "untie_embeddings_and_output_weights": not model.tied,
        "add_bias_linear": not is_rotary,
        **({"rotary_base": setting("model.rope_theta")} if is_rotary else {}),
        "kv_channels": model.known_head_size,
        "qk_layernorm": model.family == "qwen3",
        "add_qkv_bias": MODELS[model.family].qkv_biases,
        "use_rope_scaling": model.rope_scaling == "llama3",
        "window_size": [model.window - 1, 0] if model.window else None,
        "num_experts": model.experts,
        "expert_model_parallel_size": layout.ep,
        "seq_length": job.config.data.seq_len,
        "micro_batch_size": layout.microbatch_size,
        "global_batch_size": layout.batch_size,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": loops,
        "data_parallel_size": layout.dp,
        "use_distributed_optimizer": layout.dp > 1 and layout.shard == "optimizer",
        "recompute_granularity": None if kinds == {"none"} else ("selective" if kinds == {"selective"} else "full"),
        "bf16": job.dtype == "bf16",
        "accumulate_allreduce_grads_in_fp32": job.dtype != "fp32" and not job.placed.software.has_narrow_gradients,
        "create_attention_mask_in_dataloader": False,
        "lr": setting("optimizer.lr"),
        "min_lr": pytest.approx(setting("optimizer.lr") * job.config.optimizer.known_lr_min_fraction),
        "lr_warmup_iters": setting("optimizer.lr_warmup_steps"),
        "train_iters": steps,
        "adam_beta1": own["betas"][0],
        "adam_beta2": own["betas"][1],
        "adam_eps": own["eps"],
        "weight_decay": own["weight_decay"],
        "clip_grad": 0.0 if isinf(clip) else clip,
        "save_interval": job.interval or steps,
        "exit_signal_handler": True,
        "async_save": False,
    }


def torchtitan_values(export: Export) -> Mapping[str, Any]:
    """Values of torchtitan, by their path -> those of the run."""
    job, layout, setting = export.job, export.job.config.layout, export.setting
    own, model, has_pipeline = job.config.optimizer.values, export.job.model, export.job.config.layout.pp > 1
    full = "full" in layout.recompute_by_layer(model.num_layers)
    shard = layout.shard_size
    stages = {"parallelism.module_fqns_per_model_part": layout.num_stages} if has_pipeline else {}
    return {
        "model_spec.model.dim": model.hidden_size,
        "model_spec.model.vocab_size": model.vocab_size,
        "model_spec.model.layers": model.num_layers,
        "model_spec.model.norm.eps": setting("model.norm_eps"),
        "training.seq_len": job.config.data.seq_len,
        "training.global_batch_size": layout.batch_size,
        "training.local_batch_size": (layout.num_microbatches if has_pipeline else 1) * layout.microbatch_size,
        "training.steps": setting("training.steps"),
        "training.max_norm": job.config.optimizer.known_clip_grad_norm,
        "training.mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[job.dtype],
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sequence_parallel,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": layout.dp // shard,
        **stages,
        "lr_scheduler.warmup_steps": setting("optimizer.lr_warmup_steps"),
        "lr_scheduler.min_lr_factor": job.config.optimizer.known_lr_min_fraction,
        "optimizer.param_groups.0.optimizer_kwargs.lr": setting("optimizer.lr"),
        "optimizer.param_groups.0.optimizer_kwargs.betas": list(own["betas"]),
        "optimizer.param_groups.0.optimizer_kwargs.eps": own["eps"],
        "optimizer.param_groups.0.optimizer_kwargs.weight_decay": own["weight_decay"],
        "recompute": "FullAC.Config" if full else "NoneType",
        "checkpoint.enable": True,
        "checkpoint.async_mode": "async",
        "checkpoint.interval": job.interval or setting("training.steps"),
        "checkpoint.last_save_model_only": False,
    }


def at(values: Any, path: str) -> Any:
    """The value at a path; of a list whose number is compared, the number of its items."""
    for name in path.split("."):
        values = values[int(name)] if isinstance(values, list) else values[name]
    return values


CASES: dict[str, Callable[[Export], Mapping[str, Any]]] = {"megatron": megatron_values, "torchtitan": torchtitan_values}


@pytest.mark.parametrize("launcher", CASES)
def test_the_parser_takes_every_export_with_the_figures_of_its_run(launcher, tmp_path):
    exports = planned_exports(launcher, tmp_path)
    assert len(exports) == EACH
    exports += given_exports(launcher, tmp_path)
    wrong = []
    for export, answer in zip(exports, parsed(launcher, exports), strict=True):
        if "refused" in answer:
            wrong.append(f"{export.what}: {answer['refused']}")
            continue
        for path, expected in CASES[launcher](export).items():
            found = at(answer["values"], path)
            found = len(found) if isinstance(found, list) and isinstance(expected, int) else found
            if found != expected:
                wrong.append(f"{export.what}: {path} is {found!r}, and {expected!r} in the run")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("launcher", CASES)
def test_the_parser_refuses_an_export_with_a_flag_or_a_layout_that_is_wrong(launcher, tmp_path):
    export = next(iter(planned_exports(launcher, tmp_path, 1)))
    words, command = export.command["words"], export.command
    # Megatron-LM's parser leaves it open whether replicas divide the batch, so another number of devices may be right.
    layouts = {"megatron": {"words": [*words, "--pipeline-model-parallel-size", "5"]}, "torchtitan": {"num_devices": 7}}
    wrong = [{**command, "words": [*words, "--no-such-flag", "1"]}, {**command, **layouts[launcher]}]
    found = parsed(launcher, [export, *[Export(export.what, export.job, export.written, one) for one in wrong]])
    assert [list(one) for one in found] == [["values"], ["refused"], ["refused"]]
