"""Text output of ``pipeloom plan``."""

from collections.abc import Iterator, Sequence

from pipeloom.cli.goals import choice_lines, least_costs, training_words
from pipeloom.cli.layout_tables import best_table, kinds_of, legend
from pipeloom.cli.plan_layouts import (
    change_table,
    closest_words,
    layout_lines,
    rival_table,
    settings_words,
)
from pipeloom.cli.run_config import dtype_words
from pipeloom.planner.choice import SIMPLER
from pipeloom.planner.goals import Goal, Training
from pipeloom.planner.infeasible import MOST_DOUBLINGS
from pipeloom.planner.plan import Plan
from pipeloom.planner.question import Question
from pipeloom.planner.run_file import balance_of
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.console import wide_console
from pipeloom.terminal.sections import WIDTH, Section, print_sections
from pipeloom.terminal.words import and_list, count, parameters, quoted, seconds, short, unit_bytes, unit_s
from pipeloom.workload.launchers import Launcher


def print_plan(plan: Plan, training: Training | None = None, goal: Goal | None = None) -> None:
    """Print the answer, how long a training takes, and whether that is within a goal."""
    print_sections(plan_sections(plan, training, goal))


def plan_sections(plan: Plan, training: Training | None = None, goal: Goal | None = None) -> Iterator[Section]:
    """The answer, how long a training takes, and whether that is within a goal."""
    yield Section(parts=[*_question_lines(plan)])
    if plan.best is None:
        yield _nothing(plan)
        return
    yield _layouts(plan, training, goal)
    fastest = _row(plan, plan.best)
    if plan.rivals:
        name = unit_s(plan.best.prediction.step_time_s)[1]
        yield Section(
            f"Why row {fastest} is the fastest",
            f": the best layout of each other kind takes more {name}, by cause",
            [
                rival_table(plan.best, plan.rivals, fastest),
                "compute+tp: with tensor-parallel communication. p2p, dp: exposed communication of these axes.",
            ],
        )
    if plan.changes:
        yield Section("What would change the answer", parts=[change_table(plan.best, plan.changes, fastest)])
    on_speed = plan.error_bar.on_speed(plan.rows[0].tokens_per_s, plan.rows[0].mfu)
    step_times, *comparisons = plan.error_bar.sentences
    yield Section("Expected error", parts=[[step_times, *filter(None, [on_speed]), *comparisons]])
    if plan.advice:
        yield Section("Advice", parts=[plan.advice])
    if plan.stopped is not None and plan.open_bound_s is None:
        why = "Interrupted" if plan.stopped == "interrupt" else "The time was up"
        tried = "all strategies, other kinds and changes were tried"
        yield Section(why, f" before {tried}; the search for the best layout without a strategy was complete")


def _layouts(plan: Plan, training: Training | None, goal: Goal | None) -> Section:
    """The table of the best layouts, and what of the first row has no column."""
    unit, name = unit_bytes(plan.question.cluster.device.memory_bytes)
    # A cluster may have devices of several kinds.
    sizes = {kind.device.memory_bytes for kind, _ in kinds_of(plan.question)}
    room = " or ".join(short(size / unit) for size in sorted(sizes))
    title = f"The {count(len(plan.steps), 'best layout')}, the best one of each kind; a device has {room} {name}"
    section, rows = Section(title + _kept_free(plan.question), is_wide=True), best_table(plan)
    section.parts += [_on_order(plan), rows, legend(rows, plan.question), *layout_lines(plan.rows[0])]
    section.parts += _on_balance(plan)
    if training is not None:
        cost = training.cost(plan.rows[0])
        section.parts.append(training_words(training, plan.rows[0].run.global_batch, cost, "row 1"))
        if goal is not None:
            least = least_costs(plan, training)
            lines = choice_lines(goal, [cost], lambda _: "row 1", lambda _: plan.error_bar, least)
            section.parts.append(f"goal: {'. '.join(lines)}")
    return section


def _on_balance(plan: Plan) -> list[str]:
    """What keeps experts equal in row 1, where the order of its schedule decides it."""
    question, launcher = plan.question, plan.question.launcher
    balance = balance_of(plan.rows[0]) if question.balance in (None, "batch") else None
    if balance is None:
        return []
    how = "does not balance experts" if balance == "none" else "balances experts in each micro-batch"
    words = f"row 1 {how}, since backwards precede forwards; "
    if question.balance == "batch":
        return [words + f"model.balance batch is left out for {launcher.title}"]
    if launcher.is_own:
        return [words + "a run file with model.balance batch is planned with schedules that balance the whole batch"]
    # Other programs balance each micro-batch by default.
    return [words + "without a context axis it would"] if balance == "none" else []


def print_next(words: Sequence[str], launcher: Launcher, programs: Sequence[str]) -> None:
    """Print the command that writes a layout of the table.

    Args:
        words: behind ``pipeloom plan``, which printed the table.
        launcher: the program of the plan.
        programs: that can start the first row, by name.
    """
    if launcher.is_own:
        export = "--export start in place of --out planned writes start files for"
        text = (
            "\nNext: write row 1 as a run file and a schedule for `pipeloom train`. --row N takes another row"
            f"{f'; {export} {and_list(programs)}' if programs else ''}."
        )
        print_command(text, [*words, "--out", "planned"])
    elif programs:
        text = f"\nNext: write start files of {launcher.title} for row 1. --row N takes another row."
        print_command(text, [*words, "--export", "start"])


def print_command(text: str, words: Sequence[str]) -> None:
    """Print a sentence, and ``pipeloom plan`` with these words, in lines that can be pasted."""
    console = wide_console(WIDTH)
    console.print(text)
    parts = ["  pipeloom plan"]  # each flag with its values
    for word in words:
        if word.startswith("--"):
            parts.append("")
        parts[-1] += f" {quoted(word)}"
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > console.width - len(" \\"):
            lines.append("   ")
        lines[-1] += part
    # Each line ends in a backslash, so that the command can be pasted; the terminal wraps a word that is too long.
    console.print(" \\\n".join(lines), soft_wrap=True)


def _question_lines(plan: Plan) -> Iterator[str]:
    question, counts = plan.question, plan.counts
    shape = question.shape
    yield (
        f"{shape.name or 'model'}, {parameters(shape.parameters, shape.active_parameters)}, "
        f"{count(question.global_batch, 'sequence')} of {question.seq:,} tokens a step, "
        f"{dtype_words(question.precision, question.products, is_default=question.has_default_dtype)}; "
        f"{question.num_devices:,} x {_devices(question)} ({question.cluster.name}), trained by "
        f"{program_words(question)}"
    )
    proof = "; by prediction, none of these is among the best" if plan.best is not None else ""
    if plan.open_bound_s is not None:
        proof = f"; {unsearched_words(plan)}"
    pruned = {"slower": counts.too_slow, "too large": counts.too_large}
    excluded = ", ".join(f"{number:,} {why}" for why, number in pruned.items() if number)
    yield (
        f"{counts.layouts:,} layouts in {counts.seconds:.1f} s: {counts.simulated:,} simulated"
        f"{f'; excluded by lower bounds: {excluded}' if excluded else ''}{proof}"
    )
    if counts.tried:
        yield f"  {counts.tried} layouts were also tried with strategies (memory, token slices)"
    for cause, number in counts.excluded.most_common():
        yield f"  left out: {count(number, 'combination')} of axes, since {cause}"
    if unbalanced := sorted(question.unbalanced_families):
        yield (
            f"  left out: {count(len(unbalanced), 'schedule')}, such as {unbalanced[0]}, whose backwards do not wait "
            "for the balance of experts over the whole batch; without model.balance they are searched, and balance "
            "each micro-batch"
        )


def unsearched_words(plan: Plan) -> str:
    """Why the search was cut short, how many layouts were not searched, and the bound of their step times."""
    why = "interrupted" if plan.stopped == "interrupt" else "the time limit was reached"
    if plan.open_bound_s is None:
        return f"{why} before all strategies were tried; the search without them was complete"
    least, number = f"at least {seconds(plan.open_bound_s)} a step", plan.counts.undecided
    if not number:
        return f"{why}: every layout takes {least}"
    return f"{why}: {count(number, 'layout')} not searched, which take {least}"


def program_words(question: Question) -> str:
    """The program that starts the layouts, and whose speed they have."""
    if question.launcher.is_own:
        return question.software.name
    return f"{question.launcher.title} (only what it can run, at the measured speed of {question.software.name})"


def _kept_free(question: Question) -> str:
    return f", {question.headroom:.0%} of it kept free" if question.headroom else ""


def _row(plan: Plan, step: SimulatedStep | None) -> int:
    """Number of the row of a layout, from 1."""
    return [each is step for each in plan.rows].index(True) + 1


def _on_order(plan: Plan) -> str:
    """Which rows the predictions do not distinguish, and how the rows are sorted."""
    bar, ties, fastest, plain = plan.error_bar.tie, plan.num_equivalent, _row(plan, plan.best), plan.simplest
    if len(plan.steps) == 1:
        return f"By prediction; two layouts are compared with an error of {bar:.1%}."
    if ties == 1:
        return f"Row 1 is faster than every other row by more than the error of a comparison, {bar:.1%}."
    rows = "Rows 1 and 2" if ties == 2 else f"Rows 1 to {ties}"
    words = f"{rows} (~) are equivalent: within {bar:.1%}, the error of a comparison."
    if fastest > 1:
        words += f" By prediction row {fastest} is the fastest; row 1 is simpler and at most {SIMPLER:.1%} slower."
    begin = words if fastest > 1 else f"{words} Row 1 is the fastest by prediction."
    if plain is None or plain is plan.rows[0]:
        return begin if plan.has_simpler else f"{words} Row 1 is the simplest of them."
    more = plain.prediction.step_time_s / plan.steps[0].prediction.step_time_s - 1
    number = _row(plan, plain)
    return f"{begin} The simplest of these rows is row {number}, {more:.1%} slower by prediction."


def _devices(question: Question) -> str:
    """Names of the cluster's kinds of devices."""
    return " and ".join(dict.fromkeys(kind.device.name for kind, _ in kinds_of(question)))


def _nothing(plan: Plan) -> Section:
    """Why nothing fits, and what would."""
    near = plan.closest
    if near is None:
        if plan.open_bound_s is None:
            words = ("nothing fits", "; the search ended before it found a change that would help")
        elif plan.stopped == "interrupt":
            words = ("nothing that fits was found before the interrupt", "")
        else:
            more = ": raise --budget-s, or limit the search with flags such as --tp and --pp"
            words = ("nothing that fits was found in that time", more)
        return Section(*words, is_bad=True)
    section = Section("nothing fits", closest_words(plan, near), is_bad=True)
    if not near.ways_out and plan.stopped is not None:
        why = "interrupted" if plan.stopped == "interrupt" else "the time limit was reached"
        section.parts.append(f"{why} before more devices and shorter sequences were tried")
    elif not near.ways_out:
        section.parts.append(
            f"with {2**MOST_DOUBLINGS} times as many devices, or with shorter sequences, nothing fits either; choose a "
            "smaller model, or devices with more memory"
        )
    ways = [
        f"with {what} it fits: {seconds(step.prediction.step_time_s)} a step ({settings_words(step)})"
        for what, step in near.ways_out
    ]
    section.parts.append([*plan.advice, *ways])
    return section
