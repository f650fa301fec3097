"""Problems of a run's layout and schedule, and of what does not work together: one sentence each."""

from collections.abc import Iterator

from pipeloom.config.run import RunConfig, value_of
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES
from pipeloom.schedule import read_schedule
from pipeloom.schedule.file import MOVED_BY
from pipeloom.terminal.words import count, parse_bytes
from pipeloom.workload.adapter import known_targets
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.optimizers import OPTIMIZERS

Problems = Iterator[str]

NO_CACHE = (
    "generate caches keys and values, which it cannot do in layers of transformers; export the run with --format hf, "
    "and generate with transformers"
)


def order_problems(config: RunConfig) -> Problems:
    """Families that do not exist, or not with this layout."""
    # Replace the names of sizes in messages about a family by the names of settings.
    names = {"pp ": "layout.pp ", "loops ": "layout.loops ", "the number of micro-batches ": "layout.num_microbatches "}
    for problem in config.choice().problems():
        old = next((one for one in names if problem.startswith(one)), "")
        yield names.get(old, "") + problem.removeprefix(old)
    if config.family == "forward-only":
        yield "schedule.family forward-only trains nothing; use breadth-first"


def slice_problems(config: RunConfig) -> Problems:
    """Token slices."""
    layout, num_tokens, wanted = config.layout, config.data.seq_len, config.layout.token_slices
    if wanted is None or layout.tp < 1:
        return
    # The tokens of a slice are divided among the tensor-parallel ranks, so a slice has at least tp tokens.
    if isinstance(wanted, int) and not 1 <= wanted <= max(1, num_tokens // layout.tp):
        shared = f" / layout.tp {layout.tp}" if layout.tp > 1 else ""
        yield f"layout.token_slices must lie between 1 and data.seq_len {num_tokens}{shared}, found {wanted}"
    elif isinstance(wanted, tuple):
        found = list(wanted)
        if not found or min(found) < 1:
            yield f"layout.token_slices must name lengths of at least one token each, found {found}"
        if sum(found) != num_tokens:
            yield f"layout.token_slices must add up to data.seq_len {num_tokens}, found {sum(found)}"
        if any(length % layout.tp for length in found):
            yield f"layout.tp must divide each of layout.token_slices, found {layout.tp} and {found}"
    if config.data.by_document and wanted == "auto":
        yield (
            "layout.token_slices auto measures slices without the mask of data.attention document; give a number or "
            "lengths of slices"
        )
    if config.training.compile and wanted != 1:
        yield "training.compile compiles for sequences of one length, and layout.token_slices cuts them; leave one out"


def stage_problems(config: RunConfig) -> Problems:
    """Stages and the pieces of the model."""
    layout, pieces = config.layout, config.model.num_layers + 2
    if layout.num_stages > pieces:
        is_given = config.model.preset is not None or config.model.file is not None
        yield (
            f"{count(layout.pp, 'pipeline rank')} x {count(layout.num_loops, 'loop')} need {layout.num_stages} stages, "
            f"but {count(config.model.num_layers, 'layer')} with embedding and head make only {pieces} pieces; "
            f"use {'fewer layout.loops' if layout.pp <= pieces else 'a smaller layout.pp'}"
            f"{'' if is_given else ' or more model.num_layers'}"
        )
    partition = layout.partition
    if partition is None or layout.is_automatic:  # which refuses a partition
        return
    if len(partition) != layout.num_stages:
        yield f"layout.partition must name {count(layout.num_stages, 'stage')}, found {len(partition)}"
    if any(size < 1 for size in partition):
        yield f"layout.partition must give every stage at least one piece, found {partition}"
    if sum(partition) != pieces:
        yield f"layout.partition must add up to {pieces} (embedding, layers, head), found {sum(partition)}"


def tensor_problems(config: RunConfig) -> Problems:
    """What tensor parallelism divides."""
    layout, model, num_tokens = config.layout, config.model, config.data.seq_len
    optimizer = config.optimizer
    # A rank computes whole heads; vocabulary and inner width may be divided unevenly.
    for name, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if layout.tp > 0 and size is not None and size % layout.tp and model.adapted is None:
            yield f"layout.tp must divide model.{name}, found {layout.tp} and {size}"
    if layout.sequence_parallel and layout.tp > 1 and num_tokens % layout.tp:
        yield f"layout.tp must divide data.seq_len, found {layout.tp} and {num_tokens}"
    if layout.tp > 1 and model.density is not None:
        divided = f"layout.tp {layout.tp}, which divides matrices between ranks"
        yield f"model.density does not work with {divided}; leave one of them out"
    if layout.tp > 1 and optimizer.name in OPTIMIZERS and optimizer.rule.matrices is not None:
        whole = f"optimizer.name {optimizer.name} updates whole matrices"
        yield f"{whole}, which layout.tp {layout.tp} divides between ranks; set layout.tp 1"


def context_problems(config: RunConfig) -> Problems:
    """What context parallelism divides."""
    layout, num_tokens = config.layout, config.data.seq_len
    if layout.cp == 1 or layout.tp < 1:
        return
    # Each rank has two parts of the tokens, which its tensor-parallel ranks share.
    if num_tokens % (2 * layout.cp * layout.tp):
        named = f"2 x layout.cp{' x layout.tp' if layout.tp > 1 else ''}"
        yield f"{named} must divide data.seq_len, found {2 * layout.cp * layout.tp} and {num_tokens}"
    if layout.cuts_sequences:
        yield "layout.token_slices cuts sequences that layout.cp divides among ranks; leave one of them out"


def load_problems(config: RunConfig) -> Problems:
    """Loads of experts in a micro-batch of which no rank has all tokens."""
    layout, model = config.layout, config.model
    counting = {
        "model.balance microbatch": (model.balance == "microbatch", "use batch"),
        "model.expert_capacity": (model.expert_capacity is not None, "leave one of them out"),
    }
    for name, (counts, instead) in counting.items():
        if model.experts is None or not counts:
            continue
        if layout.cp > 1:
            yield f"{name} counts in one rank, and layout.cp divides micro-batches; {instead}"
        if layout.cuts_sequences:
            yield f"{name} counts whole micro-batches, and layout.token_slices cuts them; {instead}"


def expert_sharing_problems(config: RunConfig) -> Problems:
    """Experts that ranks share."""
    layout, model, schedule = config.layout, config.model, config.schedule
    if layout.ep < 2 or model.experts is None:  # experts that are not there are reported elsewhere
        return
    if model.experts % layout.ep:
        yield f"layout.ep must divide model.experts, found {layout.ep} and {model.experts}"
    if layout.data_ranks > 1 and layout.data_ranks % layout.ep:
        named = "layout.dp x layout.cp" if layout.cp > 1 else "layout.dp"
        yield f"layout.ep must divide {named}, found {layout.ep} and {layout.data_ranks}"
    refused = {
        "layout.replicate, which divides the ranks that share state": layout.replicate is not None,
        # Bytes that depend on the tokens which arrive.
        "schedule.balance, which moves activations of known sizes": schedule.balance,
        "schedule.offload, which moves activations of known sizes": schedule.offload,
        "layout.average_every, whose replicas step alone": layout.average_every is not None,
        "optimizer.update stage, which updates each stage as one": config.optimizer.known_update.within_step,
        "training.check_every, whose ranks compute stages without the others": config.training.check_every is not None,
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"layout.ep does not work with {name}; leave one of them out"


def overlap_problems(config: RunConfig) -> Problems:
    """What halves of a micro-batch that are computed in turns do not work with."""
    layout, model = config.layout, config.model
    if not layout.ep_overlap or layout.ep < 2:
        return
    if not layout.has_halves:
        yield "layout.ep_overlap needs micro-batches of two sequences or more, found layout.microbatch_size 1"
    refused = {
        "model.balance microbatch, which counts whole micro-batches": model.balance == "microbatch",
        "model.expert_capacity, which counts whole micro-batches": model.expert_capacity is not None,
        "data.attention document, whose masks are of whole micro-batches": config.data.by_document,
        "layout.token_slices, which cuts micro-batches": layout.cuts_sequences,
        "training.compile, which compiles whole layers": config.training.compile,
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"layout.ep_overlap does not work with {name}; leave one of them out"


def replica_problems(config: RunConfig) -> Problems:
    """Replicas with micro-batches of their own."""
    layout, schedule, own = config.layout, config.schedule, config.layout.own_microbatches
    if layout.microbatches is None:
        return
    if own is None and not config.training.predict:
        yield (
            "layout.microbatches auto divides by what training.predict measures before the first step; leave "
            "training.predict out, or give numbers"
        )
    if own is not None and len(own) != layout.dp:
        yield f"layout.microbatches must name {count(layout.dp, 'replica')} (layout.dp), found {len(own)}"
    if own is not None and min(own, default=0) < 1:
        yield f"layout.microbatches must give every replica at least one micro-batch, found {list(own)}"
    elif own is not None and layout.num_microbatches != max(own):
        yield f"layout.num_microbatches {layout.num_microbatches} has no effect with layout.microbatches; leave it out"
    others = {
        # Their gathers and reductions follow micro-batches, and those of all replicas have to meet.
        f"layout.shard {layout.shard}": layout.shard in ("gradients", "full"),
        # Counts of tokens are summed in the order in which a rank's stages end their forwards.
        "model.experts": config.model.experts is not None,
        "layout.loops auto": layout.is_automatic,
        "layout.token_slices": layout.cuts_sequences,
        "schedule.keep": schedule.keep is not None,
        "schedule.balance": schedule.balance,
        "schedule.offload": schedule.offload,
        "schedule.file": schedule.file is not None,
        "optimizer.update stage": config.optimizer.known_update.within_step,
        "training.check_every": config.training.check_every is not None,
    }
    for name, is_on in others.items():
        if is_on:
            yield f"layout.microbatches does not work with {name}; leave one of them out"


def average_problems(config: RunConfig) -> Problems:
    """Replicas that step alone, and average their weights."""
    layout, schedule, training, own = config.layout, config.schedule, config.training, config.layout.average_every
    if own is None:
        return
    if isinstance(own, tuple) and len(own) != layout.dp:
        wanted = f"one number or {count(layout.dp, 'replica')} (layout.dp)"
        yield f"layout.average_every must name {wanted}, found {len(own)}"
    if min(own if isinstance(own, tuple) else (own,), default=0) < 1:
        yield f"layout.average_every must be at least one update for every replica, found {own}"
    others = {
        # Replicas would gather and reduce what only one of them is at.
        f"layout.shard {layout.shard}": layout.shard != "none",
        f"layout.cp {layout.cp}": layout.cp > 1,
        "layout.microbatches": layout.microbatches is not None,
        "layout.loops auto": layout.is_automatic,
        "layout.token_slices auto": layout.token_slices == "auto",
        "schedule.file": schedule.file is not None,
        "model.experts": config.model.experts is not None,
        "model.share_layers": config.model.share_layers is not None,
        "optimizer.clip stage": config.optimizer.clip == "stage",
        "optimizer.update stage": config.optimizer.known_update.within_step,
        "optimizer.wide_weights false": not config.optimizer.wide_weights,
        f"training.on_spike {training.on_spike}": training.on_spike != "stop",
        "training.check_every": training.check_every is not None,
        "restart.layout plan": config.restart.layout == "plan",
    }
    for name, is_on in others.items():
        if is_on:
            yield f"layout.average_every does not work with {name}; leave one of them out"


def recompute_problems(config: RunConfig) -> Problems:
    """Recomputation by layer."""
    by_layer, wanted = config.layout.recompute_layers, config.model.num_layers
    if by_layer is None:
        return
    if config.layout.recompute != "none":
        yield "layout.recompute and layout.recompute_layers both set what is recomputed; leave one out"
    if len(by_layer) != wanted:
        yield f"layout.recompute_layers must name {count(wanted, 'layer')} (model.num_layers), found {len(by_layer)}"


def move_problems(config: RunConfig) -> Problems:
    """Activations on the host or on other ranks."""
    schedule = config.schedule
    if schedule.offload and schedule.activation_budget is None:
        yield "schedule.offload moves what schedule.activation_budget has no room for; set it"
    yield from _size_problems("schedule.activation_budget", schedule.activation_budget)


def swap_problems(config: RunConfig) -> Problems:
    """A model that is larger than its device."""
    layout, schedule = config.layout, config.schedule
    if schedule.device_budget is None:
        return
    yield from _size_problems("schedule.device_budget", schedule.device_budget)
    for name, size in reversed(layout.axes._asdict().items()):
        if size > 1 and layout.has_own_experts and name in ("tp", "cp"):
            yield f"schedule.device_budget swaps experts without layout.{name} {size}; leave one of them out"
        elif size > 1 and not layout.has_own_experts:
            more = " and more layout.loops" if name == "pp" else ""
            more += f", layout.ep {layout.data_ranks} to swap experts alone" if config.model.experts is not None else ""
            yield (
                f"schedule.device_budget swaps the whole model through one device, found layout.{name} {size}; "
                f"use layout.{name} 1{more}, or leave the budget out"
            )
    if layout.has_own_experts and layout.shard == "none":
        yield (
            "schedule.device_budget swaps experts beside gathers of the rest, found layout.shard none; use optimizer, "
            "gradients or full"
        )
    if (layout.pp == 1 or layout.has_own_experts) and layout.num_loops < 2:
        yield (
            "schedule.device_budget needs layout.loops of at least 2, so that there are stages to swap, "
            f"found {layout.num_loops}"
        )
    others = {
        f"training.on_spike {config.training.on_spike}": config.training.on_spike != "stop",
        "training.compile": config.training.compile,
        "schedule.offload": schedule.offload,
        "layout.token_slices": layout.cuts_sequences,
    }
    for name, is_on in others.items():
        if is_on:
            yield f"schedule.device_budget does not work with {name}; leave one of them out"


def update_problems(config: RunConfig) -> Problems:
    """Updates of stages within the step, before the gradients of others are complete."""
    optimizer, layout, training = config.optimizer, config.layout, config.training
    if not optimizer.known_update.within_step:
        return
    if optimizer.known_update.needs_norm:
        yield (
            "optimizer.update stage updates a stage before the gradients of others are complete, so the norm of the "
            "whole gradient is not known (optimizer.clip whole); use optimizer.clip none or stage"
        )
    # The norm of a stage whose gradient is divided between ranks would be one more exchange within the row.
    divides = layout.tp > 1 or (layout.data_ranks > 1 and layout.shard != "none")
    if optimizer.clip == "stage" and divides:
        yield (
            "optimizer.update stage with optimizer.clip stage needs each stage's whole gradient on a rank, which "
            "layout.shard and layout.tp divide; use optimizer.clip none, or neither of them"
        )
    others = {
        "schedule.device_budget, which does so without it": config.schedule.device_budget is not None,
        "schedule.gradient_buffers, since each stage is reduced once": config.schedule.gradient_buffers is not None,
        "training.on_spike skip, which decides by all gradients": training.on_spike == "skip",
        "training.check_every, which compares weights before updates": training.check_every is not None,
    }
    for name, is_on in others.items():
        if is_on:
            yield f"optimizer.update stage does not work with {name}; leave one of them out"


def narrow_problems(config: RunConfig) -> Problems:
    """Weights that are updated without a float32 copy."""
    optimizer, dtype = config.optimizer, config.training.known_dtype
    if optimizer.wide_weights:
        return
    what = "optimizer.wide_weights false"
    if dtype != "bfloat16":
        yield f"{what} updates bfloat16 weights, found training.dtype {dtype}; set bfloat16, or leave it out"
    if optimizer.name in OPTIMIZERS and not optimizer.rule.takes_narrow:
        known = " and ".join(name for name, one in OPTIMIZERS.items() if one.takes_narrow)
        yield f"{what} works with optimizer.name {known}, found {optimizer.name}"
    if config.schedule.device_budget is not None:
        yield f"{what} does not work with schedule.device_budget, which moves float32 weights; leave one of them out"


def refused_over_stages(config: RunConfig) -> dict[str, bool]:
    """What does not work with layers of several stages that share their weights -> whether the run has it."""
    layout, optimizer, schedule = config.layout, config.optimizer, config.schedule
    updates_within = optimizer.known_update.within_step
    # The flat buffers of two stages differ, and so would the shards of what both have.
    is_sharded = layout.shard != "none" and layout.data_ranks > 1
    return {
        f"layout.shard {layout.shard} with several stages, whose shards differ": is_sharded,
        f"layout.tp {layout.tp} with several stages": layout.tp > 1,
        "optimizer.update stage with several stages, of which each adds to the gradient": updates_within,
        "optimizer.clip stage with several stages, which share a gradient": optimizer.clip == "stage",
        "schedule.device_budget, which swaps whole stages": schedule.device_budget is not None,
        "optimizer.wide_weights false with several stages, rounded by chance": not optimizer.wide_weights,
        "training.check_every with several stages": config.training.check_every is not None,
        "training.compile with several stages": config.training.compile,
    }


def freeze_problems(config: RunConfig) -> Problems:
    """Frozen layers, and adapters, which leave all else frozen."""
    number, family = config.training.freeze_layers, FAMILIES.get(config.family)
    name = "adapter.rank" if number is None else "training.freeze_layers"
    yield from adapter_problems(config)
    if number is None and config.adapter.rank is None:
        return
    if number is not None and number > config.model.num_layers:
        yield f"training.freeze_layers must be at most model.num_layers {config.model.num_layers}, found {number}"
    if config.model.tied and config.adapter.rank is None:
        yield "training.freeze_layers freezes the embedding, which with model.tied is the head's matrix; leave it out"
    if family is not None and family.splits_backward:
        yield f"{name} does not work with schedule.family {config.family}, which splits backwards; use breadth-first"
    others = {
        "schedule.device_budget": config.schedule.device_budget is not None,
        "schedule.balance": config.schedule.balance,
        "schedule.offload": config.schedule.offload,
    }
    for other, is_on in others.items():
        if is_on:
            yield f"{name} does not work with {other}; leave one of them out"


def adapter_problems(config: RunConfig) -> Problems:
    """Adapters that the model cannot have, in any layout."""
    own, model, number = config.adapter, config.model, config.training.freeze_layers
    if own.rank is None or model.family not in MODELS:
        return
    if not config.optimizer.wide_weights:
        yield (
            "optimizer.wide_weights false does not work with adapter.rank, whose weights are few; leave one of them out"
        )
    if own.rank > model.hidden_size:
        yield f"adapter.rank must be at most model.hidden_size {model.hidden_size}, found {own.rank}"
    if number == model.num_layers:
        yield f"training.freeze_layers {number} leaves no layer for adapter.rank; use fewer than model.num_layers"
    if own.targets is not None:
        given, known = own.targets, known_targets(MODELS[model.family])
        if twice := [one for one in dict.fromkeys(given) if given.count(one) > 1]:
            yield f"adapter.targets must name each matrix once, found {' '.join(twice)} twice"
        if wrong := [one for one in given if one not in known]:
            had = f"model.family {model.family} has ({' '.join(known)})"
            yield f"adapter.targets must be matrices that {had}, found {' '.join(wrong)}"
        if not given:
            yield "adapter.targets must name at least one matrix, found none; leave it out for q v"


def _size_problems(name: str, text: str | None) -> Problems:
    try:
        # An unset size has no problems.
        parse_bytes("1" if text is None else text)
    except ValueError as error:
        yield f"{name}: {error}"


def place_problems(config: RunConfig) -> Problems:
    """Copies of the model, and the order of pipeline ranks."""
    layout, order, pp = config.layout, config.layout.pipeline_order, config.layout.pp
    if layout.replicate is not None and layout.replicate > 0 and layout.dp % layout.replicate:
        yield f"layout.replicate must divide layout.dp, found {layout.replicate} and {layout.dp}"
    if order is not None and sorted(order) != list(range(pp)):
        found = " ".join(map(str, order))
        yield f"layout.pipeline_order must name each pipeline rank 0..{pp - 1} once, found {found}"


def file_problems(config: RunConfig) -> Problems:
    """Problems of a schedule file that show before it is compared with the schedule of the run."""
    file = config.schedule.file
    if file is None:
        return
    if config.layout.token_slices == "auto":
        yield "schedule.file has a number of token slices, and layout.token_slices auto chooses one; set it"
    try:
        given = read_schedule(file)
    except UserError as error:
        yield f"schedule.file: {error}"
        return
    if given.recipe:  # which is compared with these settings
        return
    for key in ("family", "group_size", "keep", "receive_buffers", "prefetch"):
        name = f"schedule.{key}"
        if value_of(config, name) != value_of(RunConfig(), name):
            yield f"{name} has no effect with {file}, which contains no recipe; leave it out"
    for kind, key in MOVED_BY.items():
        if getattr(config.schedule, key) and not any(row.is_kind(kind).any() for row in given.schedule.rows):
            yield f"schedule.{key} has no effect with {file}, which moves no activations in this way; leave it out"


def adapted_problems(config: RunConfig) -> Problems:
    """One sentence for each setting that does not work with ``model.adapted``."""
    layout, schedule, training, data = config.layout, config.schedule, config.training, config.data
    if config.model.adapted is None:
        return
    if config.model.file is None:
        yield "model.adapted is set by model.file; leave it out"
    family = FAMILIES.get(config.family)
    refused = {
        f"layout.tp {layout.tp}": layout.tp > 1,
        f"layout.cp {layout.cp}": layout.cp > 1,
        f"layout.token_slices {layout.token_slices}": layout.cuts_sequences,
        "layout.recompute selective": "selective" in (layout.recompute, *(layout.recompute_layers or ())),
        f"schedule.family {config.family}": family is not None and family.splits_backward,
        "schedule.balance": schedule.balance,
        "schedule.offload": schedule.offload,
        "schedule.device_budget": schedule.device_budget is not None,
        "schedule.file": schedule.file is not None,
        "training.compile": training.compile,
        f"training.freeze_layers {training.freeze_layers}": training.freeze_layers is not None,
        f"adapter.rank {config.adapter.rank}": config.adapter.rank is not None,
        "data.attention document": data.by_document,
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"{name} does not work with a model that classes of transformers compute (model.file); leave it out"
