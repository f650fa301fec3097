"""``pipeloom tradeoff``: cost and time of a training over cluster sizes, for each method."""

import json
import sys
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.goals import Goals, goal_of, priced, tokens_of
from pipeloom.cli.idle import idle_problems
from pipeloom.cli.plan_json import limits_to_json, step_to_json
from pipeloom.cli.plan_request import program_problems
from pipeloom.cli.reference import Command, Flag, Output
from pipeloom.cli.tradeoff_text import print_curves
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.goals import Goal, Training
from pipeloom.planner.plan import make_question
from pipeloom.planner.question import HEADROOM
from pipeloom.planner.tradeoff import (
    DEVICE_COUNTS,
    METHODS,
    Curves,
    Point,
    Tradeoff,
    cluster_problems,
    default_critical_batch,
    has_method,
    scaling_problems,
    tradeoff,
    whole_batches,
)
from pipeloom.predict.describe import changed_cluster, load_or_note
from pipeloom.terminal.progress import Bar
from pipeloom.terminal.words import unknown_name
from pipeloom.workload.dtypes import Dtype, dtype_of
from pipeloom.workload.launchers import LAUNCHERS, Launcher, LauncherName
from pipeloom.workload.limits import ClusterName, Common, Headroom, ModelName, Names, Positive
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Attention

_TOKENS_PER_PARAMETER = 20
"""Of a model trained with the least compute for its loss (Hoffmann et al., arXiv 2203.15556, table 3)."""


@dataclass(frozen=True, kw_only=True)
class Options(Goals):
    """Options of ``pipeloom tradeoff``.

    Each method has its best layout and global batch on each cluster. A batch of B sequences needs 1 + B / B_crit times
    the tokens of small batches, and a smaller batch utilizes devices less.
    """

    model: ModelName
    """Model: a name of the catalog, or a file (.toml, or a Hugging Face config.json)."""
    cluster: ClusterName
    """Cluster: a name of the catalog, or a file. --devices sets its size."""
    seq: int
    """Sequence length, in tokens."""
    tokens: Common[str | None] = None
    """Tokens of the training run with small batches, such as 1T or 3e11. None: 20 per parameter (arXiv 2203.15556)."""
    critical_batch: Common[float | None] = None
    """Critical batch size B_crit in sequences. Training takes twice the tokens with such a batch. None: by the fit of
    arXiv 2001.08361."""
    critical_batch_tokens: float | None = None
    """Critical batch size B_crit in tokens instead."""
    devices: Common[tuple[int, ...]] = DEVICE_COUNTS
    """Cluster sizes in devices."""
    reference: int | None = None
    """Devices on which layouts are searched, to be scaled by data parallelism. None: the smallest cluster."""
    every_size: bool = False
    """Search all layouts of each cluster instead, which takes several times as long."""
    batch_per_device: tuple[str, ...] = ()
    """Sequences of the global batch per device, such as 1/8 or 0.125. None: powers of two from 1/8 to 8."""
    methods: Common[tuple[Annotated[str, Names("methods")], ...]] = ()
    """Methods to compare. data-parallel has no pipeline: DP, or FSDP if weights are sharded. None: all that the
    training programs have."""
    launcher: Annotated[Common[LauncherName | None], Flag("for")] = None
    """Search what this program can run, at its measured speed. None: pipeloom, or --software."""
    software: tuple[str, ...] = ()
    """Training programs, names of the catalog or files. PROGRAM holds for all methods, METHOD=PROGRAM for one. None:
    pipeloom."""
    dtype: Common[Dtype | None] = None
    """Data type of weights and activations. None: on GPUs bfloat16, or float16 where they lack it, and float32 on
    CPUs."""
    attention: Attention = "flash2"
    """Attention kernel."""
    headroom: Headroom = HEADROOM
    """Fraction of the memory of every device that layouts leave free, as in pipeloom plan."""
    budget_s: Common[Positive | None] = None
    """Most seconds of the searches, in equal parts for each method and batch. Parts that end early are named. None: no
    limit."""
    json: Common[bool] = False
    """Print JSON for programs. docs/tradeoff.md lists its keys."""
    plot: Common[Annotated[Path | None, Output("picture")]] = None
    """Draw time against cost to this .png, .svg or .pdf file."""


COMMAND = Command(
    name="tradeoff",
    options=Options,
    examples={
        "pipeloom tradeoff --model llama-3-8b --cluster dgx-h100 --seq 8192 --price 2.5 --devices 64 256 1024": "",
    },
    retired={"--precision": "use --dtype float32, bfloat16 or float16"},
)


def run(words: list[str]) -> int:
    """Parse the arguments, search, print."""
    options, problems = read_flags(COMMAND, words)
    problems += idle_problems(COMMAND, words)
    goal = goal_of(options, problems)
    inputs = inputs_of(options, goal, problems)
    columns = (TextColumn("searches {task.completed}/{task.total}"), BarColumn(bar_width=24), TimeElapsedColumn())
    total = len(inputs.methods) * len(inputs.batches_per_device)
    with Bar(sys.stderr, *columns, total=total, transient=True) as bar:
        curves = tradeoff(inputs, lambda done, _: bar.update(done), budget_s=options.budget_s)
    if not curves.points and curves.unproved:
        raise UserError(
            "no layout that fits was found in that time: use a larger --budget-s, or fewer --methods and "
            "--batch-per-device"
        )
    if not curves.points:
        raise UserError(
            f"no layout of any method fits {inputs.question.num_devices} devices of {inputs.question.cluster.name}: "
            "use a larger reference, with --reference and --devices, or devices with more memory"
        )
    if options.plot is not None:
        _draw(curves, options.plot)
    if options.json:
        print(json.dumps(to_json(curves, goal)))
    else:
        print_curves(curves, goal, _sources(options, inputs))
        if options.plot is not None:
            print(f"\npicture: {options.plot}")
    return 0 if goal is None or goal.best(curves.points) is not None else 1


def inputs_of(options: Options, goal: Goal | None, problems: list[str]) -> Tradeoff:
    """The question.

    Args:
        options: of the command.
        goal: of the training, which may need a price.
        problems: what is wrong with its words.

    Raises:
        ConfigError: these, and everything that is wrong with the question.
    """
    shape = load_or_note(lambda name: load_model(name, options.seq), options.model, problems)
    cluster = load_or_note(load_cluster, options.cluster, problems)
    if cluster is not None:
        cluster = priced(cluster, max(options.devices, default=1), options, goal, problems)
        problems += cluster_problems(cluster)
        cluster = changed_cluster(cluster, options.what_if, max(options.devices, default=1), problems)
    launcher = LAUNCHERS[options.launcher or "pipeloom"]
    problems += program_problems(options.launcher, options.software)
    methods = _methods(options, launcher, problems)
    # The smallest: layouts grow along their data axis, so what fits there fits with more devices, too.
    reference = options.reference or min(options.devices, default=1)
    batches = _batches(options, problems)
    problems += scaling_problems(reference, options.devices, batches or whole_batches(reference))
    training = _training(options, shape, problems)
    if problems or shape is None or cluster is None or training is None:
        raise ConfigError(problems, SOURCE)
    return Tradeoff(
        question=make_question(
            options.model,
            cluster,
            num_devices=reference,
            global_batch=1,
            seq=options.seq,
            software=next(iter(methods.values())) if launcher.is_own else None,
            launcher=launcher.name,
            dtype=options.dtype,
            attention=options.attention,
            headroom=options.headroom,
        ),
        training=training,
        methods=methods,
        device_counts=tuple(sorted(set(options.devices))),
        batches_per_device=batches or whole_batches(reference),
        searches_every_size=options.every_size,
    )


def _methods(options: Options, launcher: Launcher, problems: list[str]) -> dict[str, Software]:
    """Method -> program; where none are named, those that their programs have."""
    general = [word for word in options.software if "=" not in word]
    if len(general) > 1:
        problems.append(
            f"--software takes one program for all methods, found {', '.join(general)}; METHOD=PROGRAM is for one"
        )
    chosen = dict.fromkeys(options.methods or METHODS, (general or [launcher.software])[0])
    own: dict[str, list[str]] = {}
    for word in options.software:
        method, sign, program = word.partition("=")
        if sign and method not in chosen:
            problems.append(f"--software {word}: expected one of the methods {', '.join(chosen)}")
        elif sign:
            own.setdefault(method, []).append(program)
    for method, programs in own.items():
        if len(programs) > 1:
            problems.append(f"--software takes one program for {method}, found {', '.join(programs)}")
    if general and not chosen.keys() - own.keys():
        problems.append(f"--software {general[0]} has no effect, since each method has a program of its own")
    chosen |= {method: programs[0] for method, programs in own.items()}
    known = {program: load_or_note(load_software, program, problems) for program in set(chosen.values())}
    unknown = [method for method in chosen if method not in METHODS]
    problems += [unknown_name("method", name, METHODS) for name in unknown]
    found = {method: software for method, program in chosen.items() if (software := known[program]) is not None}
    return {method: one for method, one in found.items() if options.methods or has_method(one, method)}


def _batches(options: Options, problems: list[str]) -> tuple[Fraction, ...]:
    found = []
    for word in options.batch_per_device:
        try:
            # Exact: times the devices it has to be a whole number of sequences. It also reads 1/8.
            found.append(Fraction(word))
        except (ValueError, ZeroDivisionError):
            problems.append(f"a batch per device must be a number such as 1/8 or 0.125, found '{word}'")
    if len(set(found)) < len(found):
        problems.append(f"--batch-per-device has equal values, found {' '.join(options.batch_per_device)}")
    return tuple(sorted(set(found)))


def _training(options: Options, shape: ModelShape | None, problems: list[str]) -> Training | None:
    """The training run; a value that is missing because of another problem is replaced by a valid one."""
    if options.seq < 1:
        problems.append(f"--seq must be at least 1, found {options.seq}")
    seq = max(1, options.seq)
    batch = options.critical_batch
    if batch is not None and options.critical_batch_tokens is not None:
        problems.append("expected --critical-batch or --critical-batch-tokens, found both")
    if batch is None and options.critical_batch_tokens is not None:
        batch = options.critical_batch_tokens / seq
    if batch is None:
        batch = default_critical_batch(shape, seq) if shape is not None else 1.0
    tokens = tokens_of(options.tokens, problems)
    if tokens is None:
        tokens = float(_TOKENS_PER_PARAMETER * shape.parameters) if shape is not None else 1.0
    try:
        return Training(tokens=tokens, critical_batch=batch)
    except ConfigError as error:
        problems += error.problems
        return None


def _sources(options: Options, inputs: Tradeoff) -> dict[str, str]:
    """Name of a line of the question -> where its default is from."""
    models = "models without experts" if inputs.question.shape.experts is not None else "small models"
    found = dict[str, str]()
    if options.tokens is None:
        of_dense = f", a fit to {models}" if inputs.question.shape.experts is not None else ""
        found["tokens"] = f" ({_TOKENS_PER_PARAMETER} for each parameter{of_dense}, arXiv 2203.15556)"
    if options.critical_batch is options.critical_batch_tokens is None:
        found["B_crit"] = f" (a fit to {models}, arXiv 2001.08361)"
    return found


def _draw(curves: Curves, file: Path) -> None:
    from pipeloom.plotting.charts import COST, plot_tradeoff

    inputs = curves.inputs
    plot_tradeoff(
        {method: _marks(curves.curve(method)) for method in inputs.methods},
        _marks(curves.front),
        file,
        unit=COST if inputs.question.cluster.price_per_device_hour else "device-hours",
        title=f"{inputs.question.shape.name} on {inputs.question.cluster.name}, "
        f"{inputs.training.tokens:.3g} tokens, B_crit {inputs.training.critical_batch:,.0f} sequences",
    )


def _marks(points: list[Point]) -> list[tuple[float, float, str]]:
    costs = [point.device_hours if point.dollars is None else point.dollars for point in points]
    return [(cost, point.days, f"{point.num_devices:,}") for cost, point in zip(costs, points, strict=True)]


def to_json(curves: Curves, goal: Goal | None = None) -> dict[str, Any]:
    """What ``--json`` prints, in SI units but for dollars and days.

    docs/tradeoff.md lists the keys; each of ``points`` has its layout as in the JSON of ``pipeloom plan``.
    """
    inputs = curves.inputs
    # By identity: equal points of two methods are two points.
    numbers = {id(point): number for number, point in enumerate(curves.points)}

    def number_of(point: Point | None) -> int | None:
        return None if point is None else numbers[id(point)]

    return {
        "model": inputs.question.shape.name,
        "cluster": inputs.question.cluster.name,
        "seq": inputs.question.seq,
        "dtype": dtype_of(inputs.question.precision),
        "has_default_dtype": inputs.question.has_default_dtype,
        **asdict(inputs.training),
        "price_per_device_hour": inputs.question.cluster.price_per_device_hour,
        "reference_devices": inputs.question.num_devices,
        "launcher": inputs.question.launcher.name,
        "methods": {method: software.name for method, software in inputs.methods.items()},
        "points": [_point_to_json(point) for point in curves.points],
        "best": [
            {
                "num_devices": count,
                "point": number_of(curves.best(count)),
                "by_method": {method: number_of(curves.best(count, method)) for method in inputs.methods},
            }
            for count in inputs.device_counts
        ],
        "front": [numbers[id(point)] for point in curves.front],
        "missing": [{"method": method, "batch_per_device": float(batch)} for method, batch in curves.missing],
        "unproved": [{"method": method, "batch_per_device": float(batch)} for method, batch in curves.unproved],
        "goal": goal
        and {
            **limits_to_json(goal),
            "point": number_of(goal.best(curves.points)),
        },
    }


def _point_to_json(point: Point) -> dict[str, Any]:
    named = ("method", "num_devices", "batch_per_device", "reference_mfu", "tokens")
    named += ("seconds", "days", "dollars", "device_hours")
    own = {"program": point.step.software.name, "global_batch": point.step.run.global_batch}
    return {**{name: getattr(point, name) for name in named}, **own, **step_to_json(point.step)}
