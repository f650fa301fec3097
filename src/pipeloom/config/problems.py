"""Validation of a run's configuration: a sentence for each problem, all problems together.

The limits of a single setting are in its type (``pipeloom.workload.limits``); combinations of settings are checked
here.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

from pipeloom.checkpoint.checkpoint_folder import (
    find_checkpoint,
    find_weights,
    is_checkpoint,
    list_checkpoints,
    step_of,
)
from pipeloom.config.automatic_loops import loops_problems
from pipeloom.config.density_problems import density_problems, density_size_problems
from pipeloom.config.expert_problems import (
    balance_problems,
    expert_adapter_problems,
    expert_problems,
    expert_size_problems,
)
from pipeloom.config.layout_problems import (
    Problems,
    adapted_problems,
    average_problems,
    context_problems,
    expert_sharing_problems,
    file_problems,
    freeze_problems,
    load_problems,
    move_problems,
    narrow_problems,
    order_problems,
    overlap_problems,
    place_problems,
    recompute_problems,
    replica_problems,
    slice_problems,
    stage_problems,
    swap_problems,
    tensor_problems,
    update_problems,
)
from pipeloom.config.run import RunConfig, value_of
from pipeloom.config.sections import OptimizerConfig
from pipeloom.config.sharing_problems import sharing_problems
from pipeloom.config.step_problems import adds_checkpoints, step_problems
from pipeloom.config.tokenizer_files import num_tokens
from pipeloom.errors import UserError, reason_of
from pipeloom.system.toolchain import toolchain_problems
from pipeloom.workload.dtypes import TRAINED
from pipeloom.workload.limits import Limits, limits_of
from pipeloom.workload.model import head_problems
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.optimizers import OPTIMIZERS, SHARED


def find_problems(config: RunConfig, *, trains: bool = True, is_model_known: bool = True) -> list[str]:
    """Problems of the values of a run, one sentence each; empty if there are none.

    Args:
        config: the run.
        trains: whether the run is trained on this machine, so that its text, checkpoint and compiler must exist.
        is_model_known: whether the sizes of the model are final; otherwise they are not checked.
    """
    checks = [_range_problems, order_problems, loops_problems, slice_problems, context_problems]
    of_model = [
        _model_problems,
        expert_size_problems,
        expert_adapter_problems,
        density_size_problems,
        stage_problems,
        tensor_problems,
        recompute_problems,
    ]
    checks += of_model if is_model_known else []
    checks += [_unused_problems, adapted_problems, move_problems, swap_problems, freeze_problems]
    checks += [update_problems, narrow_problems, expert_problems, density_problems, balance_problems, load_problems]
    checks += [expert_sharing_problems, overlap_problems]
    checks += [sharing_problems] if is_model_known else []
    checks += [
        replica_problems,
        average_problems,
        place_problems,
        file_problems,
        optimizer_problems,
        _tokenizer_problems,
        _source_problems,
    ]
    if trains:
        checks += [_text_problems, _checkpoint_problems, step_problems, _training_problems]
    return [problem for check in checks for problem in check(config)]


def decided_problems(config: RunConfig, *, trains: bool = True, is_model_known: bool = True) -> list[str]:
    """As ``find_problems``, for work that does not measure what ``layout.loops auto`` chooses by."""
    found = find_problems(config, trains=trains, is_model_known=is_model_known)
    if not config.layout.is_automatic:
        return found
    only = "layout.loops auto: only `pipeloom train` measures what it chooses by; set a number of layout.loops"
    return [only, *(problem for problem in found if not problem.startswith("layout.loops auto"))]


_DEFAULTS = RunConfig()


def _has_angles(run: RunConfig) -> bool:
    # An unknown family is reported elsewhere; a resolved configuration has the default value for every family.
    is_default = run.model.rope_theta == _DEFAULTS.model.known_rope_theta
    return is_default or _is_rotary(run)


def _is_rotary(run: RunConfig) -> bool:
    return run.model.family not in MODELS or MODELS[run.model.family].is_rotary


def _has_local_angles(family: str) -> bool:
    return family not in MODELS or MODELS[family].rope_local_theta is not None


_Need = tuple[str, Callable[[RunConfig], bool]]
"""A condition under which a setting has an effect: in words, and as a function of the run."""
# Sizes below 1 are reported elsewhere.
_REPLICAS: _Need = ("layout.dp x layout.cp of at least 2", lambda run: run.layout.data_ranks != 1)
_PIPELINE: _Need = ("layout.pp of at least 2", lambda run: run.layout.has_pipeline)
_SHARD: _Need = ("layout.shard", lambda run: run.layout.shard != "none")
_SCALED: _Need = ("model.rope_scaling", lambda run: run.model.rope_scaling is not None)
_BY_TURNS: _Need = ("model.rope_scaling llama3 or yarn", lambda run: run.model.rope_scaling in ("llama3", "yarn"))
_ADAPTED: _Need = ("adapter.rank", lambda run: run.adapter.rank is not None)
_WINDOW: _Need = ("model.window", lambda run: run.model.window is not None)
_LOCAL: _Need = ("model.family gemma3", lambda run: _has_local_angles(run.model.family))
_EXPERTS: _Need = ("model.experts", lambda run: run.model.experts is not None)
_SHARED_EXPERTS: _Need = ("layout.ep of at least 2", lambda run: run.layout.shares_experts)
_DENSITY: _Need = ("model.density", lambda run: run.model.density is not None)
_LOSS: _Need = ("model.balance batch or microbatch", lambda run: run.model.known_balance in ("batch", "microbatch"))
_AVERAGES: _Need = ("layout.average_every", lambda run: run.layout.average_every is not None)
_RESTARTS: _Need = ("restart.times", lambda run: run.restart.times > 0)
_PEERS: _Need = ("layout.pp x layout.dp of at least 2", lambda run: run.layout.num_computing_groups != 1)
_SAVES: _Need = ("checkpoint.every or checkpoint.every_s", lambda run: run.saves_between_steps)
_SEVERAL_SAVED: _Need = (_SAVES[0], lambda run: run.saves_between_steps or adds_checkpoints(run))
_NEEDS: dict[str, tuple[_Need, ...]] = {
    "restart.layout": (_RESTARTS, ("a layout of at least 2 ranks", lambda run: run.layout.num_ranks != 1)),
    "restart.keep_every": (_RESTARTS,),
    "checkpoint.keep": (_SEVERAL_SAVED,),
    "checkpoint.keep_every": (("checkpoint.keep", lambda run: run.checkpoint.keep is not None), _SEVERAL_SAVED),
    "checkpoint.background": (_SAVES,),
    "model.rope_theta": (("a model.family with rotary positions", _has_angles),),
    "model.rope_local_theta": (_LOCAL, _WINDOW),
    "model.full_attention_layers": (_WINDOW,),
    "model.rope_scaling": (("a model.family with rotary positions", _is_rotary),),
    "model.rope_factor": (_SCALED,),
    "model.rope_original_len": (_BY_TURNS,),
    "model.rope_slow_turns": (_BY_TURNS,),
    "model.rope_fast_turns": (_BY_TURNS,),
    "model.rope_attention_factor": (("model.rope_scaling yarn", lambda run: run.model.rope_scaling == "yarn"),),
    **dict.fromkeys((f"model.{key}" for key in ("experts_per_token", "expert_every", "expert_ffn")), (_EXPERTS,)),
    **dict.fromkeys((f"model.{key}" for key in ("shared_experts", "expert_capacity", "balance")), (_EXPERTS,)),
    **dict.fromkeys(("model.density_block", "model.density_seed"), (_DENSITY,)),
    "model.balance_weight": (_EXPERTS, _LOSS),
    "model.balance_rate": (_EXPERTS, ("model.balance bias", lambda run: run.model.balance == "bias")),
    "data.bpe_vocab_size": (("data.tokenizer bpe", lambda run: run.data.tokenizer == "bpe"),),
    "layout.ep": (_EXPERTS, _REPLICAS),
    **dict.fromkeys(("machine.expert_load", "layout.ep_overlap"), (_EXPERTS, _SHARED_EXPERTS)),
    "layout.replicate": (_SHARD, _REPLICAS),
    "layout.shard": (_REPLICAS,),
    "layout.sequence_parallel": (("layout.tp of at least 2", lambda run: run.layout.tp != 1),),
    "layout.boundary": (_PIPELINE,),
    "layout.microbatches": (("layout.dp of at least 2", lambda run: run.layout.dp != 1),),
    "layout.average_every": (("layout.dp of at least 2", lambda run: run.layout.dp != 1),),
    "training.divide_every": (("layout.microbatches", lambda run: run.layout.microbatches is not None),),
    "layout.pipeline_order": (_PIPELINE,),
    "schedule.placement": (_PIPELINE,),
    "schedule.receive_buffers": (_PIPELINE,),
    "schedule.residency": (("layout.shard full", lambda run: run.layout.shard == "full"), _REPLICAS),
    "schedule.prefetch": (_SHARD, _REPLICAS),
    "schedule.gradient_buffers": (
        ("layout.shard gradients or full", lambda run: run.layout.shard in ("gradients", "full")),
        _REPLICAS,
    ),
    "schedule.balance": (_PIPELINE,),
    "schedule.activation_budget": (("balance or offload", lambda run: run.schedule.balance or run.schedule.offload),),
    "schedule.swap_folder": (("schedule.device_budget", lambda run: run.schedule.device_budget is not None),),
    "optimizer.lr_min_fraction": (
        ("an optimizer.lr_decay_style that decays", lambda run: run.optimizer.lr_decay_style != "constant"),
    ),
    "optimizer.lr_wsd_decay_steps": (
        ("optimizer.lr_decay_style wsd", lambda run: run.optimizer.lr_decay_style == "wsd"),
    ),
    "optimizer.clip_grad_norm": (("an optimizer.clip other than none", lambda run: run.optimizer.clip != "none"),),
    **dict.fromkeys(("optimizer.outer_lr", "optimizer.outer_momentum", "optimizer.outer_delayed"), (_AVERAGES,)),
    "adapter.targets": (_ADAPTED,),
    "adapter.alpha": (_ADAPTED,),
    "adapter.init": (_ADAPTED,),
    "training.check_every": (_PEERS,),
    "training.validate_every": (("training.validation_batches", lambda run: run.training.validation_batches > 0),),
    "training.compile_backend": (("training.compile", lambda run: run.training.compile),),
    "training.run_ahead": (("training.device cuda", lambda run: run.training.device == "cuda"),),
}
"""Settings that have an effect in some runs only -> their conditions.

Other runs may only have the default value, since the file of a run folder contains every setting."""


def _unused_problems(config: RunConfig) -> Problems:
    idle: dict[str, list[str]] = {}
    for name, needs in _NEEDS.items():
        missing = " and ".join(words for words, is_met in needs if not is_met(config))
        if missing and value_of(config, name) != value_of(_DEFAULTS, name):
            idle.setdefault(missing, []).append(name)
    for missing, names in idle.items():
        has, leave = ("has", "give both or leave it out") if len(names) == 1 else ("have", "set that or leave them out")
        yield f"{', '.join(names)} {has} no effect without {missing}; {leave}"


def in_order(problems: Iterable[str]) -> list[str]:
    """Sort sentences in the order of a run file, by the first setting in each; sentences without a setting are last."""
    names = [f"{item.name}.{key.name}" for item in fields(RunConfig) for key in fields(getattr(_DEFAULTS, item.name))]
    sections = [item.name for item in fields(RunConfig)]

    def place(problem: str) -> tuple[int, int]:
        found = _SETTING.search(problem)
        if found is None or found[1] not in sections:
            return len(sections), 0
        # An unknown setting follows those of its section.
        return sections.index(found[1]), names.index(found[0]) if found[0] in names else len(names)

    return sorted(problems, key=place)


_SETTING = re.compile(r"\b([a-z]+)\.[a-z_]+\b")


@cache
def _limits() -> dict[str, Limits]:
    """Setting -> limits, for those with limits."""
    return {
        f"{section}.{key}": limits
        for section, part in get_type_hints(RunConfig).items()
        for key, hint in get_type_hints(part, include_extras=True).items()
        for limits in limits_of(hint)
    }


def _range_problems(config: RunConfig) -> Problems:
    for name, limits in _limits().items():
        value = value_of(config, name)
        if value is not None and (refusal := limits.refusal(value)) is not None:
            yield f"{name} {refusal}"
    # AdamW divides by 1 - beta ** step.
    if not all(0 <= beta < 1 for beta in config.optimizer.betas or ()):
        yield f"optimizer.betas must be at least 0 and below 1, found {config.optimizer.betas}"


def _model_problems(config: RunConfig) -> Problems:
    model = config.model
    if model.preset is not None and model.file is not None:
        yield "model.preset and model.file both give the sizes; leave one out"
    if model.family not in MODELS:
        yield f"model.family: {MODELS.unknown(model.family)}"
        return
    if model.adapted is not None:
        return
    names = ("model.hidden_size", "model.num_heads", "model.num_kv_heads", "model.head_size")
    sizes = (model.hidden_size, model.num_heads, model.num_kv_heads, model.head_size)
    yield from head_problems(sizes, is_rotary=MODELS[model.family].is_rotary, names=names)
    last, layers = model.num_layers - 1, model.full_attention_layers or ()
    if model.window is not None and (wrong := [layer for layer in layers if not 0 <= layer <= last]):
        yield f"model.full_attention_layers must name layers from 0 to {last} (model.num_layers), found {wrong}"
    if model.window is not None and set(layers).issuperset(range(model.num_layers)):
        yield "model.window has no effect where model.full_attention_layers names every layer; leave both out"
    if model.rope_scaling is not None:
        needed = ("rope_factor",) if model.rope_scaling == "linear" else ("rope_factor", "rope_original_len")
        missing = [f"model.{name}" for name in needed if getattr(model, name) is None]
        if missing:
            yield f"model.rope_scaling {model.rope_scaling} needs {' and '.join(missing)}"
        elif (scaling := model.scaling) is not None and scaling.slow_turns >= scaling.fast_turns:
            yield (
                f"model.rope_slow_turns must be below model.rope_fast_turns, found {scaling.slow_turns:g} and "
                f"{scaling.fast_turns:g}"
            )
        if model.rope_scaling == "yarn" and model.known_rope_theta <= 1:
            yield f"model.rope_theta must be above 1 for model.rope_scaling yarn, found {model.known_rope_theta:g}"


def optimizer_problems(config: RunConfig) -> Problems:
    """Problems of the update rule and its settings in any layout, one sentence each."""
    optimizer = config.optimizer
    if optimizer.name not in OPTIMIZERS:
        yield f"optimizer.name: {OPTIMIZERS.unknown(optimizer.name)}"
        return
    if wrong := [text for text in optimizer.settings if not _is_setting(text)]:
        found = " ".join(map(repr, wrong))
        yield f"optimizer.settings must be texts such as name=0.5, with finite numbers, found {found}"
        return
    if optimizer.clip == "stage" and math.isinf(optimizer.known_clip_grad_norm):
        yield "optimizer.clip stage clips nothing with optimizer.clip_grad_norm inf; leave one of them out"
    taken, keys = optimizer.rule.settings, _keys_of(optimizer)
    for name in optimizer.given:
        if name not in taken:
            whose = f"optimizer.name {optimizer.name}, which takes {', '.join(taken)}"
            yield f"{keys[name][0]} has no effect with {whose}; leave it out"
        elif name in SHARED:
            # The limits of a key are not those of a text.
            yield from (f"{text} has a key of its own; use optimizer.{name}" for text in keys[name] if "=" in text)
        elif len(keys[name]) > 1:
            yield f"{' and '.join(keys[name])} set the same; leave all but one of them out"


def _is_setting(text: str) -> bool:
    """Whether a text is a name and a finite number."""
    found = re.fullmatch(r"\w+=([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", text)
    return found is not None and math.isfinite(float(found[1]))


def _keys_of(optimizer: OptimizerConfig) -> dict[str, list[str]]:
    """Name of a setting of the update rule -> where it is set: a key of the section, or a text of its ``settings``."""
    found = {name: [f"optimizer.{name}"] for name in SHARED if getattr(optimizer, name) is not None}
    for text in optimizer.settings:
        found.setdefault(text.split("=")[0], []).append(f"optimizer.settings {text}")
    return found


def vocabulary_problems(config: RunConfig, num_tokens: int) -> Problems:
    """The problem of a model with a smaller vocabulary than its tokenizer."""
    given = config.model.vocab_size
    # Sizes outside the limits are reported elsewhere.
    if given is not None and given < num_tokens and not _limits()["model.vocab_size"].refusal(given):
        which = f"the number of tokens of data.tokenizer {config.data.known_tokenizer}"
        wanted = f"model.vocab_size must be at least {num_tokens}, {which}"
        model = config.model.file or config.model.preset or config.checkpoint.init
        smaller = f"set data.tokenizer to one of at most {given} tokens, the size of {model}"
        advice = f"leave it out to use {num_tokens}" if model is None else smaller
        yield f"{wanted}, found {given}; {advice}"


def _tokenizer_problems(config: RunConfig) -> Problems:
    """Problems of a tokenizer's file, if the run needs it: a checkpoint, or a run with known sizes, may do without."""
    path = config.data.tokenizer
    if not isinstance(path, Path):
        return
    try:
        if path.exists() or config.model.vocab_size is None:
            yield from vocabulary_problems(config, num_tokens(path))
    except (UserError, OSError) as error:  # an OSError such as a name that is too long
        yield f"data.tokenizer must be bytes, bpe, a tokenizer.json or a folder with one; {reason_of(error)}"


def _text_problems(config: RunConfig) -> Problems:
    if config.data.known_tokenizer == "bytes":  # the size of bpe depends on the text
        yield from vocabulary_problems(config, config.data.vocab_size)
    data = config.data
    for path in [data.path] if data.sources is None else [one.path for one in data.sources]:
        name = "data.path" if data.sources is None else "the path of each of data.sources"
        try:
            is_missing = path is not None and not path.exists()
        except OSError:  # such as a name that is too long
            is_missing = True
        if is_missing:
            yield f"{name} must be a file or a folder, found nothing at {path}"


def _source_problems(config: RunConfig) -> Problems:
    sources = config.data.sources
    if sources is None:
        return
    for name in ("data.path", "data.field"):
        if value_of(config, name) != value_of(_DEFAULTS, name):
            yield f"{name} and data.sources, which have a {name[5:]} each, are both given; leave one out"
    if not sources:
        yield "data.sources must have at least one source, found none; leave it out for one text"
    for one in sources:
        if not 0 < one.weight < math.inf:
            yield f"the weight of each of data.sources must be above 0 and finite, found {one.weight} for {one.path}"
    paths = [one.path for one in sources]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        fields = list(dict.fromkeys(one.field for one in sources if one.path == path))
        # Checkpoints find a source by its path where its text has changed.
        several = f"for the fields {', '.join(fields)}; give the others as links to it"
        advice = "; add the weights" if len(fields) == 1 else f" {several}"
        yield f"each of data.sources must have a path of its own, found {path} twice{advice}"


def _checkpoint_problems(config: RunConfig) -> Problems:
    """Problems of every checkpoint of the folder to resume from; the newest complete one is chosen later."""
    resume, steps = config.checkpoint.resume, config.training.known_steps
    if resume is None:
        yield from _init_problems(config.checkpoint.init)
        return
    try:
        if not is_checkpoint(resume):
            find_checkpoint(resume)
    except (UserError, OSError) as error:  # an OSError such as a name that is too long
        yield f"checkpoint.resume: {reason_of(error)}"
        return
    # Compare with the oldest checkpoint: newer ones may be damaged.
    oldest = resume if is_checkpoint(resume) else list_checkpoints(resume)[0]
    done = step_of(oldest)
    if done is not None and steps < done:
        yield f"training.steps must be at least {done}, the step of {oldest}, found {steps}"


def _init_problems(init: Path | None) -> Problems:
    """Problems of the folder that a new run takes its weights from; its tensors are compared later."""
    try:
        if init is not None and not is_checkpoint(init):
            find_weights(init)
    except (UserError, OSError) as error:  # an OSError such as a name that is too long
        yield f"checkpoint.init: {reason_of(error)}"


_LOGGERS = {"tensorboard": "'pipeloom[log]'", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Package of each ``output.log`` -> what pip installs."""


def _training_problems(config: RunConfig) -> Problems:
    """Problems that only training has, not predictions."""
    log = config.output.log
    if log is not None and find_spec(log) is None:
        yield f"output.log {log} needs a package that is missing: pip install {_LOGGERS[log]}"
    layout, training, num_tokens = config.layout, config.training, config.data.seq_len
    if layout.tp > 1 and not layout.sequence_parallel and num_tokens % layout.tp:
        share = "since messages carry a share of the tokens"
        yield f"layout.tp must divide data.seq_len, {share}, found {layout.tp} and {num_tokens}"
    if training.compile and training.compile_backend == "inductor":
        yield from toolchain_problems(training.device)
    if training.matmul_dtype is not None:
        narrow = f"training.matmul_dtype {training.matmul_dtype}"
        yield f"{narrow}: simulate and plan price such products, train does not run them; leave it out"
    dtype = training.known_dtype
    if dtype not in TRAINED:
        trained = ", ".join(TRAINED)
        yield f"training.dtype {dtype} needs a scaled loss, which train does not have; use one of {trained}"
