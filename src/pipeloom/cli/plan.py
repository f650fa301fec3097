"""``pipeloom plan``: which layout to use, and why."""

import json

from pipeloom.cli.flags import read_words
from pipeloom.cli.idle import idle_problems
from pipeloom.cli.plan_files import starting_programs, write_layout, write_page
from pipeloom.cli.plan_json import to_json
from pipeloom.cli.plan_options import Options
from pipeloom.cli.plan_request import Request, requests_of
from pipeloom.cli.reference import Command
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.plan import plan
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.garbage import few_collections

COMMAND = Command(
    name="plan",
    options=Options,
    examples={
        "pipeloom plan --model llama-3-8b --cluster dgx-h100 --devices 64 --global-batch 512 --seq 8192": "",
        "pipeloom plan run.toml --pp 4 8 --families breadth-first 1f1b --out planned": "a run file, fewer layouts",
    },
    retired={"--precision": "use --dtype float32, bfloat16 or float16", "--ways": "use --strategies"},
)


def run(words: list[str]) -> int:
    """Parse the arguments, plan, print the answer.

    Returns 1 if nothing fits or the goal is not met, 130 after Ctrl-C.
    """
    with few_collections():
        return _run(words)


def _run(words: list[str]) -> int:
    found = read_words(COMMAND, words)
    found.problems += idle_problems(COMMAND, words)
    options = Options(**found.values)
    requests = requests_of(options, found, words)
    only = next(iter(requests.values()))
    if len(requests) > 1 or isinstance(only, ConfigError):
        from pipeloom.cli.plan_each import run_each

        return run_each(options, requests, words)
    return _run_one(options, only, words)


def _run_one(options: Options, request: Request, words: list[str]) -> int:
    from pipeloom.cli.plan_progress import PlanProgress
    from pipeloom.cli.plan_text import print_next, print_plan

    # A program that reads JSON has no use for a bar.
    with PlanProgress(is_shown=not options.json) as progress:
        answer = plan(
            request.question,
            options.best,
            budget_s=options.budget_s,
            explains=options.explain,
            progress=progress.show,
            found=progress.found,
        )
    if options.json:
        print(json.dumps(to_json(answer, request.training, request.goal)))
    else:
        print_plan(answer, request.training, request.goal)
    if options.row > len(answer.steps) > 0:
        raise UserError(f"--row must be at most {len(answer.steps)}, the rows of the table, found {options.row}")
    if options.html is not None:
        write_page(request, answer, options.html)
        if not options.json:
            print(f"\npage: {options.html}")
    is_met = answer.best is not None and _meets_goal(request, answer.rows[options.row - 1])
    is_written = True
    if is_met:
        is_written = write_layout(request, answer.rows[options.row - 1])
    elif not options.json and (options.out or options.export):
        why = "there is no layout to write" if answer.best is None else "the layout does not meet the goal"
        print(f"\nnothing is written: {why}")
    if answer.best is not None and not options.json and options.out is None and options.export is None:
        print_next(words, request.question.launcher, starting_programs(request, answer.rows[0]))
    if answer.stopped == "interrupt":
        # The shells' status of an interrupted command: a script must not take part of an answer for all of it.
        return 130
    return (0 if is_written else 2) if is_met else 1


def _meets_goal(request: Request, step: SimulatedStep) -> bool:
    """Whether a training with this step is within the goal, if there is one."""
    goal, training = request.goal, request.training
    return goal is None or training is None or goal.is_met(training.cost(step))
