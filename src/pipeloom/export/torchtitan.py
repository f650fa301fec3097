"""Export to torchtitan: flags, PyTorch's schedule CSV, and a configuration function with a model of the run's sizes.

Names and rules are those of torchtitan 0.3.0 (``config/configs.py``, ``distributed/pipeline_parallel.py``,
``trainer.py``).
"""

import math
from collections.abc import Collection
from dataclasses import replace

from pipeloom.config import unset
from pipeloom.export.job import Draft, Job, Need, Target, variable
from pipeloom.export.text import Flag, bash_array, body, comment, flag
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.export.torch_schedule import differences_of_runtime, left_out_of_runtime, tied_problems
from pipeloom.export.torchrun import about_ranks, script_of, start_of
from pipeloom.export.unwritten import checkpoints_unwritten, unwritten
from pipeloom.workload.dtypes import products_of
from pipeloom.workload.launchers import TORCHTITAN
from pipeloom.workload.layout import Layout

SCRIPT, CONFIG, CSV = "torchtitan.sh", "torchtitan_run.py", "torchtitan_schedule.csv"
PROGRAM = "torchtitan 0.3.0"

_NEEDS = (
    Need("TOKENIZER", "folder of a tokenizer, for torchtitan's hf_assets_path"),
    Need("DATASET", "one of torchtitan's datasets, such as c4"),
)
_CONSTANTS = {
    "model.norm_eps": "NORM_EPS",
    "model.rope_theta": "ROPE_THETA",
    "optimizer.lr": "LR",
    "optimizer.lr_warmup_steps": "LR_WARMUP_STEPS",
}
"""Hyperparameter -> its constant in the module."""
_OWN_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
"""Family -> PyTorch's schedule with the same order; all other orders are read from the CSV."""
_MAPPED_AS = {"looped": "Interleaved1F1B", "v": "ZBVZeroBubble"}
"""Placement -> schedule whose placement torchtitan uses for the stages of a CSV; the order is the CSV's."""

_LOGS = {"tensorboard": "--metrics.enable_tensorboard", "wandb": "--metrics.enable_wandb"}
"""Program that receives metrics -> the flag for it."""


def _problems(job: Job) -> list[str]:
    # Without its slices, the run would have other problems.
    if job.whole_problems():
        return job.whole_problems()
    found = [*job.start_problems(TORCHTITAN), *job.order_problems("torchtitan")]
    found += job.weight_problems("torchtitan", None)
    found += [] if TORCHTITAN.ties_stages else tied_problems(job, TORCHTITAN.title)
    found += _model_problems(job)
    if (style := job.config.optimizer.lr_decay_style) != "cosine":
        found.append(f"optimizer.lr_decay_style {style}: the export to torchtitan has cosine decay")
    layout, placement = job.config.layout, job.config.choice().placement_name
    if (
        layout.pp > 1
        and layout.num_loops > 1
        and not (placement == "looped" or (placement == "v" and layout.num_loops == 2))
    ):
        found.append(
            f"schedule.placement {placement} with layout.loops {layout.num_loops}: torchtitan supports looped with any "
            "layout.loops, and v with 2"
        )
    return [*found, *job.accumulation_problems("torchtitan")]


def _model_problems(job: Job) -> list[str]:
    found = TORCHTITAN.product_problems(products_of(job.config.training.matmul_dtype))
    kinds = set(job.config.layout.recompute_by_layer(job.model.num_layers))
    if len(kinds) > 1 and not TORCHTITAN.recomputes_some:
        found.append(
            "layout.recompute_layers: torchtitan recomputes all layers alike; use layout.recompute none or full"
        )
    elif kinds - set(TORCHTITAN.recomputations):
        found.append(
            "layout.recompute selective: torchtitan's selective mode also recomputes every second matrix product, with "
            "other times and memory; use none or full"
        )
    return found


def _make(job: Job) -> Draft:
    notes = Draft(
        {},
        start_of(job, SCRIPT, "TOKENIZER=... DATASET=... "),
        _left_out(job),
        _differences(job),
        (*_NEEDS, *job.needs({**dict.fromkeys(_CONSTANTS, "-"), "training.steps": "--training.steps"})),
    )
    about = [
        *about_ranks(job),
        f"{CONFIG} has the model and the optimizer, {CSV} the order; flags after the script's name override all.",
    ]
    lines = [
        bash_array("flags", _flags(job)),
        f"recompute={job.config.layout.recompute_by_layer(job.model.num_layers)[0]}",
        f"schedule={CSV if _reads_csv(job) else ''}",
    ]
    ends = job.interval is None and "training.steps" in unset(job.config)
    own = f'flags+=(--checkpoint.interval "${variable("training.steps")}")\n' if ends else ""
    script = script_of(job, notes, comment(PROGRAM, notes, about, job.config), lines, own + body("torchtitan.sh"))
    module = "\n".join([comment(PROGRAM, notes, (), job.config), *_constants(job), body("torchtitan.txt")])
    files = {SCRIPT: script, CONFIG: module}
    if _reads_csv(job):
        files[CSV] = format_torch_csv(job.schedule)
    return replace(notes, files=files)


def _reads_csv(job: Job) -> bool:
    return job.config.layout.pp > 1 and job.config.family not in _OWN_SCHEDULES


def _flags(job: Job) -> list[Flag]:
    config, layout = job.config, job.config.layout
    # torchtitan's local batch is that of one iteration of gradient accumulation: with a pipeline all micro-batches,
    # without one a single micro-batch.
    num_microbatches = layout.num_microbatches if layout.pp > 1 else 1
    replicate, among = _data_degrees(layout)
    flags = [
        flag("--training.seq_len", config.data.seq_len),
        flag("--training.local_batch_size", num_microbatches * layout.microbatch_size),
        flag("--training.global_batch_size", layout.batch_size),
        # The script adds flags for hyperparameters that the user must set.
        *([] if "training.steps" in unset(config) else [flag("--training.steps", config.training.known_steps)]),
        flag("--training.max_norm", config.optimizer.known_clip_grad_norm),
        flag("--training.mixed_precision_param", {"fp32": "float32", "bf16": "bfloat16"}[job.dtype]),
        flag("--parallelism.data_parallel_replicate_degree", replicate),
        flag("--parallelism.data_parallel_shard_degree", among),
        flag("--parallelism.tensor_parallel_degree", layout.tp),
        *([flag("--parallelism.context_parallel_degree", layout.cp)] if layout.cp > 1 else []),
        flag(f"--parallelism.{'' if layout.sequence_parallel else 'no-'}enable_sequence_parallel"),
        flag("--parallelism.fsdp_reshard_after_forward", "always" if _drops_weights(job) else "never"),
    ]
    if layout.pp > 1:
        flags += _pipeline_flags(job)
    if config.training.compile:
        flags += [flag("--compile.enable"), flag("--compile.backend", config.training.compile_backend)]
    if config.output.log in _LOGS:
        # Each step, as in pipeloom.
        flags += [flag(_LOGS[config.output.log]), flag("--metrics.log_freq", 1)]
    return flags + _checkpoint_flags(job)


def _checkpoint_flags(job: Job) -> list[Flag]:
    config, own = job.config, job.config.checkpoint
    interval = job.interval or (None if "training.steps" in unset(config) else config.training.known_steps)
    # After the last step it writes one as well. Without the state of the optimizer, its default, no run could resume.
    flags = [flag("--checkpoint.enable"), flag("--checkpoint.no-last_save_model_only")]
    flags += [] if interval is None else [flag("--checkpoint.interval", interval)]
    flags += [flag("--checkpoint.async_mode", "async")] if own.background else []
    # All that checkpoint.every writes stay, and the two newest of those by the clock; at least two. 0: all.
    kept = max(2, own.keep) if own.keep is not None else 2 if own.every is None else 0
    flags.append(flag("--checkpoint.keep_latest_k", kept))
    if own.init is not None:
        # Read only while the folder of checkpoints has none; torchtitan takes no relative path.
        flags += [flag("--checkpoint.initial_load_path", own.init.absolute()), flag("--checkpoint.initial_load_in_hf")]
    return flags


def _data_degrees(layout: Layout) -> tuple[int, int]:
    """Replicas of the state, and ranks that share it: torchtitan shards over these times the context axis."""
    replicate = layout.dp if layout.shard == "none" else layout.replicate or 1
    return replicate, layout.dp // replicate


def _drops_weights(job: Job) -> bool:
    """Whether FSDP2 reshards a layer's weights after its forward: only without a pipeline, which reshards stages."""
    return job.config.layout.pp == 1 and job.config.layout.shard == "full"


def _pipeline_flags(job: Job) -> list[Flag]:
    layout = job.config.layout
    placement = job.config.choice().placement_name if layout.num_loops > 1 else "looped"
    name = _MAPPED_AS[placement] if _reads_csv(job) else _OWN_SCHEDULES[job.config.family]
    return [
        flag("--training.disable_cuda_graphs"),  # on by default, and not supported with a pipeline
        flag("--parallelism.pipeline_parallel_degree", layout.pp),
        flag("--parallelism.pipeline_parallel_schedule", name),
        flag("--parallelism.pipeline_parallel_microbatch_size", layout.microbatch_size),
        flag("--parallelism.module_fqns_per_model_part", *map(_modules, map(job.pieces_of, range(layout.num_stages)))),
    ]


def _modules(pieces: tuple[bool, range, bool]) -> str:
    """A stage as the names of its modules."""
    has_embedding, layers, has_head = pieces
    names = [f"layers.{layer}" for layer in layers]
    return ",".join([*(["tok_embeddings"] * has_embedding), *names, *(["norm", "lm_head"] * has_head)])


def _constants(job: Job) -> list[str]:
    model, optimizer, missing = job.model, job.config.optimizer, unset(job.config)
    own = optimizer.values
    known = {
        "model.norm_eps": model.known_norm_eps,
        "model.rope_theta": model.known_rope_theta,
        "optimizer.lr": optimizer.known_lr,
        "optimizer.lr_warmup_steps": optimizer.known_lr_warmup_steps,
    }
    return [
        *(["import os"] if missing else []),
        f"DIM, FFN_DIM, LAYERS, VOCAB = {model.hidden_size}, {model.ffn_size}, {model.num_layers}, {model.vocab_size}",
        f"HEADS, KV_HEADS, HEAD_DIM = {model.num_heads}, {model.num_kv_heads}, {model.known_head_size}",
        f"FAMILY, ROPE_FACTOR = {model.family!r}, {model.rope_factor!r}",
        f"TIED, SEQ_LEN = {model.tied}, {job.config.data.seq_len}",
        f"LR_MIN_FRACTION = {optimizer.known_lr_min_fraction!r}",
        *(f"{_CONSTANTS[name]} = {_constant(name, value, missing)}" for name, value in known.items()),
        f"BETAS, EPS, WEIGHT_DECAY = {own['betas']!r}, {own['eps']!r}, {own['weight_decay']!r}",
    ]


def _constant(name: str, value: float, missing: Collection[str]) -> str:
    """A constant of the module: a value, or the environment variable that the user must set."""
    kind = type(value).__name__
    return f'{kind}(os.environ["{variable(name)}"])  # SET' if name in missing else repr(value)


def _left_out(job: Job) -> tuple[str, ...]:
    keep, batches = job.config.checkpoint.keep, job.config.training.validation_batches
    return (
        *(left_out_of_runtime(job) if _reads_csv(job) else ()),
        *checkpoints_unwritten(job, "torchtitan"),
        *(["checkpoint.keep 1: torchtitan keeps at least two checkpoints"] if keep == 1 else []),
        *([f"training.validation_batches {batches}: nothing is validated; add --validator.enable"] if batches else []),
        *unwritten(job, _own(job)),
        f"machine.attention {job.config.machine.attention}: torchtitan uses flex attention",
        "training.seed: weights and batches are drawn differently",
    )


def _own(job: Job) -> set[str]:
    """Settings that only this target writes, or names itself."""
    own = {"training.compile_backend", "training.validation_batches"}
    if _reads_csv(job):
        own |= {"schedule.receive_buffers", "schedule.gradient_buffers"}
        own |= {"schedule.residency", "schedule.prefetch"} if job.config.layout.shard == "full" else set()
    return own | ({"output.log"} if job.config.output.log in _LOGS else set())


def _differences(job: Job) -> tuple[str, ...]:
    layout = job.config.layout
    found = job.clock_differences("torchtitan")
    found.append("data.attention window: attention ends at the borders of documents (block-causal masks)")
    if _reads_csv(job):
        found += differences_of_runtime(job)
    elif layout.shard == "full" and layout.data_ranks > 1 and layout.pp > 1:
        found.append("layout.shard full: a rank's weights stay gathered from its first forward to the end of the step")
    if layout.cp > 1:
        found.append(f"layout.cp {layout.cp}: keys and values of all ranks are gathered, they do not go around")
    if layout.cp > 1 and layout.shard == "none":
        found.append(f"layout.shard none with layout.cp {layout.cp}: FSDP2 shards weights over the context axis")
    if layout.data_ranks > 1 and layout.shard in ("optimizer", "gradients"):
        found.append(f"layout.shard {layout.shard}: FSDP2 keeps weights sharded between steps")
    if math.isinf(job.config.optimizer.known_clip_grad_norm):
        found.append("optimizer.clip_grad_norm inf: the gradient's norm is computed nevertheless")
    if job.config.checkpoint.init is not None:
        found.append(f"checkpoint.init is {job.config.checkpoint.init.absolute()}, on every node")
    found.append(
        f"checkpoint.grace_s {job.config.checkpoint.grace_s:g}: a signal ends the run at once, without a checkpoint; a "
        "restart repeats the steps since the newest one"
    )
    return (*found, "optimizer.weight_decay: weights of norms are decayed, too")


TARGET = Target("torchtitan", PROGRAM, (SCRIPT, CONFIG, CSV), _problems, _make)
