"""BPipe's case (Kim et al., ICML 2023; Huang et al., arXiv 2401.02088): 1F1B whose pairs of ranks share their memory.

Every step is simulated with costs that were fixed on other runs; nothing here was fitted to either paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeloom.analysis.memory import MemoryCurve, memory_over_time
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.exchanges import drain_s, evict_seconds, step_terms
from pipeloom.cost.flops import shape_model_flops
from pipeloom.cost.foreign import layer_activation_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import balance, lower
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.predict.memory import held_bytes
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.ledger import HeldBytes
from pipeloom.simulation import simulate
from pipeloom.trace import Trace
from pipeloom.workload.layout import paired_order
from pipeloom.workload.run import Run
from reproduction.bpipe_cases import CLUSTER, RECOMPUTE, SEQ, Case, Setting, program_of
from reproduction.machine import Row


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        run: as it is described.
        seconds: of the whole step.
        slot_s: of the slowest stage's forward and backward.
        rank_bytes: for each rank the most that a device of it holds.
        num_moved: evictions and loads of all ranks.
        num_again: forwards that run again because a rank is short of memory.
        moving_s: of evictions and loads, on the rank that has most of them.
    """

    run: Run
    seconds: float
    slot_s: float
    rank_bytes: tuple[float, ...]
    num_moved: int
    num_again: int
    moving_s: float

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, a fraction."""
        return self._mfu(self.run.global_batch, self.seconds)

    @property
    def stage_mfu(self) -> float:
        """That of the slowest stage alone while it never waits."""
        return self._mfu(self.run.micro_batch, self.run.pp * self.slot_s) * self.run.pp

    def _mfu(self, sequences: int, seconds: float) -> float:
        run = self.run
        flops = sequences * run.seq * shape_model_flops(run.shape, run.seq)
        return flops / (seconds * CLUSTER.peak_flops_per_s(run.num_devices, run.precision))

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return max(self.rank_bytes) <= CLUSTER.device.memory_bytes


def run_of(case: Case, setting: Setting) -> Run:
    """A configuration, as the cost model wants it: sequence parallelism, half precision, one replica."""
    return Run(
        shape=case.shape,
        seq=SEQ,
        tp=case.tp,
        pp=case.pp,
        micro_batch=setting.micro_batch,
        global_batch=case.batch,
        recompute=setting.recompute,
        attention=setting.attention,
        sequence_parallel=True,
        precision="fp16",
    )


def paired(run: Run) -> Run:
    """The run with partners on one node, where there is room for that."""
    if 2 * run.tp > CLUSTER.devices_per_node:
        return run
    return replace(run, pipeline_order=paired_order(partners_of(run)))


def partners_of(run: Run) -> tuple[int, ...]:
    """For each rank its partner."""
    return tuple(range(run.pp - 1, -1, -1))


def costs_of(run: Run, software: Software) -> StageCosts:
    """Seconds of all actions, with those of moving what a micro-batch keeps to the partner or back."""
    evict_s = evict_seconds(Placed(run, CLUSTER, software), partners_of(run), kept_bytes(run, software))
    return replace(Placed(run, CLUSTER, software).costs, evict_s=evict_s)


def kept_bytes(run: Run, software: Software) -> Sequence[float]:
    """For each stage what a micro-batch keeps from forward to backward; all of it moves."""
    return held_bytes(run, software, plain(run)).kept.whole


def plain(run: Run) -> Schedule:
    """1F1B."""
    return lower(make_schedule("1f1b", pp=run.pp, loops=1, num_microbatches=run.num_microbatches))


def balanced(run: Run, costs: StageCosts) -> Schedule:
    """1F1B as BPipe changes it: stage s with stage P - 1 - s; micro-batches are counted, whatever a stage keeps."""
    return balance(plain(run), seconds_of=costs.seconds, partners=partners_of(run))


def recomputed(run: Run, software: Software, costs: StageCosts) -> Schedule:
    """1F1B with as many micro-batches recomputed as it takes to fit, on the ranks that are short of memory.

    Raises:
        UserError: some rank has too little room with all of them recomputed.
    """
    schedule = plain(run)
    kept = held_bytes(run, software, schedule).kept
    return recompute_beyond(schedule, input_room(run, software, costs), kept.whole, kept.recomputed)


def input_room(run: Run, software: Software, costs: StageCosts) -> tuple[float, ...]:
    """For each rank the bytes that are left for what micro-batches keep."""
    schedule = plain(run)
    held, curves = held_curves(run, software, schedule, simulate(schedule, costs))
    return tuple(
        max(0.0, (CLUSTER.device.memory_bytes - always) / (1 + software.fragmentation) - beside)
        for always, beside in zip(
            held.always_bytes,
            (curve.peak_bytes - curve.peak_parts["always"] - curve.peak_parts["stage inputs"] for curve in curves),
            strict=True,
        )
    )


def held_curves(
    run: Run, software: Software, schedule: Schedule, trace: Trace
) -> tuple[HeldBytes, tuple[MemoryCurve, ...]]:
    """How large things are, and what each rank holds over time."""
    held = held_bytes(run, software, schedule)
    held = replace(held, working_bytes=tuple(size + core_bytes(run, software) for size in held.working_bytes))
    return held, memory_over_time(schedule, trace, held)


def stepped(run: Run, software: Software, schedule: Schedule, costs: StageCosts) -> Step:
    """The step of a schedule."""
    trace = simulate(schedule, costs)
    held, curves = held_curves(run, software, schedule, trace)
    most = tuple(
        curve.peak_bytes + software.fragmentation * (curve.peak_bytes - always)
        for curve, always in zip(curves, held.always_bytes, strict=True)
    )
    slots = [forward_s + backward_s for forward_s, backward_s in zip(costs.forward_s, costs.backward_s, strict=True)]
    terms = step_terms(Placed(run, CLUSTER, software), max(costs.backward_s))
    seconds = trace.end_s + drain_s(run, software, costs) + terms.total_s
    again = sum(num_of(schedule, Kind.RECOMPUTE))
    moved = num_of(schedule, Kind.EVICT, Kind.LOAD)
    moving_s = max(count * evict_s for count, evict_s in zip(moved, costs.evict_s, strict=True))
    return Step(run, seconds, max(slots), most, sum(moved), again, moving_s)


def num_of(schedule: Schedule, *kinds: Kind) -> list[int]:
    """For each rank how many actions of some kinds it has."""
    return [int(row.is_kind(*kinds).sum()) for row in schedule.rows]


def core_bytes(run: Run, software: Software) -> float:
    """What the core of one layer's attention takes while it is done again."""
    if run.recompute != "selective":
        return 0.0
    sizes = [layer_activation_bytes(replace(run, recompute=kind), dropout=software.dropout) for kind in RECOMPUTE[:2]]
    return sizes[0] - sizes[1]


def steps(case: Case, program: str, setting: Setting) -> dict[str, Step | None]:
    """A configuration in every order; ``None`` where recomputing everything would not make it fit."""
    run, software = run_of(case, setting), program_of(case, program)
    costs, pairs = costs_of(run, software), paired(run)
    near = costs_of(pairs, software)
    found: dict[str, Step | None] = {
        "1f1b": stepped(run, software, plain(run), costs),
        "bpipe": stepped(pairs, software, balanced(pairs, near), near),
    }
    try:
        found["short"] = stepped(run, software, recomputed(run, software, costs), costs)
    except UserError:
        found["short"] = None
    return found


def described(case: Case, program: str, setting: Setting) -> Row:
    """A configuration in every order, as the columns of a data file."""
    found = steps(case, program, setting)
    one, other, again = (found[order] for order in ("1f1b", "bpipe", "short"))
    assert one is not None
    assert other is not None
    return {
        "case": case.name,
        "program": program,
        "attention": setting.attention,
        "recompute": setting.recompute,
        "micro_batch": str(setting.micro_batch),
        "kernel": one.run.effective_attention,
        "stage_mfu": f"{one.stage_mfu:.4f}",
        **{f"{order}_{key}": value for order, kind in found.items() for key, value in _columns(kind).items()},
        "moved": str(other.num_moved),
        "again": "" if again is None else str(again.num_again),
    }


def _columns(found: Step | None) -> dict[str, str]:
    if found is None:
        return {"mfu": "", "fullest_gb": "", "emptiest_gb": "", "fits": "no"}
    return {
        "mfu": f"{found.mfu:.4f}",
        "fullest_gb": f"{max(found.rank_bytes) / 1e9:.1f}",
        "emptiest_gb": f"{min(found.rank_bytes) / 1e9:.1f}",
        "fits": "yes" if found.fits else "no",
    }
