"""Random questions to the planner, and what must hold of every answer."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from pipeloom.catalog import load_cluster, load_model, names
from pipeloom.cost.what_if import changed, without_effect
from pipeloom.errors import UserError
from pipeloom.planner.advice import on_devices
from pipeloom.planner.plan import Plan, make_question, plan
from pipeloom.planner.question import Question
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.step import SimulatedStep

BUDGETS_S = (0.3, 1.0, 3.0)
EQUAL = 1e-9
LAYOUTS = 3
"""Of each answer."""


@dataclass(frozen=True)
class Case:
    """A random question.

    Attributes:
        model, cluster: names of the catalog.
        devices: world size.
        batch: sequences.
        seq: tokens.
        headroom: fraction of the memory.
        budget_s: seconds of the answer.
    """

    model: str
    cluster: str
    devices: int
    batch: int
    seq: int
    headroom: float
    budget_s: float

    @property
    def question(self) -> Question:
        """For the planner."""
        return make_question(
            self.model,
            self.cluster,
            num_devices=self.devices,
            global_batch=self.batch,
            seq=self.seq,
            headroom=self.headroom,
        )


def random_case(seed: int, budgets_s: tuple[float, ...] = BUDGETS_S) -> Case:
    """Two of three draws are of sizes that people train with; the others are any sizes."""
    draw = random.Random(seed)
    model, cluster = draw.choice(names("models")), draw.choice(names("clusters"))
    is_usual = draw.random() < 2 / 3
    room = load_cluster(cluster).device.memory_bytes
    least = max(1, round(20 * load_model(model, 2048).parameters / room)) if is_usual else 1

    def size(least: int, most: int) -> int:
        value = int(least * (most / least) ** draw.random())
        if draw.random() < 0.15 and not is_usual:
            return value
        power = 1 << max(0, value.bit_length() - 1)
        return min(most, max(1, draw.choice((power, power, power, power * 3 // 2))))

    devices = size(least, min(1_000_000, 64 * least) if is_usual else 1_000_000)
    return Case(
        model=model,
        cluster=cluster,
        devices=devices,
        batch=size(max(1, devices // 2), 8 * devices) if is_usual else size(1, 65_536),
        seq=size(1024, 16_384) if is_usual else size(128, 131_072),
        headroom=draw.choice((0.0, 0.08, 0.2)),
        budget_s=draw.choice(budgets_s),
    )


@dataclass
class Outcome:
    """What a question led to: a refusal in words, or an answer; and what is wrong with it."""

    refusal: str | None
    answer: Plan | None
    seconds: float
    problems: list[str]

    @property
    def kind(self) -> str:
        """In a word or two."""
        if self.answer is None:
            return "refused"
        if self.answer.best is None:
            return "without a layout that fits"
        return "proved" if self.answer.open_bound_s is None else "stopped by the time limit"


def ask(case: Case) -> Outcome:
    """The answer to a question within its budget."""
    start, refusal, answer = time.monotonic(), None, None
    try:
        answer = plan(case.question, LAYOUTS, budget_s=case.budget_s)
    except UserError as error:
        refusal = str(error)
    took_s = time.monotonic() - start
    steps = () if answer is None else answer.steps
    problems = [problem for step in steps for problem in _step_problems(case, step)]
    return Outcome(refusal, answer, took_s, problems)


def _step_problems(case: Case, step: SimulatedStep) -> Iterator[str]:
    """What is wrong with a layout of an answer."""
    needs, has = step.prediction.memory.total_bytes, step.prediction.device_bytes[step.prediction.fullest_rank]
    if needs > has * (1 - case.headroom) * (1 + EQUAL):
        yield f"{step} needs {needs:.4g} bytes of {has * (1 - case.headroom):.4g}"
    if step.run.num_devices != case.devices or step.run.global_batch != case.batch:
        yield f"{step} has {step.run.num_devices} devices and a batch of {step.run.global_batch}"
    if step.cluster == case.question.cluster:
        run = run_config(step, case.model, case.cluster, "pipeloom")
        again_s = predict_step(run, by_seconds=True).prediction.step_time_s
        if abs(again_s / step.prediction.step_time_s - 1) > EQUAL:
            yield f"{step} is written as a run whose step takes {again_s:.6g} s, not {step.prediction.step_time_s:.6g}"


MORE = {"memory": "1.25x", "inter_bandwidth": "2x", "intra_bandwidth": "2x"}
"""Change of a cluster with which every layout is as fast or faster."""


def slowdowns_with_more(case: Case, answer: Plan) -> dict[str, float]:
    """By how much each change of ``MORE`` makes a proved answer slower, as a fraction; 0 or less where it does not.

    Recomputed layers are partitioned anew, and strategies tried, on the best few layouts only, so that small fractions
    above 0 occur.
    """
    found = dict[str, float]()
    if answer.best is None or answer.open_bound_s is not None:
        return found
    question, before_s = case.question, answer.best.prediction.step_time_s
    for name, factor in MORE.items():
        if without_effect(question.cluster, {name: factor}, case.devices):
            continue
        larger = plan(replace(question, cluster=changed(question.cluster, {name: factor})), LAYOUTS, explains=False)
        found[f"{factor} {name}"] = (inf if larger.best is None else larger.best.prediction.step_time_s / before_s) - 1
    return found


def slower_with_more_devices(case: Case, answer: Plan) -> str | None:
    """That twice the devices are slower and the plan does not state it; ``None`` if all is well.

    A layout uses all devices, so that more of them may be slower; then the plan's advice has to name the fewer ones.
    """
    if answer.best is None or answer.open_bound_s is not None:
        return None
    try:
        larger = plan(replace(case.question, num_devices=2 * case.devices), LAYOUTS, explains=False)
    except UserError:  # no layout divides them, and the message names the numbers that have one
        return None
    before_s = answer.best.prediction.step_time_s
    if larger.best is None or larger.best.prediction.step_time_s <= before_s * (1 + EQUAL):
        return None
    if any(on_devices(larger.question, larger.best, inf)):
        return None
    more = larger.best.prediction.step_time_s / before_s - 1
    return f"{2 * case.devices} devices are slower by {more:.1%}, and the advice does not state it"
