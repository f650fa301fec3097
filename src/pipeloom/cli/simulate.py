"""``pipeloom simulate``: predicts the step of a run on a cluster."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pipeloom.analysis.summary import LaneUse, communication
from pipeloom.cli.reference import Command, Output
from pipeloom.cli.run_config import PREDICTIONS, parse_words
from pipeloom.cli.swap_plan import ReportedPlan, make_swap_plan, print_swap_plan, swap_plan_to_json
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.config.sections import WHAT_IFS
from pipeloom.errors import UserError
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.describe import described_problems, profile_command, why_training_may_differ
from pipeloom.predict.need import copy_bytes
from pipeloom.predict.orders import least_step_s, with_order
from pipeloom.predict.step import SimulatedStep, memory_that_would_fit
from pipeloom.predict.traffic import boundary_traffic
from pipeloom.runs.run_folder import CONFIG, SUMMARY
from pipeloom.schedule import Level
from pipeloom.system.files import read_text, write_text
from pipeloom.terminal.words import seconds, unit_s
from pipeloom.workload.dtypes import dtype_of
from pipeloom.workload.limits import Common, Count


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom simulate``."""

    json: Common[bool] = False
    """Print JSON for programs. docs/simulate.md lists its keys."""
    plot: Common[Annotated[Path | None, Output("picture")]] = None
    """Draw the step to this .png, .svg or .pdf file. Of many ranks or actions, only the first ones."""
    trace: Common[Annotated[Path | None, Output("file")]] = None
    """Write the trace to this file for ui.perfetto.dev. It has the format of a measured trace."""
    schedule_out: Annotated[Path | None, Output("file")] = None
    """Write the schedule to this file, which `pipeloom train` executes as --schedule.file."""
    by_seconds: bool = False
    """Place the moves of schedule.balance and schedule.offload by predicted seconds instead of nominal ones.
    `pipeloom train` executes it from the file of --schedule-out."""
    search_order: Common[Count | None] = None
    """Search an order of actions for the seconds of this step, with so many changes.
    `pipeloom train` executes it from the file of --schedule-out. None: the order of the schedule."""
    lanes: bool = False
    """Also print every lane of communication. --json always has them."""
    swap_plan: bool = False
    """With schedule.device_budget, also print a partition and a number of micro-batches that hide the swaps."""
    memory_over_time: bool = False
    """Also print when the memory of each rank peaks, and its parts. --json has the curves as well."""


COMMAND = Command(
    name="simulate",
    options=Options,
    examples={
        "pipeloom simulate run.toml --plot step.svg": "a run file on its cluster, with a picture",
        "pipeloom simulate run.toml --machine.inter-bandwidth 2x": "what if the network were twice as fast",
        "pipeloom simulate --model.preset llama-3-8b --machine.cluster dgx-h100": "",
    },
    settings=(*PREDICTIONS, "checkpoint.background"),
    retired={
        "--inter-bandwidth": "use --machine.inter-bandwidth 2x",
        "--intra-bandwidth": "use --machine.intra-bandwidth 2x",
    },
    brief=("model", "data.seq_len", "layout", "schedule", "machine"),
)


def run(words: list[str]) -> int:
    """Parse the configuration, simulate, print; 1 if the step does not fit the devices, whose prediction is printed."""
    options, file, *_ = parse_words(COMMAND, words, described_problems)
    if options.swap_plan and options.schedule.device_budget is None:
        raise UserError("--swap-plan has no effect without schedule.device_budget; give both or leave it out")
    if options.by_seconds and not (options.schedule.balance or options.schedule.offload):
        raise UserError("--by-seconds has no effect without schedule.balance or schedule.offload; leave it out")
    if options.by_seconds and options.schedule.file is not None:
        raise UserError("--by-seconds has no effect with schedule.file, whose moves have their places; leave one out")
    own = _on_own_cluster(options)
    plan = make_swap_plan(options) if options.swap_plan else None
    try:
        step = predict_step(options, by_seconds=options.by_seconds)
    # The cut of the run file may be impossible; the plan contains a possible one, so it is printed anyway.
    except UserError as error:
        if plan is None:
            raise
        print_swap_plan(plan, refused=str(error), as_json=options.json)
        return 1
    step, order = _with_order(options, step)
    if options.trace is not None:
        from pipeloom.trace import to_chrome

        write_text(options.trace, to_chrome(step.trace, "simulated"), "the trace")
    if options.schedule_out is not None:
        # Programs that block between stages run an order of compute alone, which `train` does not.
        if not step.software.has_lanes:
            raise UserError(f"a schedule file is for pipeloom alone, and {step.software.name} has its own order")
        write_text(options.schedule_out, step.schedule_text, "the schedule")
    if options.plot is not None:
        from pipeloom.plotting.timelines import plot_timeline

        unit, name = unit_s(step.trace.end_s - step.trace.start_s)
        title = f"{options.title}, simulated"
        plot_timeline(step.trace, [options.plot], title=title, unit=name, scale=1 / unit, is_whole=False)
    _print(options, step, _Beside(plan, own, order), file)
    return 0 if step.prediction.fits else 1


def _with_order(options: Options, step: SimulatedStep) -> tuple[SimulatedStep, dict[str, float] | None]:
    """The step with the order that ``--search-order`` finds, and what it is compared with."""
    if options.search_order is None:
        return step, None
    found = with_order(step, options.search_order)
    times = {"schedule_step_time_s": step.prediction.step_time_s, "least_step_time_s": least_step_s(found)}
    return found, times


_OF_STEP = ("model", "data", "layout", "schedule", "training")
"""Sections of a run that the time of its step follows from."""


def _print_trained(file: Path | None, step: SimulatedStep, options: Options) -> None:
    """Print what a finished run, whose run file is simulated, took itself, and how to predict with that."""
    if file is None or file.name != CONFIG or not (file.parent / SUMMARY).is_file():
        return
    try:
        summary = json.loads(read_text(file.parent / SUMMARY))
        measured, predicted = (seconds(summary[name]) for name in ("step_time_s", "predicted_step_time_s"))
    except (ValueError, KeyError, TypeError):  # damaged, or without steps or a prediction
        return
    own = read_run_file(file)[0]
    changed = [name for name in _OF_STEP if getattr(options, name) != getattr(own, name)]
    before = f", before flags changed its {' and '.join(changed)}," if changed else ""
    source = "measured pieces" if step.has_measured_pieces else "closed forms"
    print(
        f"\nthe run in {file.parent}{before} took {measured} a step, and its profiled stages predicted {predicted};\n"
        f"the step above is from {source} of machine.cluster {step.cluster.name}; for this machine:\n"
        f"`{profile_command(own)} --output here.toml`, then add --machine.cluster ./here.toml"
    )


def _on_own_cluster(options: Options) -> SimulatedStep | None:
    """The step on the cluster as it is, where a changed one is predicted; ``None`` else."""
    if not options.machine.what_if:
        return None
    machine = options.machine.with_changes(dict.fromkeys(WHAT_IFS))
    return predict_step(replace(options, machine=machine), by_seconds=options.by_seconds)


@dataclass(frozen=True)
class _Beside:
    """What is printed beside a step: the plan of its swaps, the step on the cluster as it is, what an order is
    compared with.
    """

    plan: ReportedPlan | None
    own: SimulatedStep | None
    order: dict[str, float] | None


def _print(options: Options, step: SimulatedStep, beside: _Beside, run_file: Path | None) -> None:
    plan, own = beside.plan, beside.own
    tree = to_json(step, with_curves=options.memory_over_time)
    # What other programs do is not what ``pipeloom train`` runs.
    may_differ = why_training_may_differ(options, dtype_of(step.run.precision) if step.software.has_lanes else None)
    tree |= {"has_default_dtype": options.training.dtype is None, "may_differ": may_differ}
    tree["checkpoint_copy_bytes"] = copy_bytes(options, step.run, step.software)
    tree["order"] = beside.order
    tree["own_step_time_s"] = None if own is None else own.prediction.step_time_s
    if options.json:
        print(json.dumps(tree if plan is None else tree | swap_plan_to_json(plan)))
        return
    from pipeloom.cli.simulate_text import order_words, print_step

    print_step(step, tree, with_lanes=options.lanes)
    if own is not None:
        before, after = own.prediction.step_time_s, step.prediction.step_time_s
        print(
            f"\n{seconds(after)} a step, {after / before - 1:+.1%} of {seconds(before)} on {own.cluster.name} as it is"
        )
    if beside.order is not None:
        print(f"\n{order_words(step, beside.order)}")
    if may_differ is not None:
        print(f"\n{may_differ}")
    if step.fastest_partition is not None:
        pieces = " ".join(map(str, step.fastest_partition))
        print(f"\nranks are not equally fast: layout.partition {pieces} gives the slowest one least to do")
    if plan is not None:
        print()
        print_swap_plan(plan)
    for what, file in (("picture", options.plot), ("trace", options.trace), ("schedule", options.schedule_out)):
        if file is not None:
            print(f"{what:<18}{file}")
    _print_trained(run_file, step, options)


def to_json(step: SimulatedStep, *, with_curves: bool = False) -> dict[str, Any]:
    """What ``--json`` prints, in SI units.

    Keys: ``step_time_s`` = ``pipeline_s`` + the sum of ``after_s`` (``reduce_s``, ``tied_s``, ``shared_s``,
    ``average_s``, ``optimizer_s``, ``fixed_s``); ``tokens_per_s``, ``mfu``, ``hfu``, ``bubble_fraction``; ``run`` (the
    model's sizes and the layout), ``dtype``, ``has_default_dtype`` (whether it is the default), ``may_differ`` (why
    ``train`` may do something else, or null), ``own_step_time_s`` (with ``--machine.inter-bandwidth`` and its like, the
    step on the cluster as it is), ``order`` (with ``--search-order``, the ``schedule_step_time_s`` of the run's own
    schedule and ``least_step_time_s``, which no order of the placement goes below; else null), ``fastest_partition``
    (where ranks are not equally fast, the ``layout.partition`` that gives the slowest one least to do, unless the run
    has it), ``cluster``, ``software``, ``has_measured_pieces``,
    ``num_devices``; ``accounts`` (for each pipeline rank the seconds of each part of the step, which add up to
    ``step_time_s``); ``communication`` (for each rank and lane ``actions``, ``busy_s``, ``hidden_s``,
    ``exposed_s``; empty for programs whose exchanges block); ``between_stages`` (``message_bytes`` and ``message_s`` of
    an activation, mean ``forward_s`` of a stage, ``enough_bytes_per_s`` and ``enough_width`` from which a forward takes
    as long as a message; null without messages over a link); ``memory`` (for each pipeline rank ``total_bytes`` and
    what it is made of), ``device_memory_bytes``, ``fullest_rank``, ``fits``, ``help`` (a setting that lowers the
    fullest rank -> its bytes then), ``checkpoint_copy_bytes`` (for each pipeline rank the host memory of a process for
    a checkpoint that a thread writes, which ``memory`` does not contain). With ``--memory-over-time`` also
    ``memory_over_time``: for each rank ``peak_bytes``, ``peak_s``, ``peak_parts`` and ``points``, (seconds, bytes held
    from then on).

    ``places`` has for each pipeline rank the ``kind`` of its nodes, ``first_node``, ``last_node`` and
    ``device_memory_bytes``. Where nodes are not alike, the ``device_memory_bytes`` of the whole, and the bytes of
    ``help``, are those of the fullest rank's devices. With ``--swap-plan`` also ``swap_plan``: ``partition``,
    ``num_microbatches``, ``device_budget``, ``step_s``, and as fractions ``utilization`` and ``hidden``.
    """
    prediction, traffic = step.prediction, boundary_traffic(step.placed)
    # Programs whose exchanges block have no lanes beside compute.
    uses: list[LaneUse] = [] if step.schedule.level is Level.COMPUTE else communication(step.trace)
    tree: dict[str, Any] = {
        "step_time_s": prediction.step_time_s,
        "pipeline_s": prediction.pipeline_s,
        "after_s": asdict(prediction.terms),
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "bubble_fraction": step.bubble_fraction,
        "num_devices": step.run.num_devices,
        "dtype": dtype_of(step.run.precision),
        "fastest_partition": step.fastest_partition,
        "cluster": step.cluster.name,
        "places": [asdict(place) for place in step.places],
        "software": step.software.name,
        "has_measured_pieces": step.has_measured_pieces,
        "run": asdict(step.run),
        "accounts": [account.to_dict() for account in step.accounts],
        "communication": [_lane_use(use) for use in uses],
        "memory": [
            {"total_bytes": memory.total_bytes, **asdict(memory)} for memory in prediction.memory_by_rank
        ],
        "device_memory_bytes": prediction.device_bytes[prediction.fullest_rank],
        "between_stages": None if traffic is None else traffic.to_dict(),
        "fullest_rank": prediction.fullest_rank,
        "fits": prediction.fits,
        "help": {} if prediction.fits else memory_that_would_fit(step),
    }  # fmt: skip
    if with_curves:
        tree["memory_over_time"] = [asdict(curve) for curve in step.memory_over_time]
    return tree


def _lane_use(use: LaneUse) -> dict[str, Any]:
    return {
        "rank": use.rank,
        "lane": str(use.lane),
        "actions": use.num_actions,
        "busy_s": use.busy_s,
        "hidden_s": use.hidden_s,
        "exposed_s": use.exposed_s,
    }
