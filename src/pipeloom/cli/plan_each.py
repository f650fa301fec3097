"""``pipeloom plan`` for several programs or numbers of devices: the best layout of each, and the choice of a goal."""

import json
import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

from rich.table import Table

from pipeloom.cli.goals import Least, choice_lines, cost_cells, least_costs
from pipeloom.cli.layout_tables import layouts_table, legend
from pipeloom.cli.plan_files import write_layout
from pipeloom.cli.plan_json import limits_to_json, to_json
from pipeloom.cli.plan_layouts import settings_words
from pipeloom.cli.plan_options import Options
from pipeloom.cli.plan_request import Choice, Request
from pipeloom.cli.plan_text import print_command, unsearched_words
from pipeloom.errors import UserError
from pipeloom.planner.choice import SIMPLER
from pipeloom.planner.goals import Cost, Goal
from pipeloom.planner.plan import Plan, plan
from pipeloom.planner.question import Question
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.console import wide_console
from pipeloom.terminal.sections import WIDTH, Section, print_sections
from pipeloom.terminal.words import count
from pipeloom.workload.launchers import LAUNCHERS

_CUT = "*"
"""Behind the name of a row whose search was cut short."""


@dataclass(frozen=True)
class _Answer:
    """The answer for a program and a number of devices.

    Attributes:
        request: the question; or the reasons why there is none.
        plan: ``None`` without a question, or without a layout that divides devices and batch.
        refusal: the reasons.
    """

    choice: Choice
    request: Request | None
    plan: Plan | None = None
    refusal: Sequence[str] = ()

    @property
    def step(self) -> SimulatedStep | None:
        """The first row."""
        return self.plan.rows[0] if self.plan is not None and self.plan.best is not None else None

    @property
    def is_cut(self) -> bool:
        """Whether the search was cut short."""
        return self.plan is not None and self.plan.stopped is not None


@dataclass(frozen=True)
class _Offer:
    """A layout with the cost of the training."""

    answer: _Answer
    plan: Plan
    step: SimulatedStep
    seconds: float
    dollars: float | None
    device_hours: float


def run_each(options: Options, requests: Mapping[Choice, Request | UserError], words: list[str]) -> int:
    """Plan for each choice, print the best layout of each and what the goal chooses.

    A time limit is that of the whole answer: each question has an equal share of what is left.

    Returns:
        1 if nothing fits, or nothing meets the goal; 2 if no program can start the layout; 130 after Ctrl-C.
    """
    answers = _answers(options, requests)
    goal = next(one.goal for one in requests.values() if isinstance(one, Request))
    offers = _offers(answers)
    chosen = None if goal is None else goal.best(offers)
    if options.json:
        print(json.dumps(_to_json(answers, goal, chosen)))
    else:
        print_sections(_sections(answers, offers, goal))
    is_interrupted = any(one.plan is not None and one.plan.stopped == "interrupt" for one in answers)
    is_written = True
    if chosen is not None and chosen.answer.request is not None and not is_interrupted:
        is_written = write_layout(chosen.answer.request, chosen.step)
    elif not options.json and (options.out or options.export):
        why = "there is no layout to write"
        if is_interrupted:
            why = "the answer was interrupted, and what was not searched might be a better choice"
        print(f"\nnothing is written: {why}")
    if not options.json:
        _print_next(answers, chosen, words, is_written=options.out is not None or options.export is not None)
    if is_interrupted:
        return 130
    if not is_written:
        return 2
    return 0 if (chosen is not None if goal is not None else any(one.step for one in answers)) else 1


def _answers(options: Options, requests: Mapping[Choice, Request | UserError]) -> list[_Answer]:
    from pipeloom.cli.plan_progress import PlanProgress

    begin, left = time.monotonic(), sum(isinstance(one, Request) for one in requests.values())
    answers: list[_Answer] = []
    for choice, request in requests.items():
        if not isinstance(request, Request):
            answers.append(_Answer(choice, None, refusal=_reasons(request)))
            continue
        if any(one.plan is not None and one.plan.stopped == "interrupt" for one in answers):
            answers.append(_Answer(choice, request, refusal=["not searched, since the answer was interrupted"]))
            continue
        budget = options.budget_s and max(0.1, options.budget_s - (time.monotonic() - begin)) / left
        left -= 1
        try:
            with PlanProgress(is_shown=not options.json) as progress:
                # A table of one row for each question has no reasons.
                found = plan(request.question, options.best, budget_s=budget, explains=False, progress=progress.show)
        except UserError as error:
            answers.append(_Answer(choice, request, refusal=_reasons(error)))
            continue
        answers.append(_Answer(choice, request, found))
    return answers


def _reasons(error: UserError) -> Sequence[str]:
    return getattr(error, "problems", None) or [str(error)]


def _offers(answers: Sequence[_Answer]) -> list[_Offer]:
    """Layouts with their costs; none without the tokens of a training."""
    found = list[_Offer]()
    for one in answers:
        if one.plan is not None and one.step is not None and (cost := _cost(one)) is not None:
            found.append(_Offer(one, one.plan, one.step, cost.seconds, cost.dollars, cost.device_hours))
    return found


def _cost(one: _Answer) -> Cost | None:
    training = None if one.request is None else one.request.training
    return None if training is None or one.step is None else training.cost(one.step)


def _sections(answers: Sequence[_Answer], offers: Sequence[_Offer], goal: Goal | None) -> Iterator[Section]:
    """Row 1 of each answer, what is missing, and what the goal chooses."""
    found = [one for one in answers if one.step is not None]
    section = Section(f"Row 1 of the plan for each {_differences(answers)}", is_wide=True)
    if found:
        question = next(one.request.question for one in answers if one.request is not None)
        rows = _table(found, question, *_among(answers))
        first = f"Row 1 is the fastest layout by prediction, or a simpler one that takes at most {SIMPLER:.1%} longer"
        if any(one.is_cut for one in found):
            first += f"; with {_CUT}, of the layouts that were found before the search was cut short"
        section.parts += [rows, f"{first}. {legend(rows, question)}"]
    lacks = [f"{_name(one.choice)}: {words}" for one in answers if (words := _lack_words(one))]
    errors = [f"{' and '.join(titles)}: {sentence}" for sentence, titles in _errors(found).items()]
    section.parts.append([*lacks, *errors])
    training = next((one.request.training for one in answers if one.request is not None), None)
    if training is not None:
        cost = "device-hours" if all(one.dollars is None for one in offers) else "price"
        section.parts.append(f"days, {cost}: of {training.tokens:.4g} tokens, without a margin for the error")
    yield section
    if goal is not None and offers:
        lines = choice_lines(goal, offers, _offer_words, lambda offer: offer.plan.error_bar, _least_costs(answers))
        yield Section("Goal", parts=[lines])


def _lack_words(one: _Answer) -> str:
    """Why there is no layout, or what of the search is missing; empty for a complete answer."""
    if one.plan is None:
        return "; ".join(one.refusal)
    if not one.is_cut:
        return "" if one.step is not None else "nothing fits."
    words, least_s = unsearched_words(one.plan), one.plan.open_bound_s
    if one.step is None:
        return f"nothing that fits was found; {words}"
    if least_s is None:
        return words
    share = 1 - least_s / one.step.prediction.step_time_s
    # Rounded up, since it is a limit.
    return f"{words}, {f'up to {ceil(share * 1000) / 1000:.1%} less than' if share > 0 else 'no less than'} this row"


def _least_costs(answers: Sequence[_Answer]) -> list[Least]:
    """The least cost of a training with layouts that were not searched, of each search that was cut short."""
    return [
        least
        for one in answers
        if one.plan is not None and one.request is not None and one.request.training is not None
        for least in least_costs(one.plan, one.request.training, f" for {_name(one.choice)}")
    ]


def _offer_words(offer: _Offer) -> str:
    return f"{_name(offer.answer.choice)}, {settings_words(offer.step)}"


def _among(answers: Sequence[_Answer]) -> tuple[set[str], set[int]]:
    """Programs and numbers of devices."""
    return {one.choice.launcher for one in answers}, {one.choice.num_devices for one in answers}


def _differences(answers: Sequence[_Answer]) -> str:
    """What the questions differ in."""
    programs, sizes = _among(answers)
    parts = ["program"] if len(programs) > 1 else []
    return " and ".join([*parts, *(["number of devices"] if len(sizes) > 1 else [])])


def _name(choice: Choice) -> str:
    return f"{LAUNCHERS[choice.launcher].title} on {count(choice.num_devices, 'device')}"


def _errors(found: Sequence[_Answer]) -> dict[str, list[str]]:
    """The sentence on the error of step times -> titles of the programs for which it holds."""
    sentences: dict[str, list[str]] = {}
    for one in found:
        if one.plan is not None:
            titles = sentences.setdefault(one.plan.error_bar.sentences[0], [])
            if (title := LAUNCHERS[one.choice.launcher].title) not in titles:
                titles.append(title)
    return sentences


def _table(found: Sequence[_Answer], question: Question, programs: Collection[str], sizes: Collection[int]) -> Table:
    """The first rows of answers that have one, with what differs between all answers as their names."""
    has_programs, has_sizes = len(programs) > 1, len(sizes) > 1
    steps, more = dict[str, SimulatedStep](), dict[str, dict[str, str]]()
    for one in found:
        if one.step is None or one.plan is None:
            continue
        name = " ".join(
            [*([one.choice.launcher] if has_programs else []), *([f"{one.choice.num_devices:,}"] if has_sizes else [])]
        )
        cost = _cost(one)
        name += _CUT if one.is_cut else ""
        steps[name] = one.step
        more[name] = ({} if cost is None else cost_cells(cost)) | {"error": one.plan.error_bar.cell}
    first = ", ".join([*(["for"] if has_programs else []), *(["devices"] if has_sizes else [])])
    return layouts_table(first, steps, question, more)


def _print_next(answers: Sequence[_Answer], chosen: _Offer | None, words: Sequence[str], *, is_written: bool) -> None:
    if is_written or all(one.step is None for one in answers):
        return
    programs, sizes = _among(answers)
    if chosen is None:
        flags = [*(["--for"] if len(programs) > 1 else []), *(["--devices"] if len(sizes) > 1 else [])]
        wide_console(WIDTH).print(f"\nNext: a single {' and a single '.join(flags)} prints alternatives and reasons.")
        return
    choice = chosen.answer.choice
    more = {"--devices": str(choice.num_devices)} | ({"--for": choice.launcher} if len(programs) > 1 else {})
    own = [*_without(words, more), *chain.from_iterable(more.items())]
    print_command("\nNext: the choice with its alternatives and reasons.", own)


def _without(words: Sequence[str], flags: Container[str]) -> Iterator[str]:
    """A command line without some of its flags and their values."""
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word.split("=", 1)[0] in flags
        if not is_left_out:
            yield word


def _to_json(answers: Sequence[_Answer], goal: Goal | None, chosen: _Offer | None) -> dict[str, Any]:
    found = list[dict[str, Any]]()
    for one in answers:
        if one.plan is not None and one.request is not None:
            found.append(to_json(one.plan, one.request.training, goal))
        else:
            question = {"launcher": one.choice.launcher, "num_devices": one.choice.num_devices}
            found.append({"question": question, "refused": list(one.refusal)})
    if goal is None:
        return {"answers": found, "goal": None}
    best = None if chosen is None else answers.index(chosen.answer)
    is_proved = not goal.better(chosen, _least_costs(answers))
    return {"answers": found, "goal": {**limits_to_json(goal), "answer": best, "is_proved": is_proved}}
