"""``pipeloom plan``: which layout to use, and why."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.cli.flags import SOURCE, Words, or_note, read_words
from pipeloom.cli.reference import Command, Flag, Output, Place
from pipeloom.cli.run_config import source_of
from pipeloom.cli.what_if import WhatIf
from pipeloom.config import RunConfig, in_order
from pipeloom.config.file import format_run, read_run_file
from pipeloom.config.problems import model_problems, optimizer_problems
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.comparison import causes
from pipeloom.planner.goals import AMOUNTS, amount_or_note, training_of
from pipeloom.planner.launch import Wanted, launch_problems
from pipeloom.planner.plan import Plan, make_question, plan
from pipeloom.planner.question import HEADROOM, Limits, Question, limit_problems
from pipeloom.planner.run_file import run_config
from pipeloom.planner.strategies import with_strategies
from pipeloom.predict.describe import asked_precision, changed_cluster, load_or_note, with_model_sizes
from pipeloom.predict.step import SimulatedStep
from pipeloom.runs.run_folder import SCHEDULE
from pipeloom.system.files import write_text
from pipeloom.workload.dtypes import Dtype, Precision, dtype_of
from pipeloom.workload.launchers import LAUNCHERS, PIPELOOM, LauncherName
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.limits import (
    ClusterName,
    Common,
    Count,
    FamilyName,
    Headroom,
    ModelName,
    Names,
    Positive,
    ProgramName,
)
from pipeloom.workload.model import ModelShape, shape_of
from pipeloom.workload.run import Attention

RUN_FILE = "run.toml"


@dataclass(frozen=True, kw_only=True)
class Options(WhatIf):
    """Options of ``pipeloom plan``.

    Prints the fastest layouts, their step time by cause, the best layouts of other kinds, what would change the answer,
    and the expected error. A layout is skipped only if a lower bound of its step time or memory excludes it.
    """

    config: Annotated[Path | None, Place("CONFIG")] = None
    """A run file with the model, sequence length, batch, number of devices and machine. Flags override them."""
    model: Common[ModelName | None] = None
    """Model: a name of the catalog, or a file (.toml, or a Hugging Face config.json)."""
    cluster: Common[ClusterName | None] = None
    """Cluster: a name of the catalog, or a file."""
    devices: Common[Count | None] = None
    """World size. A layout uses all devices."""
    global_batch: Common[Count | None] = None
    """Global batch size, in sequences."""
    seq: Common[Count | None] = None
    """Sequence length, in tokens."""
    tokens: Common[str | None] = None
    """Tokens of the training, such as 1T or 3e11: print how long it takes, and its price."""
    launcher: Annotated[Common[LauncherName | Literal["any"] | None], Flag("for")] = None
    """Search what this program can run, at its measured speed. any: the best layout for each. None: pipeloom, or
    --software."""
    software: ProgramName | None = None
    """Training program: a name of the catalog, or a file. None: pipeloom."""
    dtype: Common[Dtype | None] = None
    """Data type of weights and activations. None: that of the run file; else on GPUs bfloat16, or float16 where they
    lack it, and float32 on CPUs."""
    attention: Attention | None = None
    """Attention kernel. None: flash2."""
    fused_norm: bool | None = None
    """Norms are one kernel. None: on."""
    headroom: Headroom = HEADROOM
    """Fraction of the memory of every device that layouts leave free. The default is the mean error of predicted
    memory; it also has to cover a fragmented allocator and buffers of the network."""
    tp: Common[tuple[int, ...]] = ()
    """Tensor-model-parallel sizes to search. None: all."""
    pp: Common[tuple[int, ...]] = ()
    """Pipeline-model-parallel sizes to search. 1 is no pipeline. None: all."""
    dp: Common[tuple[int, ...]] = ()
    """Data-parallel sizes to search. None: all."""
    loops: Common[tuple[int, ...]] = ()
    """Virtual stages per rank to search. None: all."""
    micro_batch: Common[tuple[int, ...]] = ()
    """Micro-batch sizes to search, in sequences. None: all."""
    families: Common[tuple[FamilyName, ...]] = ()
    """Schedules to search. None: all that the training program has."""
    shards: Common[tuple[Shard, ...]] = ()
    """State to shard over data-parallel ranks. None: all."""
    recompute: Common[tuple[Recompute, ...]] = ()
    """Activation recomputation to search. none and full together allow some of the layers, too. None: all."""
    strategies: tuple[Annotated[str, Names("strategies")] | Literal["none"], ...] = ()
    """Strategies to search, which save memory or shorten the bubble. keep recomputes the micro-batches that do not fit;
    balance moves activations to ranks with free memory; offload moves them to the host; swap keeps most stages of a
    model on the host, on one device; slices cuts sequences. none: layouts without a strategy, which are also printed if
    the others lead to no layout. None: all that the training program has."""
    sequence_parallel: Literal["any", "on", "off"] = "any"
    """Sequence parallelism, with tensor parallelism, to search."""
    best: Common[Count] = 10
    """Number of layouts to print."""
    budget_s: Common[Positive | None] = None
    """Stop after this many seconds with the best layouts found. A lower bound on the rest is printed. None: no
    limit."""
    explain: bool = True
    """Search the best layouts of other kinds, and what would change the answer."""
    out: Common[Annotated[Path | None, Output("folder")]] = None
    """Write a layout to this folder. run.toml is for `pipeloom train`, and schedule.txt has the schedule."""
    export: Annotated[Path | None, Output("folder")] = None
    """Write start files to this folder. They are for torchrun, Slurm, PyTorch, torchtitan and Megatron-LM."""
    row: Common[Count] = 1
    """With --out or --export: row of the table to write."""
    json: Common[bool] = False
    """Print JSON for programs. docs/plan.md lists its keys."""


COMMAND = Command(
    name="plan",
    options=Options,
    examples={
        "pipeloom plan --model llama-3-8b --cluster dgx-h100 --devices 64 --global-batch 512 --seq 8192": "",
        "pipeloom plan run.toml --pp 4 8 --families breadth-first 1f1b --out planned": "a run file, fewer layouts",
    },
    retired={"--precision": "use --dtype float32, bfloat16 or float16", "--ways": "use --strategies"},
)


@dataclass(frozen=True)
class Request:
    """A command line that is right.

    Attributes:
        options: of the command.
        question: the layouts to search.
        model: the model's name or file; ``None`` if a run file gives its sizes.
        cluster: name or file.
        software: name or file.
        config: of the run file, if one was given.
        what_if: changes of the cluster, of which the question has the result.
        tokens: of the training, if they were given.
    """

    options: Options
    question: Question
    model: str | None
    cluster: str
    software: str
    config: RunConfig | None
    what_if: Mapping[str, str]
    tokens: float | None


def run(words: list[str]) -> int:
    """Parse the arguments, plan, print the answer; returns 1 if nothing fits, 130 after Ctrl-C."""
    found = read_words(COMMAND, words)
    options = Options(**found.values)
    if options.launcher == "any":
        from pipeloom.cli.plan_programs import run_each

        return run_each(options, requests_of(options, found, words))
    request = _request(options, found, words)
    from pipeloom.cli.plan_progress import PlanProgress
    from pipeloom.cli.plan_text import print_next, print_plan

    # A program that reads JSON has no use for a bar.
    with PlanProgress(is_shown=not options.json) as progress:
        answer = plan(
            request.question, options.best, budget_s=options.budget_s, explains=options.explain, progress=progress.show
        )
    if options.json:
        print(json.dumps(to_json(answer, request.tokens)))
    else:
        print_plan(answer, request.tokens)
    if options.row > len(answer.steps) > 0:
        raise UserError(f"--row must be at most {len(answer.steps)}, the rows of the table, found {options.row}")
    if answer.best is not None:
        _write(options, request, answer.rows[options.row - 1])
        if not options.json and options.out is None and options.export is None:
            print_next(words, request.question.launcher)
    elif not options.json and (options.out or options.export):
        print("\nnothing is written: there is no layout to write")
    if answer.stopped == "interrupt":
        # The shells' status of an interrupted command: a script must not take part of an answer for all of it.
        return 130
    return 1 if answer.best is None else 0


def _write(options: Options, request: Request, best: SimulatedStep) -> None:
    cluster = _cluster_file(options, request, best)
    config = run_config(best, request.model, cluster, request.software)
    if cluster == request.cluster:  # a file that was written has the changes
        config = replace(config, machine=config.machine.with_changes(request.what_if))
    if request.config is not None:
        config = _over(request.config, config, has_model=options.model is not None)
    folder = options.out or options.export
    moves = best.software.has_lanes and best.knobs.moves.is_any
    if folder is not None and moves:  # places of moves follow from seconds that `pipeloom train` does not have
        config = replace(config, schedule=replace(config.schedule, file=folder / SCHEDULE))
    if folder is not None and best.software.has_lanes and (moves or options.out is not None):
        write_text(folder / SCHEDULE, best.schedule_text, parents=True)
    if options.out is not None:
        write_text(options.out / RUN_FILE, format_run(config), parents=True)
        if not options.json:
            from pipeloom.cli.launch import print_run

            print_run(config, best.cluster, options.out / RUN_FILE)
            if best.software.has_lanes:
                print(f"\nschedule: {options.out / SCHEDULE}; pipeloom train takes it as --schedule.file")
    if options.export is not None:
        from pipeloom.cli.launch import print_handed_over
        from pipeloom.export import hand_over

        launcher = request.question.launcher
        done = hand_over(config, best.cluster, options.export, () if launcher.is_own else (launcher.name,))
        if not options.json:
            print()
            print_handed_over(done)


def _cluster_file(options: Options, request: Request, best: SimulatedStep) -> str:
    """Name or file of the cluster; writes a file if the layout has the groups of nodes in another order."""
    if (options.out is None and options.export is None) or best.cluster == request.question.cluster:
        return request.cluster
    file = (options.out or options.export or Path()) / "run.cluster.toml"
    note = (
        f"{request.cluster} with its groups of nodes in the order that `pipeloom plan` chose, for the ranks in order."
    )
    write_text(file, cluster_to_toml(best.cluster, {"": [note]}), parents=True)
    if not options.json:
        print(f"\nwritten: {file}, with the groups of nodes in the order that was chosen")
    return str(file)


def _over(config: RunConfig, planned: RunConfig, *, has_model: bool) -> RunConfig:
    """A run's settings with the planned ones, and with the model of the question if a flag set it."""
    training = replace(config.training, dtype=planned.training.dtype, device=planned.training.device)
    return replace(
        config,
        layout=planned.layout,
        schedule=planned.schedule,
        model=planned.model if has_model else config.model,
        machine=planned.machine,
        data=replace(config.data, seq_len=planned.data.seq_len),
        training=training,
    )


def _flag_problems(options: Options) -> Iterator[str]:
    """Flags that do not go together."""
    if options.out is not None and options.out.suffix == ".toml":
        yield f"--out takes a folder, to which {RUN_FILE} and {SCHEDULE} go, found {options.out}"
    if options.row > 1 and options.out is None and options.export is None:
        yield f"--row {options.row} has no effect without --out or --export; give one of them or leave it out"
    if options.row > options.best:
        yield f"--row must be at most --best {options.best}, found {options.row}"
    if options.launcher is not None and options.software is not None:
        yield f"--for {options.launcher} and --software both name the program; leave one of them out"


def _request(options: Options, found: Words, words: list[str]) -> Request:
    """Read the run file and the catalog; a ``ConfigError`` has everything that is missing or wrong."""
    problems = found.problems
    tokens = amount_or_note("--tokens", options.tokens, AMOUNTS, "1T, 300B or 3e11", problems)
    problems += _flag_problems(options)
    path = options.config
    config = None if path is None else or_note(lambda: _read(path, options.seq, problems), problems)
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("model", "cluster", "devices", "global_batch", "seq")
        if getattr(options, name) is None and name not in found.wrong  # a wrong value is a problem already
    ]
    if missing and options.config is None:
        problems.append(f"expected a run file, or {', '.join(missing)} as well")
    machine = config.machine if config is not None else None
    model_name = options.model or (_model_name(config) if config is not None else None)
    cluster_name = options.cluster or (machine.cluster if machine is not None else "")
    launcher = PIPELOOM if options.launcher in (None, "any") else LAUNCHERS[options.launcher]
    own = launcher.software if machine is None or options.launcher is not None else machine.software
    software_name = options.software or own
    seq = options.seq or (config.data.seq_len if config is not None else None)
    shape = load_or_note(lambda name: load_model(name, seq), model_name, problems) if model_name else None
    if shape is None and config is not None and model_name is None and not problems:
        shape = shape_of(config.model.resolve(config.data.vocab_size))
    cluster = load_or_note(load_cluster, cluster_name, problems) if cluster_name else None
    software = load_or_note(load_software, software_name, problems)
    what_if = {} if machine is None else machine.what_if
    what_if = {**what_if, **options.what_if}
    dtype = options.dtype or (config.training.dtype if config is not None else None)
    num_devices = options.devices or (config.layout.num_ranks if config is not None else 1)
    if cluster is not None:
        cluster = changed_cluster(cluster, what_if, num_devices, problems)
    limits = _limits(options)
    if shape is not None and cluster is not None:
        wanted = _wanted(options, config, model_name or shape, seq or 1, asked_precision(dtype, cluster, num_devices))
        problems += launch_problems(launcher, wanted, cluster, num_devices)
    if problems or shape is None or cluster is None or software is None:
        if software is not None:
            problems += limit_problems(Limits(**limits), with_strategies(software), launcher)
        source = SOURCE if path is None or config is None else source_of(path, words)
        # A run file and its model may have the same problem.
        raise ConfigError(list(dict.fromkeys(problems)), source)
    layout, known = (config.layout, config.data) if config is not None else (None, None)
    question = make_question(
        shape,
        cluster,
        num_devices=_first(options.devices, layout and layout.num_ranks),
        global_batch=_first(options.global_batch, layout and layout.batch_size),
        seq=_first(options.seq, known and known.seq_len),
        software=software if launcher.is_own else None,
        launcher=launcher.name,
        dtype=dtype,
        attention=options.attention or (machine.attention if machine is not None else "flash2"),
        fused_norm=_first(options.fused_norm, machine.fused_norm if machine is not None else True),
        optimizer=config.optimizer.rule if config is not None else None,
        headroom=options.headroom,
        **limits,
    )
    return Request(options, question, model_name, cluster_name, software_name, config, what_if, tokens)


def _wanted(
    options: Options, config: RunConfig | None, model: str | ModelShape, seq: int, precision: Precision
) -> Wanted:
    """What a program has to run, by the flags and the run file."""
    if config is None:
        return Wanted(model=model, seq=seq, precision=precision, attention=options.attention or "flash2")
    own = config.model.resolve(config.data.vocab_size)
    return Wanted(
        model=own if isinstance(model, ModelShape) else model,
        seq=seq,
        precision=precision,
        attention=options.attention or config.machine.attention,
        optimizer=config.optimizer.name,
        by_document=config.data.by_document,
    )


def requests_of(options: Options, found: Words, words: list[str]) -> dict[LauncherName, Request | ConfigError]:
    """The request for each program; where it cannot run such a training, the error with the reasons.

    Raises:
        ConfigError: no program can.
    """
    for flag, value in {"--out": options.out, "--export": options.export}.items():
        if value is not None:
            found.problems.append(
                f"{flag} writes the layout of one program; use --for with one of {', '.join(LAUNCHERS)}"
            )
    requests: dict[LauncherName, Request | ConfigError] = {}
    for name in LAUNCHERS:
        try:
            own = replace(found, problems=list(found.problems))
            requests[name] = _request(replace(options, launcher=name), own, words)
        except ConfigError as error:
            requests[name] = error
    errors = [one for one in requests.values() if isinstance(one, ConfigError)]
    if len(errors) == len(requests):
        raise ConfigError(list(dict.fromkeys(problem for one in errors for problem in one.problems)), SOURCE)
    return requests


def _first(*values: Any) -> Any:
    """The first value that is not ``None``."""
    return next(value for value in values if value is not None)


def _read(path: Path, seq: int | None, problems: list[str]) -> RunConfig:
    """Read the run file, with the sequence length of the question, on which the sizes of some models depend."""
    config, found = read_run_file(path)
    if seq is not None:
        config = replace(config, data=replace(config.data, seq_len=seq))
    config, unknown = with_model_sizes(config)
    values = [] if unknown else model_problems(config)
    if config.training.freeze_layers is not None:
        values.append(
            "training.freeze_layers: the search prices layouts that train all weights; leave it out (`pipeloom "
            "simulate` prices one layout with frozen layers)"
        )
    problems += in_order([*found, *unknown, *values, *optimizer_problems(config)])
    return config


def _model_name(config: RunConfig) -> str | None:
    return config.model.preset or (str(config.model.file) if config.model.file is not None else None)


def _limits(options: Options) -> dict[str, tuple[Any, ...]]:
    split = {"any": (), "on": (True,), "off": (False,)}[options.sequence_parallel]
    values = {item.name: getattr(options, item.name) for item in fields(Limits)} | {"sequence_parallel": split}
    # A flag that is not given is empty and sets no limit.
    return {name: among for name, among in values.items() if among}


def to_json(plan: Plan, tokens: float | None = None) -> dict[str, Any]:
    """Output of ``--json``, in SI units; docs/plan.md lists the keys. ``tokens`` are those of the training."""
    question, counts = plan.question, plan.counts
    near = plan.closest
    return {
        "question": {
            "model": asdict(question.shape),
            "cluster": question.cluster.name,
            "software": question.software.name,
            "launcher": question.launcher.name,
            "num_devices": question.num_devices,
            "global_batch": question.global_batch,
            "seq": question.seq,
            "dtype": dtype_of(question.precision),
            "has_default_dtype": question.has_default_dtype,
            "headroom": question.headroom,
            "limits": asdict(question.limits),
        },
        "counts": {**asdict(counts), "excluded": dict(counts.excluded)},
        "is_proved": plan.open_bound_s is None,
        "open_bound_s": plan.open_bound_s,
        "stopped": plan.stopped,
        "layouts": [
            {**step_to_json(step), "is_equivalent": row < plan.num_equivalent} for row, step in enumerate(plan.rows)
        ],
        "rivals": [
            {"kind": one.kind, "layout": _or_null(one.step), "more_s": one.more_s, "least_s": one.least_s}
            for one in plan.rivals
        ],
        "changes": [{"what": one.what, "speed": one.speed, "layout": _or_null(one.step)} for one in plan.changes],
        "training": None if tokens is None else _training_to_json(plan, tokens),
        "error_bar": plan.error_bar.to_json(),
        "advice": plan.advice,
        "closest": near
        and {
            **{name: getattr(near, name) for name in ("least_bytes", "missing_bytes", "sequence_bytes")},
            "ways_out": [{"what": what, "layout": step_to_json(step)} for what, step in near.ways_out],
        },
    }


def _training_to_json(plan: Plan, tokens: float) -> dict[str, float | None]:
    """How long a training takes with the first row, and its price."""
    days, dollars = (None, None) if plan.best is None else training_of(plan.rows[0], tokens)
    return {"tokens": tokens, "days": days, "dollars": dollars}


def _or_null(step: SimulatedStep | None) -> dict[str, Any] | None:
    return None if step is None else step_to_json(step)


_OF_RUN = (
    "tp", "pp", "dp", "loops", "replicate", "shard", "micro_batch", "num_microbatches", "sequence_parallel",
    "recompute", "recompute_layers", "layers_by_stage", "placement", "pipeline_order",
)  # fmt: skip
_OF_KNOBS = ("residency", "prefetch", "gradient_buffers", "receive_buffers")
_OF_STEP = ("tokens_per_s", "mfu", "hfu", "bubble_fraction", "dollars_per_billion_tokens")


def step_to_json(step: SimulatedStep) -> dict[str, Any]:
    """One layout with its predictions."""
    run, knobs, choice, prediction = step.run, step.knobs, step.knobs.choice, step.prediction
    return {
        **{name: getattr(run, name) for name in _OF_RUN},
        "token_slices": run.slices or None,
        "nodes": [[kind.name, number] for kind, number in step.cluster.kinds(run.num_devices)],
        **{name: getattr(choice, name) for name in ("family", "group_size", "keep")},
        **{name: getattr(knobs, name) for name in _OF_KNOBS},
        **{name: getattr(knobs.moves, name) for name in ("balance", "offload")},
        "activation_bytes": knobs.moves.budget_bytes,
        "device_budget": knobs.device_budget,
        **{name: getattr(step, name) for name in _OF_STEP},
        "step_time_s": prediction.step_time_s,
        "memory_bytes": prediction.memory.total_bytes,
        "causes_s": causes(step),
    }
