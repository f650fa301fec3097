"""MoESys' case (arXiv 2205.10034): what experts cost beside dense models, and what is one message of many tensors."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pipeloom import load_run, predict_step
from pipeloom.cost.costs import Costs
from pipeloom.families import Choice
from pipeloom.passes import add_stage_swaps, add_updates
from pipeloom.passes.lower_sharding import ReduceGrad, Unshard
from pipeloom.predict.step import SimulatedStep
from pipeloom.recipe import Recipe, Residence, build, ring_recipe
from pipeloom.schedule import Kind
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.simulation import simulate
from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "moesys.md"
NAME = "moesys_steps"
BALANCE = "moesys_balance"
"""Trained, not predicted."""
MEASURED = {"validation_loss": "validation loss", "load": "load"}
FFN, EXPERTS = 14336, 8
SIZES: dict[str, Any] = {
    "family": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "vocab_size": 32000,
}
"""Mixtral 8x7B (arXiv 2401.04088, table 1), whose blocks the other models have in other numbers."""
MODELS: dict[str, dict[str, Any]] = {
    "8 experts, 2 of a token": {"ffn_size": FFN, "experts": EXPERTS},
    "dense, one block": {"ffn_size": FFN},
    "dense, as active": {"ffn_size": 2 * FFN},
    "dense, as all": {"ffn_size": EXPERTS * FFN},
}


def step_of(model: str) -> SimulatedStep:
    """A step on 64 H100: breadth-first, everything sharded and recomputed."""
    layout = {"pp": 4, "dp": 16, "loops": 8, "shard": "full", "recompute": "full"}
    return predict_step(
        load_run(
            model={**SIZES, **MODELS[model]},
            data={"seq_len": 4096},
            layout={**layout, "num_microbatches": 8, "microbatch_size": 2},
            schedule={"family": "breadth-first"},
            machine={"cluster": "dgx-h100"},
        )
    )


def num_tensors(model: str) -> int:
    """Parameters of a layer: four of attention, two norms, three of each block, and the router."""
    experts = MODELS[model].get("experts", 0)
    return 6 + (3 * experts + 1 if experts else 3)


def step_rows() -> list[Row]:
    """A row for each model."""
    found: list[Row] = []
    for model in MODELS:
        step = step_of(model)
        shape, memory = step.run.shape, step.prediction.memory
        layers = shape.layers / step.run.num_stages
        gathers = sum(row.is_kind(Kind.UNSHARD).sum() for row in step.schedule.rows)
        found.append(
            {
                "model": model,
                "parameters_b": f"{shape.parameters / 1e9:.1f}",
                "active_b": f"{shape.active_parameters / 1e9:.1f}",
                "step_ms": f"{step.prediction.step_time_s * 1e3:.0f}",
                "state_gb": f"{(memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes) / 1e9:.1f}",
                "exposed_ms": f"{_exposed_s(step) * 1e3:.0f}",
                "tensors_of_a_stage": f"{num_tensors(model) * layers:.0f}",
                "gathers_of_a_stage": f"{gathers / step.run.num_stages:g}",
            }
        )
    return found


def ring_rows() -> list[Row]:
    """Tokens of a model in 8 stages, of which 2 fit the device: a row for each load, beside computing a stage."""
    stages, tokens = 8, 16
    start = Choice(family="forward-only", pp=1, loops=stages, num_microbatches=1)
    ring = build(ring_recipe(Recipe(start=start, residence=Residence(2, is_bytes=False)), stages, tokens))
    loads = ring.facts.row.is_kind(Kind.SWAP_IN).sum() / tokens
    found: list[Row] = []
    for load in (0.5, 0.9, 1.0, 1.5):
        period = simulate(ring, Costs(move=Amounts(weights=load))).end_s / tokens
        found.append(
            {
                "load": f"{load:g}",
                "loads": f"{loads:g}",
                "period": f"{period:.2f}",
                "of_larger": f"{period / max(stages, loads * load):.3f}",
                "of_sum": f"{period / (stages + loads * load):.2f}",
            }
        )
    return found


def prefetch_rows() -> list[Row]:
    """A step of 8 stages on each data rank, with gathers and swaps of experts that take a share of a forward's visit.

    The rank has room for two gathered stages and for the experts of two, or of three.
    """
    stages, visit = 8, 8
    start = Choice(family="breadth-first", pp=1, loops=stages, num_microbatches=visit)
    found: list[Row] = []
    for load in (0.25, 0.5, 1.0, 2.0):
        move = Amounts(weights=load * visit / 4, gradient=load * visit / 4, state=load * visit / 2)
        costs = Costs(unshard_s=load * visit, reduce_s=load * visit, move=move)
        row: Row = {"load": f"{load:g}"}
        for name, prefetch, room in (("on demand", 0, 2), ("room 2", 1, 2), ("room 3", 1, 3)):
            recipe = Recipe(start=start, unshard=Unshard(2, prefetch), reduce_grad=ReduceGrad(None))
            plain = add_updates(build(recipe), "in the next step")
            trace = simulate(add_stage_swaps(plain, room, ahead=prefetch), costs)
            compute = sorted(trace.compute(), key=lambda span: span.start_s)
            busy = sum(span.end_s - span.start_s for span in compute)
            row[name] = f"{compute[-1].end_s - compute[0].start_s - busy:g}"
        found.append(row)
    return found


def _exposed_s(step: SimulatedStep) -> float:
    exposed = (account.pipeline.exposed_data_parallel_s + account.data_parallel_s for account in step.accounts)
    return sum(exposed) / len(step.accounts)


def blocks(rows: Sequence[Row], balances: Sequence[Row]) -> dict[str, str]:
    """The tables of the page: predicted steps, a ring, and trained runs (``benchmarks/expert_balance.py``)."""
    names = (
        "parameters_b",
        "active_b",
        "step_ms",
        "state_gb",
        "exposed_ms",
        "tensors_of_a_stage",
        "gathers_of_a_stage",
    )
    head = ("model", "parameters, B", "of a token, B", "step, ms", "state, GB", "exposed, ms", "tensors", "gathers")
    steps = table(head, [[row["model"], *(row[name] for name in names)] for row in rows])
    lines = [
        [f"`{one}`", *(_of_seeds([row[key] for row in balances if row["balance"] == one]) for key in MEASURED)]
        for one in dict.fromkeys(row["balance"] for row in balances)
    ]
    ring = table(
        ("load / compute of a stage", "loads", "period", "/ larger of both", "/ both after each other"),
        [list(row.values()) for row in ring_rows()],
    )
    prefetch = table(
        ("gather, load / forward visit", "on demand, room for 2", "prefetched, room for 2", "prefetched, room for 3"),
        [list(row.values()) for row in prefetch_rows()],
    )
    balance = table(("balance", *MEASURED.values()), lines)
    return {"steps": steps, "balance": balance, "ring": ring, "prefetch": prefetch}


def _of_seeds(values: Sequence[str]) -> str:
    numbers = sorted(map(float, values))
    return f"{fmean(numbers):.3f} ({numbers[0]:.3f} to {numbers[-1]:.3f})"
