"""What is wrong with a run's configuration: all of it at once, a sentence each."""

import math
import re
import sys
from pathlib import Path
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint, is_checkpoint, list_checkpoints, step_of
from pipeloom.config.run import RunConfig
from pipeloom.errors import UserError, reason_of
from pipeloom.schedule import read_schedule
from pipeloom.system.toolchain import toolchain_problems
from pipeloom.terminal.words import and_finite, count, parse_bytes
from pipeloom.workload.dtypes import TRAINED
from pipeloom.workload.layout import Layout, Shard
from pipeloom.workload.model import MOST_LAYERS, head_problems
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.optimizers import OPTIMIZERS


def find_problems(config: RunConfig, *, trains: bool = True, is_model_known: bool = True) -> list[str]:
    """Everything that is wrong with the values of a run, one sentence each; empty if nothing is.

    Args:
        config: the run.
        trains: whether the run is trained here, so that its text, its checkpoint and its compiler have to be there.
        is_model_known: whether the sizes of the model are what the run will have.
    """
    found = [*_range_problems(config), *_order_problems(config), *_slice_problems(config)]
    if is_model_known:
        found += [*_model_problems(config), *_stage_problems(config), *_tensor_problems(config)]
        found += _recompute_problems(config)
    found += [*_data_parallel_problems(config), *_swap_problems(config), *_budget_problems(config)]
    found += [*_place_problems(config), *_file_problems(config), *optimizer_problems(config)]
    if trains:
        if config.data.known_tokenizer == "bytes":  # text decides how many tokens another one has
            found += vocabulary_problems(config, config.data.vocab_size)
        found += [*_text_problems(config), *_checkpoint_problems(config), *_token_problems(config)]
        found += [*_compile_problems(config), *_dtype_problems(config)]
    return found


def _dtype_problems(config: RunConfig) -> list[str]:
    dtype = config.training.known_dtype
    if dtype in TRAINED:
        return []
    return [f"training.dtype {dtype} needs a scaled loss, which train does not have; use one of {', '.join(TRAINED)}"]


_AT_LEAST: dict[str, float] = {
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.ffn_size": 1,
    "model.vocab_size": 2,
    # The 256 bytes and end of text.
    "data.bpe_vocab_size": 257,
    "data.seq_len": 1,
    "layout.microbatch_size": 1,
    "layout.tp": 1,
    "layout.dp": 1,
    "layout.replicate": 1,
    "schedule.residency": 1,
    "schedule.prefetch": 0,
    "schedule.gradient_buffers": 1,
    "schedule.receive_buffers": 1,
    "optimizer.lr_warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "training.steps": 1,
    "training.threads": 1,
    "training.run_ahead": 1,
    "training.validation_batches": 0,
    "training.sample_tokens": 0,
    "training.stall_timeout_s": 1,
    "checkpoint.every": 1,
    "checkpoint.every_s": 0,
    "checkpoint.grace_s": 0,
    "checkpoint.keep": 1,
    "output.trace_step": 1,
}
_AT_MOST = {"model.num_layers": MOST_LAYERS}
_LEAST_STAGES = 2
_ABOVE_ZERO = (
    "data.validation_fraction",
    "model.norm_eps",
    "model.rope_theta",
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.clip_grad_norm",
)
_FRACTIONS = ("data.validation_fraction", "optimizer.lr_min_fraction", "optimizer.momentum")


def _value(config: RunConfig, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _range_problems(config: RunConfig) -> list[str]:
    found = [
        f"{name} must be {and_finite(f'at least {least:g}', _value(config, name))}, found {_value(config, name)}"
        for name, least in _AT_LEAST.items()
        if _value(config, name) is not None and not least <= _value(config, name) <= _most(name)
    ]
    found += [
        f"{name} must be at most {most:,}, found {_value(config, name):,}"
        for name, most in _AT_MOST.items()
        if _value(config, name) > most
    ]
    found += [
        f"{name} must be {and_finite('above 0', _value(config, name))}, found {_value(config, name)}"
        for name in _ABOVE_ZERO
        if _value(config, name) is not None and not 0 < _value(config, name) <= _most(name)
    ]
    found += [
        f"{name} must lie between 0 and 1, found {_value(config, name)}"
        for name in _FRACTIONS
        if _value(config, name) is not None and not 0 <= _value(config, name) <= 1
    ]
    # AdamW divides by 1 - beta ** step.
    if not all(0 <= beta < 1 for beta in config.optimizer.betas or ()):
        found.append(f"optimizer.betas must be at least 0 and below 1, found {config.optimizer.betas}")
    return found


def _most(name: str) -> float:
    """The largest value of a setting: every one is finite, but for a limit that may be switched off."""
    return math.inf if name == "optimizer.clip_grad_norm" else sys.float_info.max


def model_problems(config: RunConfig) -> list[str]:
    """What is wrong with the values of the model, one sentence each."""
    return [one for one in _range_problems(config) if one.startswith("model.")] + _model_problems(config)


def _model_problems(config: RunConfig) -> list[str]:
    model = config.model
    problems: list[str] = []
    if model.preset is not None and model.file is not None:
        problems.append("model.preset and model.file both give the sizes; leave one out")
    names = ("model.hidden_size", "model.num_heads", "model.num_kv_heads")
    if model.family not in MODELS:
        return [*problems, f"model.family: {MODELS.unknown(model.family)}"]
    is_rotary = MODELS[model.family].is_rotary
    problems += head_problems(model.hidden_size, model.num_heads, model.num_kv_heads, is_rotary=is_rotary, names=names)
    return problems


def _order_problems(config: RunConfig) -> list[str]:
    schedule = config.schedule
    found = config.choice().problems()
    # A family's choice names its own sizes; a person set them under other names.
    names = {"pp ": "layout.pp ", "loops ": "layout.loops ", "the number of micro-batches ": "layout.num_microbatches "}
    problems = [next((new + p[len(old) :] for old, new in names.items() if p.startswith(old)), p) for p in found]
    if schedule.family == "forward-only":
        problems.append("schedule.family forward-only trains nothing; use breadth-first")
    return problems


def _slice_problems(config: RunConfig) -> list[str]:
    layout, num_tokens, wanted = config.layout, config.data.seq_len, config.layout.token_slices
    if wanted is None or layout.tp < 1:
        return []
    problems: list[str] = []
    # With tp, each slice of tokens is split over the ranks, so that a slice has at least tp tokens.
    if isinstance(wanted, int) and not 1 <= wanted <= max(1, num_tokens // layout.tp):
        shared = f" / layout.tp {layout.tp}" if layout.tp > 1 else ""
        problems.append(f"layout.token_slices must lie between 1 and data.seq_len {num_tokens}{shared}, found {wanted}")
    elif isinstance(wanted, tuple):
        found = list(wanted)
        if not found or min(found) < 1:
            problems.append(f"layout.token_slices must name lengths of at least one token each, found {found}")
        if sum(found) != num_tokens:
            problems.append(f"layout.token_slices must add up to data.seq_len {num_tokens}, found {sum(found)}")
        if any(length % layout.tp for length in found):
            problems.append(f"layout.tp must divide each of layout.token_slices, found {layout.tp} and {found}")
    if config.training.compile and wanted != 1:
        problems.append(
            "training.compile compiles for sequences of one length, and layout.token_slices cuts them; leave one out"
        )
    return problems


def _stage_problems(config: RunConfig) -> list[str]:
    layout = config.layout
    problems: list[str] = []
    pieces = config.model.num_layers + 2
    if layout.num_stages > pieces:
        problems.append(
            f"{count(layout.pp, 'pipeline rank')} x {count(layout.loops, 'loop')} need {layout.num_stages} stages, but "
            f"{count(config.model.num_layers, 'layer')} with embedding and head make only {pieces} pieces; "
            f"use {'fewer layout.loops' if layout.pp <= pieces else 'a smaller layout.pp'} or more model.num_layers"
        )
    if layout.partition is not None:
        problems += _partition_problems(layout, pieces)
    return problems


def _token_problems(config: RunConfig) -> list[str]:
    layout, num_tokens = config.layout, config.data.seq_len
    if layout.tp < 1 or layout.sequence_parallel or num_tokens % layout.tp == 0:
        return []
    share = "since messages carry a share of the tokens"
    return [f"layout.tp must divide data.seq_len, {share}, found {layout.tp} and {num_tokens}"]


def _tensor_problems(config: RunConfig) -> list[str]:
    layout, model = config.layout, config.model
    problems: list[str] = []
    # A head is computed whole, so heads go to ranks as they are; vocabulary and inner width may be cut anywhere.
    for name, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if layout.tp > 0 and size is not None and size % layout.tp:
            problems.append(f"layout.tp must divide model.{name}, found {layout.tp} and {size}")
    if layout.sequence_parallel and layout.tp == 1:
        problems.append("layout.sequence_parallel splits over the ranks of layout.tp, found layout.tp 1")
    elif layout.sequence_parallel and layout.tp > 1 and config.data.seq_len % layout.tp:
        problems.append(f"layout.tp must divide data.seq_len, found {layout.tp} and {config.data.seq_len}")
    return problems


def _recompute_problems(config: RunConfig) -> list[str]:
    layout, wanted = config.layout, config.model.num_layers
    if layout.recompute_layers is None:
        return []
    problems: list[str] = []
    if layout.recompute != "none":
        problems.append("layout.recompute and layout.recompute_layers both set what is recomputed; leave one out")
    if len(layout.recompute_layers) != wanted:
        found = len(layout.recompute_layers)
        problems.append(f"layout.recompute_layers must name {count(wanted, 'layer')} (model.num_layers), found {found}")
    return problems


def _compile_problems(config: RunConfig) -> list[str]:
    training = config.training
    if not training.compile or training.compile_backend != "inductor":
        return []
    return toolchain_problems(training.device)


def _data_parallel_problems(config: RunConfig) -> list[str]:
    layout, schedule = config.layout, config.schedule
    problems: list[str] = []
    if layout.replicate is not None and layout.replicate > 0:
        if layout.shard == "none":
            problems.append("layout.replicate makes copies of what layout.shard shares out, found layout.shard none")
        if layout.dp % layout.replicate:
            problems.append(f"layout.replicate must divide layout.dp, found {layout.replicate} and {layout.dp}")
    wanted: dict[str, tuple[Shard, ...]] = {
        "residency": ("full",),
        "prefetch": ("optimizer", "gradients", "full"),
        "gradient_buffers": ("gradients", "full"),
    }
    problems += [
        f"schedule.{name} has no effect with layout.shard {layout.shard}; it takes {' or '.join(levels)}"
        for name, levels in wanted.items()
        if getattr(schedule, name) is not None and layout.shard not in levels
    ]
    return problems


def _budget_problems(config: RunConfig) -> list[str]:
    layout, schedule = config.layout, config.schedule
    if schedule.device_budget is None:
        if schedule.swap_folder is None:
            return []
        return ["schedule.swap_folder has no effect without schedule.device_budget; give both or leave it out"]
    problems = _size_problems("schedule.device_budget", schedule.device_budget)
    problems += [
        f"schedule.device_budget swaps the whole model through one device, found layout.{name} {size}; "
        f"use layout.{name} 1{' and more layout.loops' if name == 'pp' else ''}, or leave the budget out"
        for name, size in (("pp", layout.pp), ("dp", layout.dp), ("tp", layout.tp))
        if size > 1
    ]
    if layout.pp == 1 and layout.loops < _LEAST_STAGES:
        problems.append(
            f"schedule.device_budget needs layout.loops of at least {_LEAST_STAGES}, so that there are stages to swap, "
            f"found {layout.loops}"
        )
    others = {
        "training.compile": config.training.compile,
        "schedule.offload": schedule.offload,
        "layout.token_slices": layout.token_slices not in (None, 1),
    }
    problems += [
        f"schedule.device_budget does not work with {name}; leave one of them out"
        for name, is_on in others.items()
        if is_on
    ]
    return problems


def _swap_problems(config: RunConfig) -> list[str]:
    schedule, problems = config.schedule, list[str]()
    if schedule.balance and config.layout.pp < 2:
        problems.append(
            f"schedule.balance moves activations between pipeline ranks, found layout.pp {config.layout.pp}"
        )
    if schedule.offload and schedule.activation_budget is None:
        problems.append("schedule.offload moves what schedule.activation_budget has no room for; set it")
    if schedule.activation_budget is not None and not (schedule.balance or schedule.offload):
        problems.append("schedule.activation_budget has no effect without schedule.balance or schedule.offload")
    return problems + _size_problems("schedule.activation_budget", schedule.activation_budget)


def _file_problems(config: RunConfig) -> list[str]:
    """What is wrong with a schedule file before it is compared with the schedule that the run makes."""
    schedule, default = config.schedule, type(config.schedule)()
    if schedule.file is None:
        return []
    problems: list[str] = []
    if config.layout.token_slices == "auto":
        problems.append("schedule.file has a number of token slices, and layout.token_slices auto chooses one; set it")
    try:
        given = read_schedule(schedule.file)
    except UserError as error:
        return [*problems, f"schedule.file: {error}"]
    made_by = ("family", "group_size", "keep", "receive_buffers", "prefetch")
    problems += [
        f"schedule.{name} has no effect with {schedule.file}, which does not say how it was made; leave it out"
        for name in made_by
        if not given.recipe and getattr(schedule, name) != getattr(default, name)
    ]
    return problems


def _size_problems(name: str, text: str | None) -> list[str]:
    try:
        # An unset size is right.
        parse_bytes("1" if text is None else text)
    except ValueError as error:
        return [f"{name}: {error}"]
    return []


def optimizer_problems(config: RunConfig) -> list[str]:
    """What is wrong with the rule and its settings, one sentence each."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        return [f"optimizer.name: {OPTIMIZERS.unknown(optimizer.name)}"]
    wrong = [text for text in optimizer.settings if not re.fullmatch(r"\w+=[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text)]
    if wrong:
        return [f"optimizer.settings must be texts such as name=0.5, found {' '.join(map(repr, wrong))}"]
    taken = optimizer.rule.settings
    whose = f"optimizer.name {optimizer.name}, which takes {', '.join(taken)}"
    return [
        f"optimizer.{name} has no effect with {whose}; leave it out" for name in optimizer.given if name not in taken
    ]


def _place_problems(config: RunConfig) -> list[str]:
    order, pp = config.layout.pipeline_order, config.layout.pp
    if order is None or sorted(order) == list(range(pp)):
        return []
    return [f"layout.pipeline_order must name each pipeline rank 0..{pp - 1} once, found {' '.join(map(str, order))}"]


def _partition_problems(layout: Layout, pieces: int) -> list[str]:
    partition = layout.partition or ()
    problems: list[str] = []
    if len(partition) != layout.num_stages:
        problems.append(f"layout.partition must name {count(layout.num_stages, 'stage')}, found {len(partition)}")
    if any(size < 1 for size in partition):
        problems.append(f"layout.partition must give every stage at least one piece, found {partition}")
    if sum(partition) != pieces:
        problems.append(f"layout.partition must add up to {pieces} (embedding, layers, head), found {sum(partition)}")
    return problems


def vocabulary_problems(config: RunConfig, num_tokens: int) -> list[str]:
    """What is wrong with a model of fewer tokens than its tokenizer has.

    Args:
        config: with the model.
        num_tokens: of the tokenizer.
    """
    given = config.model.vocab_size
    if given is None or given >= num_tokens or given < _AT_LEAST["model.vocab_size"]:
        return []
    which = f"the number of tokens of the {config.data.known_tokenizer} tokenizer"
    return [f"model.vocab_size must be at least {num_tokens}, {which}, found {given}; leave it out to use {num_tokens}"]


def _text_problems(config: RunConfig) -> list[str]:
    path = config.data.path
    if path == Path():
        return ["data.path must be a text file or a folder, found nothing; leave it out for the default text"]
    try:
        is_missing = path is not None and not path.exists()
    except OSError:  # such as a name that is too long
        is_missing = True
    return [f"data.path must be a text file or a folder, found nothing at {path}"] if is_missing else []


def _checkpoint_problems(config: RunConfig) -> list[str]:
    """What is wrong whichever checkpoint of a run folder is taken: the newest whole one is chosen later."""
    resume, steps = config.checkpoint.resume, config.training.known_steps
    if resume is None:
        return []
    try:
        if not is_checkpoint(resume):
            find_checkpoint(resume)
    except (UserError, OSError) as error:  # an OSError such as a name that is too long
        return [f"checkpoint.resume: {reason_of(error)}"]
    # The oldest one, since a newer one may turn out to be damaged: only what no checkpoint allows is a problem here.
    oldest = resume if is_checkpoint(resume) else list_checkpoints(resume)[0]
    done = step_of(oldest)
    if done is not None and steps < done:
        return [f"training.steps must be at least {done}, the steps that {oldest} has done, found {steps}"]
    return []
