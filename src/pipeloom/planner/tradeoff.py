"""Cost and time of training across cluster sizes, by the model of arXiv 2211.05953.

A larger batch needs more samples for the same loss, ``1 + B / B_crit`` times those of a small one (arXiv 1812.06162,
section 2.2), and more devices need a larger batch or are utilized less. For each method and each batch per device, the
best layouts on a reference number of devices are searched. Each is scaled to every cluster size by its data axis, at
the same batch per device, and simulated there. Alternatively, every size is searched in full.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import inf
from typing import Any

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError
from pipeloom.planner.goals import Cost, Training
from pipeloom.planner.question import Question, layout_limits
from pipeloom.planner.search import Progress, search
from pipeloom.planner.wrong_plugins import without_wrong_plugins
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.words import unknown_name
from pipeloom.workload.model import ModelShape

BATCHES_PER_DEVICE = tuple(Fraction(2) ** power for power in range(-3, 4))
"""Sequences of a batch for each device, 1/8 to 8."""
DEVICE_COUNTS = tuple(64 * 4**power for power in range(5))
"""64 to 16,384 devices."""
ALTERNATIVES = 10
"""Layouts of the reference to scale, since the fastest there may not be the fastest on more devices."""


def method_limits(name: str, shape: ModelShape) -> dict[str, Any]:
    """Limits of a question that restrict it to a method, without strategies.

    Args:
        name: one of ``METHODS``.
        shape: the model; no pipeline has more ranks or loops than pieces.
    """
    several, plain = tuple(range(2, shape.layers + 3)), {"strategies": ("none",)}
    if name == DATA_PARALLEL:
        return {"pp": (1,), **plain}
    is_looped = name in ("breadth-first", "depth-first")
    return {"pp": several, "families": (name,), "loops": several if is_looped else (1,), **plain}


DATA_PARALLEL = "data-parallel"
METHODS = ("breadth-first", "depth-first", "1f1b", "gpipe", DATA_PARALLEL)
"""Looped pipelines with at least two loops, pipelines with one, and data parallelism without a pipeline (DP, FSDP)."""


def has_method(software: Software, method: str) -> bool:
    """Whether a program has the schedules of a method."""
    return method == DATA_PARALLEL or not software.families or method in software.families


def critical_batch_tokens(parameters: float) -> float:
    """Tokens of the critical batch at the loss that a model converges to: B* / L^(1 / 0.21).

    With B* = 2e8 tokens, and L = (8.8e13 / N)^0.076 for N parameters without embeddings (Kaplan et al., arXiv
    2001.08361, equations 1.1 and 1.4). It is a fit to models of up to 1.5 billion parameters on one text corpus.

    Args:
        parameters: N.
    """
    loss = (8.8e13 / parameters) ** 0.076
    return 2e8 / loss ** (1 / 0.21)


def default_critical_batch(shape: ModelShape, seq: int) -> float:
    """``critical_batch_tokens`` of a model, in sequences."""
    return critical_batch_tokens(shape.layers * shape.layer_matrix_parameters) / seq


def scaling_problems(reference: int, device_counts: Sequence[int], batches: Sequence[Fraction]) -> list[str]:
    """Problems of cluster sizes and batches per device."""
    found = []
    if reference < 1:
        return [f"the reference must be at least 1 device, found {reference}"]
    if not device_counts:
        found.append("there must be at least one number of devices")
    if not batches:
        found.append("there must be at least one batch per device")
    found += [
        f"numbers of devices must be multiples of the reference, {reference}, found {count}; change one of them"
        for count in device_counts
        if count < 1 or count % reference
    ]
    found += [
        f"a batch per device times the {reference} devices of the reference must be whole sequences, found "
        f"{float(batch):g} x {reference} = {float(batch * reference):g}"
        for batch in batches
        if batch <= 0 or (batch * reference).denominator != 1
    ]
    return found


def cluster_problems(cluster: Cluster) -> list[str]:
    """Problems of a cluster whose size is fixed."""
    if cluster.num_devices is None:
        return []
    size = f"{cluster.num_devices} devices in nodes of several kinds"
    return [f"the cluster '{cluster.name}' has {size}; a comparison of sizes takes a cluster with nodes of one kind"]


def whole_batches(reference: int, batches: Iterable[Fraction] = BATCHES_PER_DEVICE) -> tuple[Fraction, ...]:
    """The batches per device that are whole sequences on the reference."""
    return tuple(batch for batch in batches if (batch * reference).denominator == 1)


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """Input of a comparison of methods across cluster sizes.

    Attributes:
        question: of the reference; its batch is ignored, its limits hold for every method.
        training: token budget and critical batch; the price is that of the cluster, which may have none.
        methods: method of ``METHODS`` -> program.
        device_counts: cluster sizes, multiples of the reference's devices.
        batches_per_device: sequences; times the reference's devices a whole number.
        alternatives: layouts of the reference to scale, for each method and batch.
        searches_every_size: whether every cluster size is searched in full instead, which takes longer.
    """

    question: Question
    training: Training
    methods: Mapping[str, Software]
    device_counts: tuple[int, ...] = DEVICE_COUNTS
    batches_per_device: tuple[Fraction, ...] = BATCHES_PER_DEVICE
    alternatives: int = ALTERNATIVES
    searches_every_size: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: everything that is wrong.
        """
        problems = scaling_problems(self.question.num_devices, self.device_counts, self.batches_per_device)
        problems += cluster_problems(self.question.cluster)
        problems += method_problems(self.question, self.methods)
        if problems:
            raise ConfigError(problems, "the trade-off")

    def question_of(self, method: str) -> Question:
        """The reference's question restricted to a method."""
        return of_method(self.question, method, self.methods[method])


def of_method(question: Question, method: str, software: Software) -> Question:
    """A question restricted to a method and its program.

    Raises:
        ConfigError: the program does not run the method.
    """
    wanted = question.limits
    allowed = {
        name: values if (limit := getattr(wanted, name)) is None else tuple(set(values) & set(limit))
        for name, values in method_limits(method, question.shape).items()
    }
    return replace(question, software=software).limited(**allowed)


def method_problems(question: Question, methods: Mapping[str, Software]) -> list[str]:
    """Problems of methods and their programs."""
    if not methods:
        return [f"there must be at least one method of {', '.join(METHODS)}"]
    found: list[str] = []
    for method, software in methods.items():
        if method not in METHODS:
            found.append(unknown_name("method", method, METHODS))
            continue
        try:
            of_method(question, method, software)
        except ConfigError as error:
            found += [f"{method}: {problem}" for problem in error.problems]
    return found


@dataclass(frozen=True, kw_only=True)
class Point(Cost):
    """A method with a batch on a cluster, and what the training takes with it.

    Attributes:
        method: of ``METHODS``.
        step: its layout, as a plan for the method, this batch and this number of devices finds it.
        tokens: of the training with this batch.
        reference_mfu: MFU on the reference's devices with the same batch per device, which the paper uses for all
            sizes; ``None`` where nothing fits there.
    """

    method: str
    step: SimulatedStep
    tokens: float
    reference_mfu: float | None

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self.step.run.num_devices

    @property
    def batch_per_device(self) -> float:
        """In sequences."""
        return self.step.run.global_batch / self.num_devices


@dataclass(frozen=True)
class Curves:
    """Points of all methods, cluster sizes and batches.

    Attributes:
        inputs: of the comparison.
        points: those that fit.
        missing: (method, batch per device) without a layout that fits the reference.
        unproved: those whose searches the time limit cut short.
    """

    inputs: Tradeoff
    points: tuple[Point, ...]
    missing: tuple[tuple[str, Fraction], ...] = ()
    unproved: tuple[tuple[str, Fraction], ...] = ()

    def best(self, num_devices: int, method: str | None = None) -> Point | None:
        """The fastest point of a cluster, which is also its cheapest.

        Args:
            num_devices: of the cluster.
            method: to restrict it to; ``None`` for all.
        """
        among = [p for p in self.points if p.num_devices == num_devices and method in (None, p.method)]
        return min(among, key=lambda point: point.seconds, default=None)

    def curve(self, method: str) -> list[Point]:
        """A method's best point of each cluster, in the order of the clusters."""
        found = (self.best(count, method) for count in sorted(self.inputs.device_counts))
        return [point for point in found if point is not None]

    @property
    def front(self) -> list[Point]:
        """Pareto-optimal points by time and cost, the fastest first."""
        # All devices have the same price, which the cluster may not have.
        chosen = pareto_front([(point.seconds, point.device_hours) for point in self.points])
        return [self.points[number] for number in chosen]


def pareto_front(pairs: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the pairs that no other dominates (at most as large in both, smaller in one), by the first value.

    Of equal pairs the first one is on the front.
    """
    found: list[int] = []
    least = float("inf")
    # By the first value: a pair is on the front where its second value is below all before it.
    for number in sorted(range(len(pairs)), key=lambda number: (*pairs[number], number)):
        if pairs[number][1] < least:
            found.append(number)
            least = pairs[number][1]
    return found


def tradeoff(inputs: Tradeoff, progress: Progress | None = None, *, budget_s: float | None = None) -> Curves:
    """Points of all methods across cluster sizes.

    Args:
        inputs: of the comparison.
        progress: is called after every method and batch.
        budget_s: time limit in seconds, of which every method and batch has an equal share; ``None``: no limit.
    """
    points: list[Point] = []
    missing: list[tuple[str, Fraction]] = []
    unproved: list[tuple[str, Fraction]] = []
    work = [(method, batch) for method in inputs.methods for batch in inputs.batches_per_device]
    deadline = inf if budget_s is None else time.monotonic() + budget_s
    for number, (method, batch) in enumerate(work):
        question = replace(inputs.question_of(method), global_batch=int(batch * inputs.question.num_devices))
        searches = _Searches(_part(deadline, len(work) - number))
        # Half of the time: what is found here is scaled.
        steps = searches.best(question, 1 if inputs.searches_every_size else inputs.alternatives, parts=2)
        for place, count in enumerate(inputs.device_counts):
            larger, left = _with_more(question, count // question.num_devices), len(inputs.device_counts) - place
            if inputs.searches_every_size:
                among = searches.best(larger, parts=left)
            else:
                among = searches.scaled(larger, steps, left)
            if among:
                points.append(_point(inputs.training, method, among[0], steps[0].mfu if steps else None))
        if searches.are_cut:
            unproved.append((method, batch))
        elif not steps:
            missing.append((method, batch))
        if progress is not None:
            progress(number + 1, len(work))
    return Curves(inputs, tuple(points), tuple(missing), tuple(unproved))


def _part(deadline: float, parts: int) -> float:
    """When the first of equal parts of the time until a deadline ends."""
    now = time.monotonic()
    return now + (deadline - now) / parts


def _with_more(question: Question, factor: int) -> Question:
    return replace(question, num_devices=question.num_devices * factor, global_batch=question.global_batch * factor)


class _Searches:
    """Searches of a method and batch, until a deadline.

    Attributes:
        are_cut: whether one of them ended before it was complete.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline, self.are_cut = deadline, False

    def best(self, question: Question, count: int = 1, *, parts: int = 1) -> tuple[SimulatedStep, ...]:
        """The best layouts of a question that a part of the time that is left finds."""
        deadline = _part(self._deadline, parts)
        found = without_wrong_plugins(question, partial(search, count=count, deadline=deadline))
        self.are_cut |= found.open_bound_s is not None
        return found.steps

    def scaled(self, question: Question, steps: Sequence[SimulatedStep], parts: int) -> tuple[SimulatedStep, ...]:
        """The layouts with a larger data axis that uses all devices, the fastest first.

        Sharding and recomputation are searched again, since more replicas leave more memory and communicate more.
        """
        layouts = dict[tuple[Any, ...], dict[str, Any]]()
        for step in steps:
            same = layout_limits(step.run, step.knobs.choice.family)
            del same["dp"]  # the data axis grows
            layouts[tuple(same.values())] = same
        found = list[SimulatedStep]()
        for number, same in enumerate(layouts.values()):
            found += self.best(question.limited(**same), parts=parts * len(layouts) - number)
        return tuple(sorted(found, key=lambda step: step.prediction.step_time_s))


def _point(training: Training, method: str, step: SimulatedStep, reference_mfu: float | None) -> Point:
    cost, tokens = training.cost(step), training.needed_tokens(step.run.global_batch)
    return Point(
        seconds=cost.seconds,
        dollars=cost.dollars,
        device_hours=cost.device_hours,
        method=method,
        step=step,
        tokens=tokens,
        reference_mfu=reference_mfu,
    )
