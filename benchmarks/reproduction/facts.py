"""Closed forms of the paper and of its terms, each with the value of a real schedule, counted or simulated.

Times are in units of one layer's forward or a part of it, so that all sums are exact. P ranks, V loops, M
micro-batches.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

from pipeloom.analysis.summary import summarize
from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import Kind, Schedule
from pipeloom.simulation import simulate
from reproduction.machine import Row

TITLES = {
    "gathers": "Gathers of sharded weights in a step on rank 0, one stage resident",
    "traffic": "Data-parallel bytes for each parameter of a rank, sent and received, and FLOP for each byte",
    "inputs": "Stored stage inputs, rank 0 and last",
    "bubble": "Bubble overhead, idle / ideal",
    "latency": "Idle time that a transfer time l adds to a step, asynchronous, in l",
    "blocking": "Bubble overhead where ranks wait for every transfer, l = 3/4 of a layer's forward",
    "step": "Makespan of 16 layers, P = 4, M = 8, a layer's forward 1, backward 2",
}


def facts() -> list[Row]:
    """Every fact, in the order of ``TITLES``."""
    groups = {
        "gathers": _gathers(),
        "traffic": _traffic(),
        "inputs": _inputs(),
        "bubble": _bubbles(),
        "latency": _latencies(),
        "blocking": _blocking(),
        "step": _steps(),
    }
    return [
        {
            "group": group,
            "what": what,
            "formula": formula,
            "expected": _text(expected),
            "simulated": _text(found),
            "agrees": "yes" if expected == found else "no",
        }
        for group in TITLES
        for what, formula, expected, found in groups[group]
    ]


Number = Fraction | float
Fact = tuple[str, str, Number, Number]


def _text(value: Number) -> str:
    return f"{float(value):.6g}"


def _kinds(schedule: Schedule, *kinds: Kind) -> int:
    """Actions of some kinds on rank 0."""
    return int(schedule.rows[0].is_kind(*kinds).sum())


def _made(family: str, pp: int, loops: int, count: int) -> Schedule:
    return lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=count))


def _gathers() -> Iterator[Fact]:
    for loops, count in product((2, 4, 8), (4, 8, 32)):
        found = _kinds(add_unshard(_made("breadth-first", 4, loops, count), 1, 1), Kind.UNSHARD)
        yield f"breadth-first, P 4, V {loops}, M {count}", "2 V - 1", 2 * loops - 1, found
    for loops, count in ((4, 8), (4, 32), (8, 32)):
        found = _kinds(add_unshard(_made("depth-first", 4, loops, count), 1, 1), Kind.UNSHARD)
        expected = _interleaved_visits(4, loops, count)
        yield f"depth-first, P 4, V {loops}, M {count}", "runs of Megatron-LM's order", expected, found


def _interleaved_visits(pp: int, loops: int, count: int) -> int:
    """How often rank 0 changes its stage: Megatron-LM's rule of 2022 (``schedules.py``), written down once more."""
    total = count * loops
    chunks = [k % (pp * loops) // pp for k in range(total)]
    warmup = total if count == pp else min(2 * (pp - 1) + (loops - 1) * pp, total)
    order = chunks[:warmup]
    for k in range(total - warmup):
        order += [chunks[warmup + k], loops - 1 - chunks[k]]
    order += [loops - 1 - chunk for chunk in chunks[total - warmup :]]
    return 1 + sum(one != other for one, other in pairwise(order))


def _traffic() -> Iterator[Fact]:
    """A gather or a reduce-scatter of fp16 sends and receives 2 bytes of each parameter of a stage, an all-reduce 4."""
    loops, count = 4, 32
    whole = add_reduce_grad(_made("breadth-first", 4, loops, count))
    yield from _bytes_and_intensity("replicated (DP_0)", "8", Fraction(8), whole, 8)
    kept = add_reduce_grad(add_unshard(_made("breadth-first", 4, loops, count), None, 1))
    yield from _bytes_and_intensity("optimizer sharded (DP_PS)", "8", Fraction(8), kept, 4)
    sharded = _sharded("breadth-first", 4, loops, count, 1)
    expected = 12 - Fraction(4, loops)
    yield from _bytes_and_intensity("all sharded, breadth-first", "12 - 4 / V", expected, sharded, 4)
    for loops in (4, 64):
        alone = _sharded("depth-first", 1, loops, count, 1)
        expected = 12 * count - Fraction(8 * count - 4, loops)
        formula = "12 M - (8 M - 4) / V"
        yield from _bytes_and_intensity(
            f"all sharded, depth-first accumulation of {loops} stages", formula, expected, alone, 4
        )


def _sharded(family: str, pp: int, loops: int, count: int, residency: int) -> Schedule:
    return add_reduce_grad(add_unshard(_made(family, pp, loops, count), residency, 1), 1)


def _bytes_and_intensity(
    name: str, formula: str, expected: Fraction, schedule: Schedule, reduction_bytes: int
) -> Iterator[Fact]:
    """A token needs 8 FLOP for each parameter of a layer, recomputation counted; M sequences of 1,024 tokens."""
    loops, count = schedule.num_stages // schedule.num_ranks, schedule.num_microbatches
    what = f"{name}, V {loops}, M {count}"
    moved = 4 * _kinds(schedule, Kind.UNSHARD) + reduction_bytes * _kinds(schedule, Kind.REDUCE_GRAD)
    found = Fraction(moved, loops)
    yield f"{what}: bytes", formula, expected, found
    yield f"{what}: FLOP/byte", f"8 M s / ({formula})", 8 * count * 1024 / expected, 8 * count * 1024 / found


def group_traffic() -> list[Row]:
    """The traffic of depth-first with a pipeline, compared with the 12 bytes for each group of P micro-batches."""
    rows: list[Row] = []
    for residency, loops, count in product((1, 2, 3), (4, 8), (8, 32)):
        schedule = _sharded("depth-first", 4, loops, count, residency)
        moved = Fraction(4 * _kinds(schedule, Kind.UNSHARD, Kind.REDUCE_GRAD), loops)
        sizes = {"resident": residency, "loops": loops, "num_microbatches": count, "twelve_per_group": 12 * count // 4}
        rows.append({key: str(value) for key, value in sizes.items()} | {"counted": _text(moved)})
    return rows


def _inputs() -> Iterator[Fact]:
    for pp, loops, count in ((4, 4, 8), (4, 4, 32), (8, 8, 8), (8, 8, 64)):
        for rank in (0, pp - 1):
            place = f"rank {rank}, P {pp}, M {count}"
            for family in ("gpipe", "1f1b"):
                expected = count if family == "gpipe" else min(count, pp - rank)
                formula = "M" if family == "gpipe" else "min(M, P - r)"
                yield f"{family}, {place}", formula, expected, _held(family, pp, 1, count, rank)
            looped = f"{place}, V {loops}"
            found = _held("breadth-first", pp, loops, count, rank)
            yield f"breadth-first, {looped}", "M V", count * loops, found
            expected = count * loops if count == pp else 2 * (pp - rank - 1) + (loops - 1) * pp + 1
            formula = "M V" if count == pp else "2 (P - r - 1) + (V - 1) P + 1"
            # Where M = P, Megatron-LM puts all forwards first; here depth-first keeps alternating and holds less.
            if count > pp:
                yield f"depth-first, {looped}", formula, expected, _held("depth-first", pp, loops, count, rank)


def _held(family: str, pp: int, loops: int, count: int, rank: int) -> int:
    return make_schedule(family, pp=pp, loops=loops, num_microbatches=count).peak_stage_inputs[rank]


LOOPED = ("depth-first", "breadth-first")


def _bubbles() -> Iterator[Fact]:
    for pp, count in ((4, 8), (8, 16), (8, 64)):
        for family in ("gpipe", "1f1b"):
            yield _bubble(family, pp, 1, count)
        for loops, family in product((2, 4, 8), LOOPED):
            yield _bubble(family, pp, loops, count)


def _bubble(family: str, pp: int, loops: int, count: int) -> Fact:
    schedule = make_schedule(family, pp=pp, loops=loops, num_microbatches=count)
    found = summarize(simulate(schedule, Costs(1, 2))).bubble_overhead
    what = f"{family}, P {pp}, V {loops}, M {count}"
    return what, "(P - 1) / (M V)", float(Fraction(pp - 1, count * loops)), found


def _latencies() -> Iterator[Fact]:
    """A stage's forward takes 8 and its backward 16, a transfer 2 or 4; breadth-first needs M t_f >= P (t_f + l)."""
    for pp, loops, count, latency in product((4, 8), (2, 4, 8), (8, 16, 24), (2, 4)):
        has_slack = count * 8 >= pp * (8 + latency)
        for family in LOOPED:
            hops, formula = (2 * (pp - 1), "2 (P - 1)") if family == "breadth-first" else (2 * (pp * loops - 1), "")
            if family == "breadth-first" and not has_slack:
                continue
            schedule = _made(family, pp, loops, count)
            ends = [simulate(schedule, Costs(8, 16, transfer_s)).end_s for transfer_s in (latency, 0)]
            what = f"{family}, P {pp}, V {loops}, M {count}, l {latency}/8 of a forward"
            yield what, formula or "2 (P V - 1)", hops, Fraction(ends[0] - ends[1]) / latency


def _blocking() -> Iterator[Fact]:
    """P = 8, M = 16, 8 layers a rank: forward 4 and backward 8 for each layer, and 3 more for every action."""
    pp, count, layers = 8, 16, 8
    for loops in (1, 2, 4, 8):
        family = "1f1b" if loops == 1 else "depth-first"
        work = 12 * layers // loops
        costs = Costs(work / 3 + 3, 2 * work / 3 + 3)
        end = simulate(make_schedule(family, pp=pp, loops=loops, num_microbatches=count), costs).end_s
        slots = count * loops
        expected = float(Fraction((slots + pp - 1) * (work + 6), slots * work) - 1)
        found = float(Fraction(end) / (slots * work) - 1)
        yield (
            f"{family}, P 8, V {loops}, M 16",
            "(M V + P - 1) (t_f + t_b + 2 l) / (M V (t_f + t_b)) - 1",
            expected,
            found,
        )


def _steps() -> Iterator[Fact]:
    for family, loops, expected in (
        ("gpipe", 1, 132),
        ("1f1b", 1, 132),
        ("depth-first", 4, 105),
        ("breadth-first", 4, 105),
    ):
        layers = 4 // loops
        schedule = make_schedule(family, pp=4, loops=loops, num_microbatches=8)
        yield (
            f"{family}, V {loops}",
            "(M V + P - 1) t",
            expected,
            simulate(schedule, Costs(layers, 2 * layers)).end_s,
        )
