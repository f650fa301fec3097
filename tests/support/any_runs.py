"""Run files drawn at random over every knob of their schedule."""

import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

from pipeloom.config import (
    AdapterConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
    find_problems,
)
from pipeloom.families import FAMILIES
from pipeloom.workload.layout import Layout

LAYERS = 6
TRAINED = [name for name, one in FAMILIES.items() if one.has_backward]
DATA = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=257))
"""What resolving a run takes of its data."""
COUNT = 200


@cache
def runs():
    """Runs without problems, the same for every test, each fourth one on GPUs; a schedule may still be refused."""
    draw, of_layers, of_windows, found = random.Random(0), random.Random(0), random.Random(0), []
    while len(found) < COUNT:
        config = with_sharding(draw, any_run(draw))
        if len(found) % 4 == 3:
            machine, device = MachineConfig(cluster="dgx-a100"), "cuda"
            config = replace(config, machine=machine, training=replace(config.training, device=device))
        if config.layout.pp > 1 and len(found) % 5 == 2:
            config = replace(config, layout=replace(config.layout, boundary="int8"))
        if not find_problems(config, trains=False):
            found.append(with_windows(of_windows, with_layers(of_layers, config)))
    return found


@cache
def frozen_runs(count):
    """Runs with frozen layers, without the settings that these exclude."""
    draw, found = random.Random(1), []
    still = {"balance": False, "offload": False, "activation_budget": None, "device_budget": None}
    while len(found) < count:
        config = with_layers(draw, with_sharding(draw, any_run(draw)))
        config = replace(
            config,
            model=replace(config.model, tied=False),
            schedule=replace(config.schedule, **still),
            training=replace(config.training, freeze_layers=draw.randint(0, LAYERS)),
        )
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def adapted_runs(count):
    """The same with low-rank adapters."""
    draw, found = random.Random(2), []
    still = {"balance": False, "offload": False, "activation_budget": None, "device_budget": None}
    while len(found) < count:
        config = with_windows(draw, with_layers(draw, with_sharding(draw, any_run(draw))))
        gate = () if config.model.family == "gpt2" else ("gate",)
        targets = draw.sample(("q", "k", "v", "o", *gate, "up", "down"), draw.choice((1, 2, 3, 6)))
        config = replace(
            config,
            model=replace(config.model, tied=draw.random() < 0.3),
            schedule=replace(config.schedule, **still),
            adapter=AdapterConfig(rank=draw.choice((1, 3)), targets=tuple(targets), alpha=0.1, init="random"),
            training=replace(config.training, freeze_layers=draw.choice((None, None, 0, 2, LAYERS - 1))),
        )
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def context_runs(count):
    """Runs whose sequences several ranks share, without the settings that these exclude."""
    draw, found = random.Random(3), []
    still = {"balance": False, "offload": False, "activation_budget": None, "device_budget": None}
    while len(found) < count:
        config = with_layers(draw, any_run(draw))
        layout = replace(config.layout, cp=draw.choice((2, 2, 4)), token_slices=None)
        shard = draw.choice(("none", "optimizer", "gradients", "full"))
        layout = replace(layout, shard=shard, replicate=layout.dp if shard != "none" and draw.random() < 0.3 else None)
        config = with_sharding(draw, replace(config, layout=layout, schedule=replace(config.schedule, **still)))
        config = with_windows(draw, config)
        if layout.num_ranks <= 8 and not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def expert_runs(count):
    """Runs with experts in some layers or in all."""
    draw, found = random.Random(4), []
    while len(found) < count:
        config = with_windows(draw, with_layers(draw, with_sharding(draw, any_run(draw))))
        if config.model.family == "gpt2":
            continue
        experts = draw.choice((2, 3, 4))
        model = replace(
            config.model,
            experts=experts,
            experts_per_token=draw.randint(1, max(1, experts - 1)),
            expert_every=draw.choice((None, 2, 3)),
            expert_ffn=draw.choice((None, 10)),
            shared_experts=draw.choice((None, 1, 2)),
            balance=draw.choice(("batch", "microbatch", "none", "bias")),
        )
        if model.balance in ("batch", "microbatch"):
            model = replace(model, balance_weight=draw.choice((0.1, 1.0)))
        if model.balance == "batch":
            config = replace(config, schedule=replace(config.schedule, family=draw.choice(("breadth-first", "gpipe"))))
        # Budgets were drawn for layers that keep less; in bfloat16 rounding chooses other experts.
        still = {"balance": False, "offload": False, "activation_budget": None, "device_budget": None}
        schedule, training = replace(config.schedule, **still), replace(config.training, dtype="float32")
        config = replace(config, model=model, schedule=schedule, training=training)
        capacity = (None, None, 0.5, 1.0, 1.3)[len(found) % 5]
        limited = replace(config, model=replace(model, expert_capacity=capacity))
        config = config if find_problems(limited, trains=False) else limited
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def sharing_runs(count):
    """Runs whose layers share their weights, in one stage and in several."""
    draw, found = random.Random(5), []
    while len(found) < count:
        config = with_windows(draw, with_layers(draw, with_sharding(draw, any_run(draw))))
        layout, still = config.layout, {"balance": False, "offload": False, "activation_budget": None}
        config = replace(config, schedule=replace(config.schedule, device_budget=None, **still))
        if layout.num_stages > 1:  # where sharding is refused
            layout = replace(layout, shard="none", replicate=None)
            changes = {"residency": None, "prefetch": None, "gradient_buffers": None}
            config = replace(config, layout=layout, schedule=replace(config.schedule, **changes))
        model = replace(config.model, share_layers=draw.choice(("all", 2, 3)))
        config = replace(config, model=model)
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def density_runs(count):
    """Runs whose matrices consist of blocks."""
    draw, found = random.Random(5), []
    still = {"balance": False, "offload": False, "activation_budget": None, "device_budget": None}
    while len(found) < count:
        config = with_windows(draw, with_layers(draw, with_sharding(draw, any_run(draw))))
        model = replace(config.model, density=draw.choice((0.25, 0.5)), density_block=draw.choice((2, 4)))
        config = replace(config, model=model, schedule=replace(config.schedule, **still))
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def shared_expert_runs(count):
    """Such runs whose replicas share the experts."""
    draw, found = random.Random(5), []
    for config in expert_runs(400):
        layout = config.layout
        if layout.dp == 1 or len(found) == count:
            continue
        dp = draw.choice((2, 4)) if layout.pp * layout.tp == 1 else 2
        layout = replace(layout, dp=dp, ep=draw.choice([one for one in (2, 4) if dp % one == 0]), replicate=None)
        config = replace(config, layout=layout, model=replace(config.model, experts=4))
        in_turns = replace(config, layout=replace(layout, ep_overlap=True))
        config = in_turns if len(found) % 3 == 0 and not find_problems(in_turns, trains=False) else config
        if not find_problems(config, trains=False):
            found.append(config)
    return found


@cache
def adapted_expert_runs(count):
    """Runs with experts, shared or not, whose attention has adapters."""
    draw, found = random.Random(6), []
    for config in [one for both in zip(expert_runs(120), shared_expert_runs(48), strict=False) for one in both]:
        targets = tuple(draw.sample(("q", "k", "v", "o"), draw.choice((1, 2, 4))))
        balance = (
            draw.choice(("batch", "microbatch", "none")) if config.model.balance == "bias" else config.model.balance
        )
        model = replace(config.model, tied=draw.random() < 0.3, balance=balance)
        config = replace(
            config,
            model=model,
            adapter=AdapterConfig(rank=draw.choice((1, 3)), targets=targets, alpha=0.1, init="random"),
            training=replace(config.training, freeze_layers=draw.choice((None, None, 2))),
        )
        if len(found) < count and not find_problems(config, trains=False):
            found.append(config)
    return found


def with_layers(draw, config):
    """The run with other layers, which change no other draw and no schedule."""
    model, moves = config.model, config.schedule.balance or config.schedule.offload
    # Budgets of moved activations were drawn for layers that keep less than those of olmo2.
    families = ("llama" if moves else "olmo2", "qwen2", "qwen3")
    family = draw.choice(families) if model.family == "llama" else model.family
    return replace(config, model=replace(model, family=family, head_size=draw.choice((None, None, 6))))


def with_windows(draw, config):
    """The run with windows, soft caps and Gemma's layers, which keep more: not where activations move in a budget."""
    if config.schedule.balance or config.schedule.offload:
        return config
    model = config.model
    # Norms of heads of 4 elements have gradients of large differences, and embeddings are scaled by the root of the
    # width: bfloat16 differs by up to 0.16 where float64 differs by 2e-15.
    is_narrow = config.training.dtype == "bfloat16"
    family = draw.choice((model.family, "gemma2") if is_narrow else (model.family, "gemma2", "gemma3"))
    family = model.family if is_narrow else family
    full = draw.choice((None, None, (), (0, 3)))
    return replace(
        config,
        model=replace(
            model,
            family=family,
            window=(window := draw.choice((None, 3, 9, 20))),
            full_attention_layers=None if window is None else full,
            attn_softcap=draw.choice((None, None, 5.0)),
        ),
    )


def on_cpus(config):
    """The run on this machine's processors, if it is on GPUs."""
    return replace(config, training=replace(config.training, device="cpu"))


def exact(config):
    """The run with messages as they are, whose gradients are those of a single process."""
    return replace(config, layout=replace(config.layout, boundary=None))


def any_run(draw):
    """A small run; some have problems, such as a budget that cannot be kept."""
    config = _any_run(draw)
    if config.layout.pp > 1:
        return config
    # One pipeline rank has no messages, and all placements are one.
    default = ScheduleConfig()
    own = replace(config.schedule, receive_buffers=default.receive_buffers, placement=default.placement)
    return replace(config, schedule=own)


def _any_run(draw):
    family = draw.choice(TRAINED)
    rule, pp, tp = FAMILIES[family], draw.choice((1, 2, 4)), draw.choice((1, 1, 2))
    loops = rule.loops or (draw.choice((1, 2, 2, 3)) if rule.is_looped else 1)
    dp = draw.choice((1, 2)) if pp * tp < 8 else 1
    swaps = pp * tp * dp == 1 and loops > 1
    balance, offload = pp > 1 and draw.random() < 0.3, not swaps and draw.random() < 0.4
    return RunConfig(
        model=_model(draw, tp),
        data=DataConfig(seq_len=draw.choice((16, 32))),
        layout=_layout(draw, pp, loops, tp, dp, cuts=not swaps),
        schedule=ScheduleConfig(
            family=family,
            group_size=draw.choice((None, None, 4)) if rule.is_grouped else None,
            receive_buffers=draw.choice((1, 2, 3)),
            placement=draw.choice((None, None, "looped", "v")) if rule.placement is None else None,
            keep=(draw.choice((1, 2, 5)),) * pp if draw.random() < 0.15 else None,
            balance=balance,
            offload=offload,
            activation_budget=f"{draw.choice((50, 100, 200, 500, 2000))}KB" if offload else None,
            device_budget=f"{draw.choice((200, 500, 1000, 4000))}KB" if swaps else None,
        ),
        optimizer=OptimizerConfig(name=draw.choice(("adamw", "adamw", "sgd"))),
        training=TrainingConfig(dtype=draw.choice(("float32", "bfloat16"))),
        machine=MachineConfig(cluster="laptop"),
    )


def _model(draw, tp):
    return ModelConfig(
        family=draw.choice(("llama", "gpt2")),
        num_layers=LAYERS,
        hidden_size=draw.choice((16, 32)),
        num_heads=4,
        num_kv_heads=draw.choice((None, tp)),
        tied=draw.random() < 0.4,
    )


def _layout(draw, pp, loops, tp, dp, *, cuts):
    recompute = draw.choice(("none", "none", "selective", "full"))
    shard = draw.choice(("none", "optimizer", "gradients", "full")) if dp > 1 else "none"
    by_layer = tuple(draw.choice(("none", "selective", "full")) for _ in range(LAYERS))
    is_by_layer = recompute == "none" and draw.random() < 0.3
    return Layout(
        pp=pp,
        loops=loops,
        num_microbatches=draw.choice((2, 4, 5)),
        microbatch_size=draw.choice((1, 2)),
        tp=tp,
        dp=dp,
        replicate=draw.choice((None, None, dp)) if shard != "none" else None,
        pipeline_order=tuple(draw.sample(range(pp), pp)) if pp > 1 and draw.random() < 0.2 else None,
        shard=shard,
        sequence_parallel=tp > 1 and draw.random() < 0.5,
        recompute=recompute,
        recompute_layers=by_layer if is_by_layer else None,
        token_slices=draw.choice((None, None, 2, 4)) if cuts else None,
    )


def with_sharding(draw, config):
    """The run with knobs of its gathers and reductions."""
    shard = config.layout.shard
    knobs = {
        "residency": draw.choice((None, 1, 2)) if shard == "full" else None,
        "prefetch": draw.choice((None, 0, 1)) if shard != "none" else None,
        "gradient_buffers": draw.choice((None, 1, 2)) if shard in ("gradients", "full") else None,
    }
    return replace(config, schedule=replace(config.schedule, **knobs))
