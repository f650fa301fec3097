"""The questions of ``pipeloom plan``: one for each program and number of devices that the command line names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cli.flags import SOURCE, Words, or_note
from pipeloom.cli.goals import goal_of, priced, tokens_of
from pipeloom.cli.plan_idle import idle_limits
from pipeloom.cli.plan_options import Options
from pipeloom.cli.run_config import source_of
from pipeloom.config import RunConfig, ScheduleConfig, in_order, with_pretrained
from pipeloom.config.any_layout import problems_in_any_layout
from pipeloom.config.file import open_run_file
from pipeloom.config.layout_problems import narrow_problems
from pipeloom.cost.hardware import Cluster
from pipeloom.errors import ConfigError
from pipeloom.planner.goals import Goal, Training
from pipeloom.planner.launch import Wanted, launch_problems
from pipeloom.planner.left_out import unpriced
from pipeloom.planner.plan import make_question, of_training
from pipeloom.planner.question import Limits, Question, limit_problems
from pipeloom.planner.run_file import named_model
from pipeloom.planner.strategies import with_strategies
from pipeloom.predict.describe import (
    asked_precision,
    changed_cluster,
    load_or_note,
    own_program_problems,
    with_model_sizes,
)
from pipeloom.runs.run_folder import SCHEDULE
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.dtypes import Dtype, MatmulDtype, Precision, dtype_of, products_of
from pipeloom.workload.launchers import LAUNCHERS, LauncherName
from pipeloom.workload.model import ModelConfig, ModelShape, shape_of

RUN_FILE = "run.toml"


@dataclass(frozen=True)
class Choice:
    """What is chosen before a layout: the program and the number of devices."""

    launcher: LauncherName
    num_devices: int


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
        training: the tokens, if they were given.
        goal: of the training, if one was given.
    """

    options: Options
    question: Question
    model: str | None
    cluster: str
    software: str
    config: RunConfig | None
    what_if: Mapping[str, str]
    training: Training | None
    goal: Goal | None

    def left_out(self, run: RunConfig) -> str | None:
        """A sentence on what the run of a layout lacks of this question; ``None`` if it has all."""
        code = self.question.boundary
        if code is None or run.layout.boundary is not None:
            return None
        return f"layout.boundary {code} is left out: this layout has no messages between pipeline ranks"


@dataclass(frozen=True)
class _Inputs:
    """What all questions of a command line share; ``None`` for what is missing or wrong.

    Attributes:
        options: of the command.
        source: of problems, in messages.
        config: of the run file.
        model: name or file; ``None`` also if a run file gives its sizes.
        shape: of the model.
        cluster_name: name or file.
        cluster: as it is in the catalog or the file.
        what_if: its changes.
        seq: sequence length in tokens.
        training: the tokens.
        goal: of the training.
    """

    options: Options
    source: str
    config: RunConfig | None
    model: str | None
    shape: ModelShape | None
    cluster_name: str
    cluster: Cluster | None
    what_if: Mapping[str, str]
    seq: int | None
    training: Training | None
    goal: Goal | None

    @property
    def dtype(self) -> Dtype | None:
        """Of weights and activations; ``None`` for the default of the devices."""
        return self.options.dtype or (self.config.training.dtype if self.config is not None else None)

    @cached_property
    def settings(self) -> ModelConfig | ModelShape:
        """The settings of the model, of which other programs do not run all."""
        if self.model is not None:
            return named_model(self.model, self.seq or 1)
        assert self.shape is not None, "without a model there is nothing to check"
        return self.shape if self.config is None else self.config.resolved_model

    @property
    def matmul_dtype(self) -> MatmulDtype | None:
        """Of the operands of linear layers; ``None`` for ``dtype``."""
        return self.options.matmul_dtype or (self.config.training.matmul_dtype if self.config is not None else None)

    @property
    def boundary(self) -> Boundary | None:
        """Code of messages between stages; ``None``: they travel as they are."""
        return self.options.boundary or (self.config.layout.boundary if self.config is not None else None)

    @property
    def choices(self) -> list[Choice]:
        """Programs and numbers of devices to plan for, ascending."""
        config = self.config
        launchers = list(LAUNCHERS) if self.options.launcher == "any" else [self.options.launcher or "pipeloom"]
        sizes = sorted(set(self.options.devices)) or [config.layout.num_ranks if config is not None else 1]
        return [Choice(launcher, size) for size in sizes for launcher in launchers]


def requests_of(options: Options, found: Words, words: list[str]) -> dict[Choice, Request | ConfigError]:
    """The request for each program and number of devices; where one is impossible, the error with the reasons.

    Raises:
        ConfigError: none is possible; has everything that is missing or wrong.
    """
    inputs = _inputs(options, found, words)
    choices = inputs.choices
    found.problems += _flag_problems(options, len(choices), inputs)
    requests: dict[Choice, Request | ConfigError] = {}
    for choice in choices:
        try:
            requests[choice] = _request(inputs, choice, list(found.problems))
        except ConfigError as error:
            requests[choice] = error
    errors = [one for one in requests.values() if isinstance(one, ConfigError)]
    if len(errors) == len(requests):
        problems = list(dict.fromkeys(problem for one in errors for problem in one.problems))
        raise errors[0] if len(errors) == 1 else ConfigError(problems, inputs.source)
    questions = [one.question for one in requests.values() if isinstance(one, Request)]
    if idle := list(idle_limits(options, found.values, questions)):
        raise ConfigError(idle, inputs.source)
    return requests


def _flag_problems(options: Options, answers: int, inputs: _Inputs) -> Iterator[str]:
    """Flags that do not go together."""
    if options.out is not None and options.out.suffix == ".toml":
        yield f"--out takes a folder, to which {RUN_FILE} and {SCHEDULE} go, found {options.out}"
    if options.row > 1 and options.out is options.export is options.html:
        yield f"--row {options.row} has no effect without --out, --export or --html; give one of them or leave it out"
    if options.row > options.best:
        yield f"--row must be at most --best {options.best}, found {options.row}"
    yield from program_problems(options.launcher, options.software)
    if options.has_goal and options.tokens is None:
        yield "--deadline, --max-dollars and --objective need the tokens of the training, such as --tokens 1T"
    if answers > 1:
        yield from _problems_of_several(options, answers, has_goal=inputs.goal is not None)


def program_problems(launcher: str | None, software: object) -> Iterator[str]:
    """That both flags name the program; ``software`` is false where it is not given."""
    if launcher is not None and software:
        yield f"--for {launcher} and --software both name the program; leave one of them out"


def _problems_of_several(options: Options, answers: int, *, has_goal: bool) -> Iterator[str]:
    """Flags that need one program and one number of devices."""
    for flag, value in {"--out": options.out, "--export": options.export}.items():
        if value is not None and not has_goal:
            yield (
                f"{flag} writes the layout of one program on one number of devices, found {answers} of these; name "
                "one, or let a goal choose (--deadline, --max-dollars or --objective)"
            )
    if options.html is not None:
        yield f"--html shows the answer for one program and number of devices, found {answers} of these; name one"
    if options.row > 1:
        yield f"--row {options.row} is a row of one table, found {answers} programs and numbers of devices; name one"


def _inputs(options: Options, found: Words, words: list[str]) -> _Inputs:
    """Read the run file and the catalog; what is wrong is added to the problems."""
    problems, path = found.problems, options.config
    tokens, goal = tokens_of(options.tokens, problems), goal_of(options, problems)
    config = None if path is None else or_note(lambda: _read(path, options, problems), problems)
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("model", "cluster", "devices", "global_batch", "seq")
        if not getattr(options, name) and name not in found.wrong  # a wrong value is a problem already
    ]
    if missing and path is None:
        problems.append(f"expected a run file, or {', '.join(missing)} as well")
    machine = config.machine if config is not None else None
    model = options.model or (_model_name(config) if config is not None else None)
    cluster = options.cluster or (machine.cluster if machine is not None else "")
    seq = options.seq or (config.data.seq_len if config is not None else None)
    shape = load_or_note(lambda name: load_model(name, seq), model, problems) if model else None
    if shape is None and config is not None and model is None and not problems:
        shape = shape_of(config.resolved_model)
    return _Inputs(
        options=options,
        source=SOURCE if path is None or config is None else source_of(path, words),
        config=config,
        model=model,
        shape=shape,
        cluster_name=cluster,
        cluster=load_or_note(load_cluster, cluster, problems) if cluster else None,
        what_if={**({} if machine is None else machine.what_if), **options.what_if},
        seq=seq,
        training=None if tokens is None else or_note(lambda: Training(tokens=tokens), problems),
        goal=goal,
    )


def _request(inputs: _Inputs, choice: Choice, problems: list[str]) -> Request:
    """The question for a program and a number of devices.

    Raises:
        ConfigError: these problems, and those of the question.
    """
    options, config, launcher = inputs.options, inputs.config, LAUNCHERS[choice.launcher]
    machine = config.machine if config is not None else None
    own = launcher.software if machine is None or options.launcher is not None else machine.software
    software_name = options.software or own
    software = load_or_note(load_software, software_name, problems)
    shape, cluster = inputs.shape, inputs.cluster
    # What an export leaves out is another list, with other reasons.
    if config is not None and software is not None and launcher.is_own:
        problems += own_program_problems(replace(config, schedule=ScheduleConfig()), software)
    if cluster is not None:
        cluster = changed_cluster(cluster, inputs.what_if, choice.num_devices, problems)
        cluster = priced(cluster, choice.num_devices, options, inputs.goal, problems)
    if shape is not None and cluster is not None:
        precision = asked_precision(inputs.dtype, cluster, choice.num_devices)
        problems += [] if config is None else _dtype_problems(config, precision)
        wanted = _wanted(inputs, shape if launcher.is_own else inputs.settings, precision)
        problems += launch_problems(launcher, wanted, cluster, choice.num_devices)
    limits = _limits(options)
    if problems or shape is None or cluster is None or software is None:
        if software is not None:
            problems += limit_problems(Limits(**limits), with_strategies(software), launcher)
        # A run file and its model may have the same problem.
        raise ConfigError(list(dict.fromkeys(problems)), inputs.source)
    question = make_question(
        shape,
        cluster,
        num_devices=choice.num_devices,
        global_batch=_first(options.global_batch, config and config.layout.batch_size),
        seq=_first(inputs.seq),
        software=software if launcher.is_own else None,
        launcher=launcher.name,
        dtype=inputs.dtype,
        matmul_dtype=inputs.matmul_dtype,
        attention=options.attention or (machine.attention if machine is not None else "flash2"),
        fused_norm=_first(options.fused_norm, machine.fused_norm if machine is not None else True),
        headroom=options.headroom,
        boundary=inputs.boundary,
        **limits,
    )
    if config is not None:
        question = of_training(question, config)
    return Request(
        options,
        replace(question, order_tries=options.search_orders),
        inputs.model,
        inputs.cluster_name,
        software_name,
        config,
        inputs.what_if,
        inputs.training,
        inputs.goal,
    )


def _dtype_problems(config: RunConfig, precision: Precision) -> Iterator[str]:
    """What the run's updates do not do with the planned type of weights."""
    training = replace(config.training, dtype=dtype_of(precision))
    return narrow_problems(replace(config, training=training, schedule=ScheduleConfig()))


def _wanted(inputs: _Inputs, model: ModelConfig | ModelShape, precision: Precision) -> Wanted:
    """What a program has to run, by the flags and the run file."""
    options, config = inputs.options, inputs.config
    wanted = Wanted(
        model,
        inputs.seq or 1,
        precision,
        products_of(inputs.matmul_dtype),
        options.attention or ("flash2" if config is None else config.machine.attention),
        boundary=inputs.boundary,
    )
    return wanted if config is None else wanted.by(config)


def _first(*values: Any) -> Any:
    """The first value that is not ``None``."""
    return next(value for value in values if value is not None)


def _read(path: Path, options: Options, problems: list[str]) -> RunConfig:
    """Read the run file, with the sequence length of the question, on which the sizes of some models depend."""
    config, found, given = open_run_file(path)
    if options.model is not None:  # in place of the file's, which is not judged
        config, given = replace(config, model=ModelConfig()), frozenset[str]()
    if options.seq is not None:
        config = replace(config, data=replace(config.data, seq_len=options.seq))
    config, unknown = with_model_sizes(with_pretrained(config), given)
    # Without a type of its own the run has the planned one, which is judged where it is known.
    training = replace(config.training, dtype=options.dtype or config.training.dtype or "bfloat16")
    training = replace(training, matmul_dtype=options.matmul_dtype or training.matmul_dtype)
    refused = unpriced(config)
    # Where unequal numbers of micro-batches are refused, what divides them anew needs no sentence of its own.
    divides = "layout.microbatches" in refused
    training = replace(training, divide_every=None if divides else training.divide_every)
    values = problems_in_any_layout(replace(config, training=training), is_model_known=not unknown)
    values += refused.values()
    problems += in_order([*found, *unknown, *values])
    return config


def _model_name(config: RunConfig) -> str | None:
    return config.model.preset or (str(config.model.file) if config.model.file is not None else None)


def _limits(options: Options) -> dict[str, tuple[Any, ...]]:
    switches = {"any": (), "on": (True,), "off": (False,)}
    values = {item.name: getattr(options, item.name) for item in fields(Limits)}
    values = {name: switches[among] if isinstance(among, str) else among for name, among in values.items()}
    # A flag that is not given is empty and sets no limit.
    return {name: among for name, among in values.items() if among}
