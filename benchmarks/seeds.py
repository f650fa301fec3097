"""The twelve systems that pipeloom joins: what each one's authors claim, beside a figure made here.

Run by ``make seeds``. Figures that are simulated, counted, fitted or planned are computed in this run; trained ones are
read from the data files of ``docs/reproduction/``, which the programs named there write.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from pipeloom import make_question, make_schedule, plan
from pipeloom.passes.lower_stage_swaps import add_stage_swaps
from pipeloom.schedule import Kind
from reproduction import (
    batch,
    bpipe,
    bpipe_cases,
    bpipe_tables,
    ep_alm,
    lomo,
    m6_10t,
    moesys,
    pwemoe,
    sparse,
    swarm,
    terapipe,
)
from reproduction.tables import read_rows


@dataclass(frozen=True)
class Seed:
    """A system.

    Attributes:
        name: of the system, and where it is published.
        claim: the authors', with its conditions.
        figure: what pipeloom has for it.
        how: the figure was made.
        page: with the whole comparison, in ``docs``.
    """

    name: str
    claim: str
    figure: Callable[[], str]
    how: str
    page: str


def breadth_first() -> str:
    """Of 52 billion parameters on 64 V100, at the smallest batch."""
    ours, straight, looped = (
        float(row["tflop_per_s"]) if (row := batch.best("gpt-52b", "cut", method, 8)) is not None else 0.0
        for method in ("breadth-first", "1F1B", "depth-first")
    )
    over = f"{ours / straight - 1:+.0%} over 1F1B and {ours / looped - 1:+.1%} over depth-first"
    return f"{over}, 52B at 1/8 sequence a device"


def layouts() -> str:
    """The layout that is planned first without headroom, as the authors had it."""
    question = make_question(
        "llama-13b", "dgx-a100", num_devices=64, global_batch=2048, seq=2048, software="scaling-2023b", headroom=0.0
    )
    step = plan(question, 1, explains=False).rows[0]
    run = step.run
    return f"micro-batch {run.micro_batch}, tp {run.tp}, pp {run.pp} first: {step.mfu:.1%} MFU"


def balance() -> str:
    """Of the 96 billion parameters on 32 A100, fused softmax."""
    found = [
        bpipe.described(case, program, setting)
        for case, program, setting in bpipe_cases.points()
        if (case, program) == (bpipe_cases.GPT_96B, bpipe_tables.PROGRAM)
    ]
    rows = [row for row in found if row["attention"] == "fused-softmax"]
    gains = {name: bpipe_tables.AGAINST[name](rows) for name in ("full recomputation", "any recomputation")}
    return ", ".join(f"{gain:.2f} times 1F1B with {name}" for name, gain in gains.items() if gain is not None)


def token_slices() -> str:
    """Slices of 175 billion parameters, with latencies that are fitted to the published even slices."""
    rows = [row for row in terapipe.ablation_rows() if row["setting"].startswith("175B")]
    seconds = {row["slices"]: float(row["fitted_s"]) for row in rows}
    whole, chosen = seconds["1"], seconds["program"]
    return f"{whole:.3f} s whole, chosen slices {chosen:.3f} s: {whole / chosen:.2f} times as fast"


def traffic() -> str:
    """Bytes of a message between stages, and what peers that come and go serve."""
    row = swarm.traffic_rows()[0]
    shares = {peers["every_s"]: peers["mean"] for peers in read_rows(swarm.PEERS) if peers["stages"] == "8"}
    return (
        f"{float(row['int8_mb']) / float(row['message_mb']):.2f} of the bytes of bfloat16; peers of 8 stages that come "
        f"and go: {shares['300']} of their speed with a move every 300 s, {shares['never']} without"
    )


def swaps() -> str:
    """Loads of a step with room for two of eight stages."""
    loads = {
        count: add_stage_swaps(make_schedule("breadth-first", pp=1, loops=8, num_microbatches=count), 2)
        for count in (2, 32)
    }
    found = {count: schedule.facts.row.is_kind(Kind.SWAP_IN).sum() for count, schedule in loads.items()}
    both = ", ".join(f"{number} with {count} micro-batches" for count, number in found.items())
    return f"loads of a step with room for 2 of 8 stages: {both}"


def experts() -> str:
    """Mixtral's blocks beside a dense model of as many active parameters, and what is exposed."""
    rows = {row["model"]: row for row in moesys.step_rows()}
    routed, active = rows["8 experts, 2 of a token"], rows["dense, as active"]
    ratio, exposed = float(routed["step_ms"]) / float(active["step_ms"]), float(routed["exposed_ms"])
    return (
        f"{routed['parameters_b']} B parameters take {ratio:.2f} of the step of {active['parameters_b']} B dense, "
        f"{exposed / float(routed['step_ms']):.1%} exposed; gathers and loads as long as half a visit: "
        f"{moesys.prefetch_rows()[1]['room 2']} exposed; a token of a model of 4 device budgets takes "
        f"{moesys.ring_rows()[2]['of_larger']} of the longer of computing and loading"
    )


def shared_layers() -> str:
    """State of 48 layers with one set, and losses at equal time."""
    rows = {(row["devices"], row["model"]): row for row in m6_10t.step_rows()}
    own, one = (float(rows["64 A100, nodes of 8", model]["state_gb"]) for model in ("own layers", "one set"))
    never, delinked = (_loss(m6_10t.LOSS, run) for run in ("never shared", "shared, then delinked"))
    return f"{one / own:.2f} of the state while shared; loss {delinked:.3f} against {never:.3f} at equal time"


def _loss(name: str, run: str) -> float:
    return fmean(float(row["validation_loss"]) for row in read_rows(name) if row["run"] == run)


def updates() -> str:
    """Both models with bfloat16 weights alone."""
    ways = ("AdamW", "LOMO within the step, bfloat16 weights alone")
    rows = [row for row in lomo.memory_rows() if row["way"] in ways]
    return "; ".join(f"{row['model']}, {row['way'].split(' ')[0]}: {row['total_gb']} GB a device" for row in rows)


def density() -> str:
    """FLOPs of 13 billion parameters at 1/8, and the simulated step on the same A100."""
    rows = {row["model"]: row for row in sparse.step_rows()}
    dense, blocks = rows["dense"], rows["blocks of 128"]
    fewer, faster = (float(dense[name]) / float(blocks[name]) for name in ("flops", "step_ms"))
    return f"{fewer:.1f} times fewer FLOPs, {faster:.2f} times as fast on the same A100"


def perception() -> str:
    """What is trained on a frozen model, and what it answers about images."""
    rows = read_rows(ep_alm.NAME)
    share, right, without = (fmean(float(row[name]) for row in rows) for name in ("share", "accuracy", "withheld"))
    return f"{share:.2%} trained; colors of images {right:.0%} right, {without:.0%} without the image"


def preferences() -> str:
    """Numbers of routers, and the area of their front above that of interpolation."""
    rows, far = read_rows(pwemoe.NAME), pwemoe.CASES[-1]
    routed, between = (pwemoe.volume(rows, far, one) for one in (pwemoe.FROM_PREFERENCE, pwemoe.INTERPOLATED))
    (numbers,) = {row["numbers"] for row in rows if row["method"] == pwemoe.FROM_PREFERENCE}
    return f"{numbers} numbers: a front of hypervolume {routed:.3f}, {between:.3f} by interpolation"


SEEDS = (
    Seed(
        "Breadth-first (2211.05953)",
        "43 % more throughput at a small batch",
        breadth_first,
        "simulated",
        "reproduction/README.md",
    ),
    Seed(
        "Parallelization layouts (2311.05610)",
        "13B on 64 A100: micro-batch 1, tp 1, pp 1 is best, 70.6 % MFU",
        layouts,
        "planned",
        "accuracy.md",
    ),
    Seed(
        "BPipe (ICML 2023)",
        "1.25 to 2.17 times Megatron-LM on GPT-3 of 96B and 134B",
        balance,
        "simulated",
        "reproduction/bpipe.md",
    ),
    Seed(
        "TeraPipe (2102.07988)",
        "175B, setting 9: 9.990 s whole, chosen slices 1.481 s",
        token_slices,
        "fitted",
        "reproduction/terapipe.md",
    ),
    Seed(
        "SWARM (2301.11913)",
        "messages in 8 bits train as well; peers that move between stages: 95.8 % of the optimum, 82.7 % else",
        traffic,
        "counted; simulated",
        "reproduction/swarm.md",
    ),
    Seed(
        "ATOM (2403.10504)",
        "a model larger than its device is swapped through it",
        swaps,
        "counted",
        "reproduction/atom.md",
    ),
    Seed("MoESys (2205.10034)", "33 % more throughput than DeepSpeed", experts, "simulated", "reproduction/moesys.md"),
    Seed(
        "M6-10T (2110.03888)",
        "10 trillion parameters on 512 GPUs; sharing first is sooner at a loss",
        shared_layers,
        "simulated; trained",
        "reproduction/m6_10t.md",
    ),
    Seed(
        "CoLLiE, LOMO (2306.09782)",
        "7B fits one device of 24 GB, 65B eight",
        updates,
        "simulated",
        "reproduction/lomo.md",
    ),
    Seed(
        "Sparsity and dataflow (2304.05511)",
        "4.5 times as fast as dense on A100, 13B",
        density,
        "simulated",
        "reproduction/sparse.md",
    ),
    Seed(
        "eP-ALM (2303.11403)",
        "under 1 % of the parameters trained",
        perception,
        "trained",
        "reproduction/ep_alm.md",
    ),
    Seed(
        "PWEMoE (2406.09770)",
        "a set of trade-offs from a few hundred parameters",
        preferences,
        "trained",
        "reproduction/pwemoe.md",
    ),
)


def main() -> None:
    """Print the table."""
    table = Table("system", "its claim", "here", "how", "docs")
    for seed in SEEDS:
        table.add_row(seed.name, seed.claim, seed.figure(), seed.how, seed.page)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
