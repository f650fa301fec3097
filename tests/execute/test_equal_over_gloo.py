"""One step of runs of every kind over processes: loss and gradients are those of the single process.

Each family, and each way to share a model among ranks, meets gloo here. All of them together, with each recomputation:
``tests/conformance/test_every_byte.py``, over the transport of tests, which passes the same conformance suite.
"""

from dataclasses import replace
from itertools import cycle, islice, product

import pytest
from families import SOME, TRAINING, fitting
from gloo import differences_over_gloo
from small_run import small_run
from thinned import thinned

from pipeloom.config import ModelConfig, ScheduleConfig, TrainingConfig
from pipeloom.families import FAMILIES
from pipeloom.schedule import PLACEMENTS
from pipeloom.workload.layout import Layout

LLAMA = ModelConfig(num_layers=6, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=20)
GPT2 = replace(LLAMA, family="gpt2", num_kv_heads=4, ffn_size=21)
MIXED = ("none", "full", "selective", "none", "full", "full")
CHOICES = [{"recompute": "selective"}, {"recompute": "full"}, {"recompute_layers": MIXED}]
LEVELS = ("none", "optimizer", "gradients", "full")


def placed(names, placements):
    """Loops and placements that the families take, each combination once."""
    return dict.fromkeys((name, *fitting(name, 2, one).values()) for name, one in product(names, placements))


def of_families(pp, families):
    """Families with their loops and placements; layers in even and in uneven stages."""
    for (family, loops, placement), model in zip(families, cycle((LLAMA, GPT2))):
        stages, num_layers = pp * loops, 8
        uneven = (*[1] * (stages - 1), num_layers + 2 - stages + 1) if model is LLAMA else None
        layout = Layout(pp=pp, loops=loops, num_microbatches=5, microbatch_size=2, partition=uneven)
        order = ScheduleConfig(family=family, placement=placement, receive_buffers=1 if model is GPT2 else 2)
        yield replace(model, num_layers=num_layers), layout, order


def tied_of_families(pp, placements):
    for family, loops, placement in placed(SOME, placements):
        model = GPT2 if placement == "v" else LLAMA
        layout = Layout(pp=pp, loops=loops, num_microbatches=4, microbatch_size=2)
        yield replace(model, tied=True), layout, ScheduleConfig(family=family, placement=placement)


def sharded():
    few = {"gradient_buffers": 1}
    cases = [(2, 2, 2, family, shard, None) for family in ("breadth-first", "depth-first") for shard in LEVELS]
    cases += [(2, 2, 1, "1f1b", "gradients", None), (1, 4, 3, "hybrid", "full", 2), (1, 4, 3, "gpipe", "gradients", 2)]
    for pp, dp, loops, family, shard, replicate in cases:
        loops = loops if FAMILIES[family].is_looped else 1
        sizes = {"pp": pp, "dp": dp, "loops": loops, "num_microbatches": 3, "microbatch_size": 2}
        layout = Layout(shard=shard, replicate=replicate, **sizes)
        own = few if family == "depth-first" and shard in ("gradients", "full") else {}
        order = ScheduleConfig(family=family, residency=1 if own and shard == "full" else None, **own)
        yield LLAMA, layout, order


def with_experts():
    model = replace(LLAMA, experts=4, expert_every=2, expert_ffn=10, shared_experts=1, balance_weight=1.0)
    sizes = {"num_microbatches": 3, "microbatch_size": 2}
    for shard, recompute in (("full", "none"), ("gradients", "full"), ("none", "selective")):
        yield model, Layout(pp=2, dp=2, loops=2, shard=shard, recompute=recompute, **sizes), ScheduleConfig()
    tensor = Layout(pp=1, tp=2, dp=2, loops=2, sequence_parallel=True, shard="full", **sizes)
    yield model, tensor, ScheduleConfig(residency=1)
    yield model, Layout(pp=1, cp=2, dp=2, loops=2, **sizes), ScheduleConfig()
    yield replace(model, balance="microbatch"), Layout(pp=4, loops=1, **sizes), ScheduleConfig(family="zb-h1")


def with_density():
    model = replace(LLAMA, ffn_size=24, density=0.5, density_block=4)
    sizes = {"num_microbatches": 3, "microbatch_size": 2}
    for shard, recompute in zip(LEVELS, ("none", "selective", "full", "none"), strict=True):
        yield model, Layout(pp=2, dp=2, loops=2, shard=shard, recompute=recompute, **sizes), ScheduleConfig()
    yield model, Layout(pp=1, cp=2, dp=2, loops=2, **sizes), ScheduleConfig()
    yield replace(model, family="gpt2", num_kv_heads=4), Layout(pp=4, loops=1, **sizes), ScheduleConfig(family="zb-h1")


def with_shared_experts():
    """Experts over ranks: tokens travel to theirs and back."""
    model = replace(LLAMA, experts=4, expert_every=2, expert_ffn=10, shared_experts=1, balance_weight=1.0)
    sizes = {"num_microbatches": 3, "microbatch_size": 2}
    yield model, Layout(pp=2, dp=2, ep=2, loops=2, shard="full", recompute="full", **sizes), ScheduleConfig()
    yield model, Layout(pp=1, dp=4, ep=2, loops=2, shard="full", **sizes), ScheduleConfig(residency=1)
    few = ScheduleConfig(gradient_buffers=1)
    yield model, Layout(pp=1, dp=4, ep=4, loops=2, shard="gradients", recompute="selective", **sizes), few
    yield model, Layout(pp=1, dp=4, ep=2, loops=2, shard="optimizer", **sizes), ScheduleConfig()
    tensor = Layout(pp=1, tp=2, dp=2, ep=2, loops=2, sequence_parallel=True, shard="full", **sizes)
    yield model, tensor, ScheduleConfig()
    yield model, Layout(pp=1, cp=2, dp=2, ep=4, loops=2, **sizes), ScheduleConfig()
    few = replace(model, expert_capacity=0.75)
    for ep in (1, 2):
        yield few, Layout(pp=1, dp=2, tp=2, ep=ep, loops=2, shard="full", recompute="full", **sizes), ScheduleConfig()
    own = ScheduleConfig(family="zb-h1")
    yield replace(model, balance="microbatch"), Layout(pp=2, dp=2, ep=2, loops=1, **sizes), own


def with_overlapping_halves():
    """Tokens of one half of a micro-batch travel while the other is computed."""
    model = replace(LLAMA, experts=4, expert_every=2, expert_ffn=10, shared_experts=1, balance_weight=1.0)
    sizes = {"ep_overlap": True, "num_microbatches": 3, "microbatch_size": 3}
    for recompute in ("none", "full", "selective"):
        yield model, Layout(pp=1, dp=4, ep=4, loops=2, shard="full", recompute=recompute, **sizes), ScheduleConfig()
    plain = replace(model, shared_experts=None, expert_every=None, balance="bias")
    yield plain, Layout(pp=2, dp=2, ep=2, loops=1, **sizes), ScheduleConfig(family="zb-h1")
    tensor = Layout(pp=1, tp=2, dp=2, ep=2, loops=2, sequence_parallel=True, recompute_layers=MIXED, **sizes)
    yield replace(model, family="gemma2", num_kv_heads=4, window=4), tensor, ScheduleConfig()
    yield replace(model, family="olmo2"), Layout(pp=1, cp=2, dp=2, ep=4, loops=2, **sizes), ScheduleConfig()


def of_families_with_shared_experts():
    """Every family that trains, with the levels of sharding in turn."""
    model = replace(LLAMA, experts=4, expert_every=2, expert_ffn=10, balance="none")
    for (family, loops, placement), shard in zip(placed(TRAINING, ["looped"]), cycle(LEVELS)):
        layout = Layout(pp=2, dp=2, ep=2, loops=loops, shard=shard, num_microbatches=4, microbatch_size=1)
        yield model, layout, ScheduleConfig(family=family, placement=placement)


def tied_and_sharded():
    model, few = replace(LLAMA, tied=True), ScheduleConfig(family="depth-first", gradient_buffers=1)
    for shard, order in [*((shard, ScheduleConfig()) for shard in LEVELS), ("full", few)]:
        yield model, Layout(pp=2, dp=2, loops=2, shard=shard, num_microbatches=3, microbatch_size=2), order
    hybrid = Layout(pp=1, dp=4, loops=3, replicate=2, shard="full", num_microbatches=3, microbatch_size=2)
    yield model, hybrid, ScheduleConfig()


def recomputed_and_sharded():
    cases = [(2, 2, 2, shard, None) for shard in LEVELS] + [(1, 4, 3, "full", 2)]
    for (pp, dp, loops, shard, copies), choice in zip(cases, cycle(CHOICES)):
        layout = Layout(pp=pp, dp=dp, loops=loops, shard=shard, replicate=copies, num_microbatches=3, **choice)
        yield LLAMA, layout, ScheduleConfig(residency=1 if shard == "full" else None)


AXES = [
    {"pp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 1, "tp": 4},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "none", "sequence_parallel": True},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "optimizer"},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "gradients", "sequence_parallel": True},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "full", "sequence_parallel": True},
]


def tensor_parallel():
    """Families and models take turns. Llama's two key and value heads are not for four ranks."""
    for number, (family, axes) in enumerate(zip(cycle(SOME), AXES)):
        model = GPT2 if axes["tp"] == 4 or number % 2 else LLAMA
        recompute = ("none", "selective", "full")[number // 2 % 3]
        layout = Layout(loops=fitting(family, 2)["loops"], num_microbatches=3, recompute=recompute, **axes)
        yield replace(model, num_layers=4), layout, ScheduleConfig(family=family)


def tied_tensor_parallel():
    cases = [AXES[0], AXES[1], AXES[6], {**AXES[4], "shard": "none"}]
    for number, (axes, model) in enumerate(zip(cases, cycle((LLAMA, GPT2)))):
        recompute = "full" if number % 2 else "none"
        layout = Layout(loops=2, num_microbatches=3, microbatch_size=2, recompute=recompute, **axes)
        yield replace(model, tied=True), layout, ScheduleConfig()


COMPILED = TrainingConfig(dtype="float64", compile=True, compile_backend="aot_eager")


def compiled():
    few = replace(LLAMA, num_layers=3)
    loops = Layout(pp=2, loops=2, num_microbatches=4, recompute_layers=MIXED[:3])
    yield few, loops, ScheduleConfig(family="depth-first"), COMPILED
    full = Layout(pp=1, dp=2, loops=2, shard="full", num_microbatches=3)
    yield few, full, ScheduleConfig(residency=1), COMPILED
    sequence = Layout(pp=1, tp=2, loops=2, num_microbatches=2, sequence_parallel=True, recompute="full")
    yield few, sequence, ScheduleConfig(), COMPILED


RUNS = {
    "families in other placements": (2, list(of_families(2, placed(SOME, PLACEMENTS)))),
    "families on four ranks": (4, list(of_families(4, placed(TRAINING, ["looped"])))),
    "families, tied, on two ranks": (2, list(tied_of_families(2, ("v",)))),
    "families, tied, on three ranks": (3, list(tied_of_families(3, ("looped",)))),
    "sharded": (4, [*sharded(), next(with_experts()), *list(with_density())[3::2], *islice(with_shared_experts(), 2)]),
    "experts": (4, list(with_experts())),
    "kept blocks": (4, list(with_density())),
    "sharded, tied": (4, list(tied_and_sharded())),
    "recomputed, sharded": (4, list(recomputed_and_sharded())),
    "tensor-parallel": (4, list(tensor_parallel())),
    "tensor-parallel, tied": (4, list(tied_tensor_parallel())),
    "compiled": (2, list(compiled())),
    "experts, halves in turns": (4, list(with_overlapping_halves())),
    "shared experts": (4, [*with_shared_experts(), *of_families_with_shared_experts()]),
}
"""For each kind of runs the processes that it takes and its runs, all in the same processes."""


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # tracing reads it, and continues
@pytest.mark.parametrize("kind", thinned(RUNS, 4))
def test_a_step_equals_the_single_process(tmp_path, kind):
    num_ranks, runs = RUNS[kind]
    names = ("model", "layout", "schedule", "training")
    configs = [small_run(tmp_path, **dict(zip(names, run, strict=False))) for run in runs]
    found = differences_over_gloo(configs, num_ranks)
    assert len(found) == len(configs) > 2
    assert max(max(one.values()) for one in found) < 1e-9
    for config, one in zip(configs, found, strict=True):
        assert "embedding.tokens.weight" in one
        assert ("head.output.weight" in one) != config.model.tied
