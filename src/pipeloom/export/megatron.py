"""Export to Megatron-LM, as flags.

Names and rules are those of Megatron-LM with Megatron Core 0.16 (``training/arguments.py``,
``core/transformer/transformer_config.py``, ``core/transformer/pipeline_parallel_layer_layout.py``,
``core/pipeline_parallel/schedules.py``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pipeloom.config import OptimizerConfig, unset
from pipeloom.export.job import Draft, Job, Need, Target, variable
from pipeloom.export.megatron_checkpoints import (
    about_the_end,
    checkpoint_differences,
    in_background,
    kept,
    minutes_of,
)
from pipeloom.export.megatron_gradients import gradient_differences, precision_flags
from pipeloom.export.megatron_order import is_megatrons
from pipeloom.export.text import Flag, bash_array, body, comment, flag
from pipeloom.export.torchrun import about_ranks, script_of, start_of
from pipeloom.export.unwritten import checkpoints_unwritten, unwritten
from pipeloom.schedule import Kind
from pipeloom.terminal.words import or_list
from pipeloom.workload.launchers import MEGATRON, first_layers_recomputed
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS

SCRIPT = "megatron.sh"
PROGRAM = "Megatron-LM with Megatron Core 0.16"

_NEEDS = (
    Need("MEGATRON", "folder of Megatron-LM, with pretrain_gpt.py"),
    Need("DATA", "flags of Megatron-LM for data and tokenizer, such as --data-path; or mock, for invented tokens"),
)
_FLAGS = {
    "model.norm_eps": "--norm-epsilon",
    "model.rope_theta": "--rotary-base",
    "optimizer.lr": "--lr",
    "optimizer.lr_warmup_steps": "--lr-warmup-iters",
    "training.steps": "--train-iters",
}
"""Hyperparameter -> flag of Megatron-LM; text and tokenizer are in DATA."""

_CONVERT = (
    "convert it by Megatron Bridge, or by tools/checkpoint/convert.py of Megatron-LM for some models and equal stages; "
    "name its config.json as the model in place of the folder (--model of pipeloom plan, model.file of a run), and "
    "start the script with --pretrained-checkpoint and the converted folder"
)


def _problems(job: Job) -> list[str]:
    # Without its slices, the run would have other problems.
    return job.whole_problems() or [
        *job.start_problems(MEGATRON),
        *job.weight_problems("Megatron-LM", _CONVERT),
        *_order_problems(job),
        *job.order_problems("Megatron-LM"),
        *_shard_problems(job),
        *_layer_problems(job),
        *_model_axis_problems(job),
    ]


def _group_size(job: Job) -> int:
    """Number of micro-batches that a rank runs on one of its stages before the next."""
    layout, schedule = job.config.layout, job.config.schedule
    # Megatron-LM's closest order is one group of all micro-batches (docs/decisions/0017).
    if job.config.family == "breadth-first":
        return layout.num_microbatches
    return schedule.group_size or layout.pp


def _order_problems(job: Job) -> list[str]:
    layout, schedule, choice = job.config.layout, job.config.schedule, job.config.choice()
    if layout.pp == 1:
        return job.accumulation_problems("Megatron-LM")
    what, placement = f"schedule.family {choice.family}", choice.placement_name
    # Of ``breadth-first`` it runs the forwards.
    instead = f"use {or_list(MEGATRON.families[layout.num_loops > 1])}"
    splits = any(action.kind is Kind.BACKWARD_INPUT for row in job.order for action in row)
    found: list[str] = []
    if splits:
        found.append(
            f"{what} splits backwards into input and weight gradients; Megatron-LM runs whole backwards; {instead}"
        )
    elif layout.num_loops > 1:
        found += MEGATRON.group_problems(layout.pp, layout.num_microbatches, _group_size(job))
    # The own placement of a family that is refused is no further reason.
    is_placed = layout.num_loops == 1 or MEGATRON.has_placement(placement)
    if not is_placed and (schedule.placement is not None or not splits):
        only = or_list(MEGATRON.placements)
        found.append(f"schedule.placement {placement}: Megatron-LM has {only} placement only; use {only}")
    if found or _is_same_order(job) or (choice.family == "breadth-first" and layout.num_loops > 1):
        return found
    if layout.num_loops == 1:
        return [f"{what} with layout.loops 1: Megatron-LM runs one stage on each rank as 1F1B; {instead}"]
    rest = f"{what}: layout.num_microbatches {layout.num_microbatches} is not a multiple of the group size"
    rest = f"{rest} {_group_size(job)}; Megatron-LM runs the rest as a last group, pipeloom distributes it"
    has_rest = layout.num_microbatches % _group_size(job) > 0
    return [rest if has_rest else f"{what}: Megatron-LM does not run this order; {instead}"]


def _is_same_order(job: Job) -> bool:
    layout = job.config.layout
    return is_megatrons(job.order, layout.num_loops, layout.num_microbatches, _group_size(job))


def _shard_problems(job: Job) -> list[str]:
    layout = job.config.layout
    if not _is_fsdp(job):
        return []
    if layout.pp > 1:
        what = "gradients" if layout.shard == "gradients" else "weights and gradients"
        setting = f"layout.shard {layout.shard} with layout.pp {layout.pp}"
        why = f"its FSDP communicates {what} for every micro-batch, and torch FSDP2 does not work with a pipeline"
        return [f"{setting}: not supported by Megatron-LM: {why}; use layout.shard optimizer"]
    what = f"layout.replicate {layout.replicate} with layout.shard {layout.shard}"
    is_hybrid = layout.shard_size < layout.data_ranks
    return [f"{what}: the export supports hybrid sharding with layout.shard optimizer only"] if is_hybrid else []


def _first_layers_recomputed(job: Job) -> int | None:
    """The number of first layers that every stage fully recomputes; ``None`` if the run recomputes others."""
    kinds = job.config.layout.recompute_by_layer(job.model.num_layers)
    return first_layers_recomputed([kinds[b:e] for b, e in pairwise(accumulate(job.layers_by_stage, initial=0))])


def _layer_problems(job: Job) -> list[str]:
    config, kinds = job.config, job.config.layout.recompute_by_layer(job.model.num_layers)
    found: list[str] = []
    if len(set(kinds)) > 1 and _first_layers_recomputed(job) is None:
        found.append(
            "layout.recompute_layers: Megatron-LM recomputes all layers, or fully the same number of first layers of "
            "every stage"
        )
    rising, steps = config.optimizer.known_lr_warmup_steps, config.training.known_steps
    if rising >= steps and not {"optimizer.lr_warmup_steps", "training.steps"} & set(unset(config)):
        found.append(f"optimizer.lr_warmup_steps {rising}: Megatron-LM requires fewer than training.steps {steps}")
    return found


def _model_axis_problems(job: Job) -> list[str]:
    """Axes on which Megatron-LM does not run the model."""
    model, layout = job.model, job.config.layout
    has_experts, has_window = model.experts is not None, model.has_window(job.config.data.seq_len)
    found = MEGATRON.axis_problems(layout, has_experts=has_experts, has_window=has_window)
    if has_experts and _is_fsdp(job):
        found.append(f"model.experts with layout.shard {layout.shard}: the export supports none and optimizer only")
    return found


def _make(job: Job) -> Draft:
    needs = (*_NEEDS, *job.needs(_FLAGS))
    start = start_of(job, SCRIPT, "MEGATRON=... DATA=... ")
    notes = Draft({}, start, _left_out(job), _differences(job), needs)
    about = [*about_ranks(job), "Flags after the script's name override those in it.", about_the_end(job)]
    groups = {
        "model": _model(job),
        "parallel": [*_parallel(job), *_sharding(job)],
        "memory": _recompute(job),
        "training": _training(job),
    }
    lines = [
        *(bash_array(name, _without_unset(job, flags)) for name, flags in groups.items()),
        f"mock_vocab={(job.model.vocab_size or 0) - 1} # its tokenizer adds one token, the end of text",
        f"connections={0 if _is_fsdp(job) else 1}",
        f"minutes={minutes_of(job)} # until it writes a checkpoint and ends; 0 for no limit",
        f"step_minutes={math.floor((job.step_s or 0) / 60)} # of a step, predicted: it ends behind one",
    ]
    end = "".join(f"{line}\n" for line in _from_the_user(job)) + body("megatron.sh")
    script = script_of(job, notes, comment(PROGRAM, notes, about, job.config), lines, end)
    return replace(notes, files={SCRIPT: script})


def _following(job: Job) -> dict[str, list[str]]:
    """Hyperparameter -> flags that are computed from it (``_from_the_user``)."""
    intervals = {"--eval-interval": job.config.training.validate_every, "--save-interval": job.interval}
    at_the_end = [name for name, steps in intervals.items() if steps is None]
    return {"optimizer.lr": ["--min-lr"], "training.steps": at_the_end}


def _without_unset(job: Job, flags: Sequence[Flag]) -> list[Flag]:
    """The flags without those of hyperparameters that the user must set, which the script adds."""
    following = _following(job)
    names = {name for setting in unset(job.config) for name in (_FLAGS.get(setting), *following.get(setting, ()))}
    return [one for one in flags if one.name not in names]


def _from_the_user(job: Job) -> list[str]:
    """Lines of the script with the last step, and with what follows from settings that the user sets."""
    missing, optimizer = unset(job.config), job.config.optimizer
    last = f'"${variable("training.steps")}"' if "training.steps" in missing else str(job.config.training.known_steps)
    lines = [f"steps={last}"]
    if job.config.output.log == "tensorboard":
        lines.append('training+=(--tensorboard-dir "$run/tensorboard")')
    if "optimizer.lr" in missing:
        least = f'awk -v lr="${variable("optimizer.lr")}" "BEGIN {{ print lr * {optimizer.known_lr_min_fraction} }}"'
        lines.append(f'training+=(--min-lr "$({least})")')
    if "training.steps" in missing and _following(job)["training.steps"]:
        steps = f"${variable('training.steps')}"
        flags = " ".join(f'{name} "{steps}"' for name in _following(job)["training.steps"])
        lines.append(f"training+=({flags})")
    return lines


def _vocabulary_part(job: Job) -> int:
    """Rows of the embedding on each tensor-parallel rank; 1 if the ranks do not divide them."""
    rows, rest = divmod(job.model.vocab_size or 0, job.config.layout.tp)
    return 1 if rest else max(1, rows)


def _model(job: Job) -> list[Flag]:
    model, seq_len = job.model, job.config.data.seq_len
    flags = [
        flag("--num-layers", model.num_layers),
        flag("--hidden-size", model.hidden_size),
        flag("--ffn-hidden-size", model.ffn_size),
        flag("--num-attention-heads", model.num_heads),
        flag("--seq-length", seq_len),
        flag("--max-position-embeddings", seq_len),
        # Transformer Engine's causal attention, with a window too, reads no mask; one for each micro-batch would have
        # the square of the sequence in bytes.
        flag("--no-create-attention-mask-in-dataloader"),
        # Megatron-LM takes the tokenizer's number of tokens, often fewer than the model's, and pads it to a multiple of
        # this and tp: to the model's.
        flag("--make-vocab-size-divisible-by", _vocabulary_part(job)),
        flag(_FLAGS["model.norm_eps"], model.known_norm_eps),
        # The defaults are 0.1.
        flag("--attention-dropout", 0.0),
        flag("--hidden-dropout", 0.0),
        flag("--init-method-std", 0.02),
    ]
    if model.known_head_size * model.num_heads != model.hidden_size:
        flags.append(flag("--kv-channels", model.head_size))
    if model.num_kv_heads != model.num_heads:
        flags += [flag("--group-query-attention"), flag("--num-query-groups", model.num_kv_heads)]
    family = MODELS[model.family]
    if family.is_rotary:
        flags += [
            flag("--swiglu"),
            flag("--normalization", "RMSNorm"),
            flag("--position-embedding-type", "rope"),
            flag(_FLAGS["model.rope_theta"], round(model.known_rope_theta)),
            flag("--disable-bias-linear"),
            *([flag("--add-qkv-bias")] if family.qkv_biases else []),
            *([flag("--qk-layernorm")] if family.qk_norm == "head" else []),
            *_scaled_positions(model),
        ]
    else:
        flags += [flag("--normalization", "LayerNorm"), flag("--position-embedding-type", "learned_absolute")]
    flags += [*_window(job), *_experts(model)]
    return flags if model.tied else [*flags, flag("--untie-embeddings-and-output-weights")]


def _scaled_positions(model: ModelConfig) -> list[Flag]:
    if model.rope_factor is None:
        return []
    return [flag("--use-rope-scaling"), flag("--rope-scaling-factor", model.rope_factor)]


def _window(job: Job) -> list[Flag]:
    model = job.model
    if model.window is None or not model.has_window(job.config.data.seq_len):
        return []
    # Tokens to the left and to the right of a query, which pipeloom counts itself.
    flags = [flag("--window-size", f"{model.window - 1},0")]
    if not model.known_full_attention_layers:
        return flags
    return [*flags, flag("--window-attn-skip-freq", _pattern(model, lambda layer: model.window_of(layer) is not None))]


def _pattern(model: ModelConfig, has: Callable[[int], bool]) -> str:
    """Which layers have something, as a list of Python with 1 and 0."""
    return f"[{','.join(str(int(has(layer))) for layer in range(model.num_layers))}]"


def _experts(model: ModelConfig) -> list[Flag]:
    """Experts whose scores are divided by the sum of those that a token takes, as without ``pre-softmax``."""
    experts = model.expert_layout
    if experts is None:
        return []
    balance = {"batch": "global_aux_loss", "microbatch": "aux_loss"}.get(model.known_balance, "none")
    flags = [
        flag("--num-experts", experts.count),
        flag("--moe-router-topk", experts.per_token),
        flag("--moe-ffn-hidden-size", experts.ffn),
        flag("--moe-router-load-balancing-type", balance),
        flag("--moe-router-dtype", "fp32"),
        flag("--moe-token-dispatcher-type", "alltoall"),
        flag("--moe-grouped-gemm"),
    ]
    if balance != "none":
        flags.append(flag("--moe-aux-loss-coeff", model.known_balance_weight))
    if experts.every > 1:
        flags.append(flag("--moe-layer-freq", _pattern(model, experts.are_in)))
    if experts.shared:
        # Tokens travel beside the block of the shared experts, as in pipeloom.
        flags.append(flag("--moe-shared-expert-intermediate-size", experts.shared * experts.ffn))
        flags.append(flag("--moe-shared-expert-overlap"))
    if experts.capacity is not None:
        flags.append(flag("--moe-expert-capacity-factor", experts.capacity))
        flags.append(flag("--moe-token-drop-policy", "position"))
    return flags


def _parallel(job: Job) -> list[Flag]:
    layout = job.config.layout
    flags = [flag("--tensor-model-parallel-size", layout.tp), flag("--pipeline-model-parallel-size", layout.pp)]
    if layout.cp > 1:
        flags += [flag("--context-parallel-size", layout.cp), flag("--cp-comm-type", "p2p")]
    if layout.ep > 1:
        flags.append(flag("--expert-model-parallel-size", layout.ep))
    is_even = len(set(job.layers_by_stage)) == 1
    if layout.pp > 1 and not is_even:
        flags.append(flag("--pipeline-model-parallel-layout", layer_layout(job.layers_by_stage)))
    elif layout.pp > 1 and layout.num_loops > 1:
        flags.append(flag("--num-virtual-stages-per-pipeline-rank", layout.num_loops))
    if layout.pp > 1 and layout.num_loops > 1:
        flags.append(flag("--microbatch-group-size-per-virtual-pipeline-stage", _group_size(job)))
    return [*flags, flag("--sequence-parallel")] if layout.sequence_parallel else flags


def layer_layout(layers_by_stage: tuple[int, ...]) -> str:
    """Stages in Megatron-LM's notation: ``E`` is the embedding, ``t`` a layer, ``L`` the head, ``|`` a boundary."""
    stages = ["t" if layers == 1 else f"t*{layers}" if layers else "" for layers in layers_by_stage]
    # A stage without layers is empty between two bars.
    return "|".join(["E" * (number == 0) + text for number, text in enumerate(stages)]) + "L"


def _is_fsdp(job: Job) -> bool:
    return job.config.layout.data_ranks > 1 and job.config.layout.shard in ("gradients", "full")


def _sharding(job: Job) -> list[Flag]:
    layout = job.config.layout
    if layout.data_ranks == 1:
        return []
    if layout.shard == "none":
        return [flag("--overlap-grad-reduce")]
    flags = [flag("--use-distributed-optimizer"), flag("--overlap-grad-reduce"), flag("--overlap-param-gather")]
    if _is_fsdp(job):
        strategy = {"gradients": "optim_grads", "full": "optim_grads_params"}[layout.shard]
        flags += [
            flag("--use-megatron-fsdp"),
            flag("--data-parallel-sharding-strategy", strategy),
            flag("--no-gradient-accumulation-fusion"),
            flag("--ckpt-format", "fsdp_dtensor"),
        ]
    elif layout.shard_size < layout.data_ranks:
        flags.append(flag("--num-distributed-optimizer-instances", layout.data_ranks // layout.shard_size))
    return flags


def _recompute(job: Job) -> list[Flag]:
    kinds = set(job.config.layout.recompute_by_layer(job.model.num_layers))
    if kinds == {"none"}:
        return []
    if kinds == {"selective"}:
        return [flag("--recompute-granularity", "selective"), flag("--recompute-modules", "core_attn")]
    # uniform with 1: each layer keeps its own input, as in pipeloom.
    method, number = ("uniform", 1) if kinds == {"full"} else ("block", _first_layers_recomputed(job))
    return [
        flag("--recompute-granularity", "full"),
        flag("--recompute-method", method),
        flag("--recompute-num-layers", number),
    ]


def _training(job: Job) -> list[Flag]:
    config, layout, optimizer = job.config, job.config.layout, job.config.optimizer
    own, steps, rate = optimizer.values, config.training.known_steps, optimizer.known_lr
    # In Megatron-LM, 0 disables clipping.
    clip = 0.0 if math.isinf(optimizer.known_clip_grad_norm) else optimizer.known_clip_grad_norm
    return [
        *precision_flags(job),
        # Operands of e4m3 in forwards, gradients of e5m2, each scaled by its own largest value.
        *([flag("--fp8-format", "hybrid")] if config.training.matmul_dtype is not None else []),
        flag("--micro-batch-size", layout.microbatch_size),
        flag("--global-batch-size", layout.batch_size),
        flag(_FLAGS["training.steps"], steps),
        flag(_FLAGS["optimizer.lr"], rate),
        flag(_FLAGS["optimizer.lr_warmup_steps"], optimizer.known_lr_warmup_steps),
        flag("--min-lr", rate * optimizer.known_lr_min_fraction),
        # Without it, one evaluation, after the last step, as in pipeloom.
        flag("--eval-interval", config.training.validate_every or steps),
        flag("--save-interval", job.interval or steps),
        *kept(job)[0],
        *in_background(job, is_fsdp=_is_fsdp(job))[0],
        # SIGTERM: a checkpoint after the step, and the end.
        *([flag("--exit-signal-handler")] if config.checkpoint.grace_s else []),
        *_decay(optimizer, steps),
        flag("--adam-beta1", own["betas"][0]),
        flag("--adam-beta2", own["betas"][1]),
        flag("--adam-eps", own["eps"]),
        flag("--weight-decay", own["weight_decay"]),
        flag("--clip-grad", clip),
        flag("--eval-iters", config.training.validation_batches),
        flag("--log-interval", 1),
    ]


def _decay(optimizer: OptimizerConfig, steps: int) -> list[Flag]:
    if optimizer.lr_decay_style != "wsd":
        return [flag("--lr-decay-style", optimizer.lr_decay_style)]
    return [
        flag("--lr-decay-style", "WSD"),
        flag("--lr-wsd-decay-style", "linear"),
        flag("--lr-wsd-decay-iters", optimizer.wsd_decay_steps(steps)),
    ]


def _left_out(job: Job) -> tuple[str, ...]:
    config, schedule = job.config, job.config.schedule
    found = [f"schedule.receive_buffers {schedule.receive_buffers}"] if config.layout.pp > 1 else []
    if config.layout.shard == "full":
        found.append(f"schedule.residency {schedule.known_residency} and schedule.prefetch {schedule.known_prefetch}")
    if schedule.gradient_buffers is not None:
        found.append(f"schedule.gradient_buffers {schedule.gradient_buffers}")
    if config.training.compile:
        found.append("training.compile: layers are Transformer Engine's, with its own kernels")
    if config.layout.ep_overlap:
        found.append("layout.ep_overlap: tokens travel beside the block of shared experts alone")
    found.append(f"machine.attention {config.machine.attention}: Transformer Engine chooses the kernel")
    found += [*checkpoints_unwritten(job, "Megatron-LM"), *kept(job)[1]]
    found += in_background(job, is_fsdp=_is_fsdp(job))[1]
    found += unwritten(job, _own(job))
    return (*found, "training.seed: weights and batches are drawn differently")


def _own(job: Job) -> set[str]:
    """Settings that only this target writes, or names itself."""
    own = {"training.validation_batches", "training.validate_every"}
    own |= {"checkpoint.time_limit_s", "schedule.gradient_buffers"}
    own |= {"schedule.receive_buffers"} if job.config.layout.pp > 1 else set()
    own |= {"schedule.residency", "schedule.prefetch"} if job.config.layout.shard == "full" else set()
    own |= {"checkpoint.keep_every"} if job.config.checkpoint.keep is not None else set()
    return own | ({"output.log"} if job.config.output.log == "tensorboard" else set())


def _differences(job: Job) -> tuple[str, ...]:
    layout = job.config.layout
    found = [*checkpoint_differences(job), *gradient_differences(job)]
    if job.placed.software.name == MEGATRON.software and layout.sequence_parallel and layout.tp > 1:
        # Not in the script: Transformer Engine makes buffers for it that not every cluster allows.
        found.append(
            f"--tp-comm-overlap is left out, and machine.software {MEGATRON.software} has its efficiencies from steps "
            f"with it: with layout.tp {layout.tp} a step may take longer than predicted; add the flag after the "
            "script's name where Transformer Engine's user buffers work"
        )
    if layout.pp > 1 and layout.num_loops > 1 and not _is_same_order(job):
        found.append(
            "order: forwards are those of breadth-first, but backwards of a rank's last stage begin before all "
            f"forwards have ended, as with schedule.family hybrid and group_size {layout.num_microbatches}; gradients "
            "of stages are final in the same order"
        )
    if layout.pp > 1 and job.model.tied:
        found.append(
            "model.tied: the first and the last stage hold the matrix, and its gradients are summed after the pipeline"
        )
    if job.model.needs_whole_batch:
        found.append(
            "model.balance batch: the loads of experts are those of the step's micro-batches up to the present one"
        )
    if job.model.expert_capacity is not None and layout.tp > 1:
        found.append("model.expert_capacity: counted among the tokens of each tensor-parallel rank, not of all of them")
    if job.has_amd_gpus:
        found.append(f"devices of {job.cluster.name} are AMD's: flags are those of NVIDIA's Megatron-LM, not of a fork")
    if _is_fsdp(job):
        found.append(f"layout.shard {layout.shard}: gathers and reductions run for each micro-batch, not once per step")
    if (job.model.vocab_size or 0) % layout.tp:
        found.append(f"model.vocab_size {job.model.vocab_size}: padded to a multiple of layout.tp {layout.tp}")
    return tuple(found)


TARGET = Target("megatron", PROGRAM, (SCRIPT,), _problems, _make)
