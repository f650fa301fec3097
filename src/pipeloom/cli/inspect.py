"""``pipeloom inspect``: what the ranks of a run do, and which one blocks it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Place
from pipeloom.errors import ConfigError, UserError, reason_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom inspect``.

    Reads what each rank noted last in the run folder, while the run hangs or after its processes have ended. Finds, by
    the dependencies of the schedule, what has all that it needs and has not ended: rank, slot, action, for how long.
    Ranks that compute much longer than the others come first, with a layout without them.
    """

    folder: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`."""


COMMAND = Command(name="inspect", options=Options, examples={"pipeloom inspect outputs/demo": "what blocks the run"})
_MOST_SHOWN = 3
_MOST_RANKS = 32
_SEARCH_S = 5.0
"""Seconds of the search for a layout without slow ranks, for each number of ranks."""


def run(words: list[str]) -> int:
    """Parse the arguments, and print what blocks the run, and where every rank is."""
    options, problems = read_flags(COMMAND, words)
    from pipeloom.runs.hang import read_hang
    from pipeloom.runs.hang_words import end_of, sentences_of, state_of
    from pipeloom.terminal.words import count, seconds

    state = or_note(lambda: read_hang(options.folder), problems)
    if problems or state is None:
        raise ConfigError(problems, SOURCE)
    _print_slow(options.folder)
    missing = sorted(set(range(state.ranks[0].size)) - {one.rank for one in state.ranks})
    step = max(one.step for one in state.ranks)
    if ended := end_of(options.folder, state):
        print(ended)
        return 0
    live = "" if state.is_live else "; its processes have ended"
    print(f"step {step}; no rank has begun or ended anything for {seconds(max(0.0, state.quiet_s))}{live}\n")
    for number, it in enumerate(state.found[:_MOST_SHOWN]):
        first, *others = sentences_of(it, state)
        print("\n  ".join([f"{'also ' if number else ''}{first}", *others]))
    if not state.found:
        print("every rank waits for another one; the files may be of different moments: inspect again")
    for one in state.ranks:
        if state.found and one.rank == state.found[0].rank and one.text and not one.has_ended:
            print(f"\nwhere the threads of rank {one.rank} were:", *one.text.splitlines(), sep="\n  ")
    print("\nevery rank:")
    for one in state.ranks[:_MOST_RANKS]:
        print(f"  rank {one.rank}, step {one.step}: {state_of(one, state)}")
    if len(state.ranks) > _MOST_RANKS:
        print(f"  and {count(len(state.ranks) - _MOST_RANKS, 'rank')} more")
    if missing:
        which = ", ".join(map(str, missing[:_MOST_RANKS]))
        print(f"  no file of rank {which}: on a host that does not see the folder, or on a full disk")
    return 0


def _print_slow(folder: Path) -> None:
    """Print slow ranks, and what the planner finds without them."""
    from pipeloom.config.file import read_run_file
    from pipeloom.planner.fewer_nodes import without_ranks
    from pipeloom.runs.run_folder import CONFIG
    from pipeloom.runs.slow_ranks import read_slow

    slow = read_slow(folder)
    if not slow:
        return
    print(*(f"slow: {one}" for one in slow), sep="\n")
    config, problems = read_run_file(folder / CONFIG)
    try:
        found = None if problems else without_ranks(config, len(slow), _SEARCH_S)
    except UserError as error:  # such as a model without formulas, or a dtype without predictions
        print(f"  the planner has no prediction of this run: {reason_of(error)}\n")
        return
    if found is None:
        print("  without it no layout of the planner has the same batch\n")
        return
    own_s, other_s = (step.prediction.step_time_s for step in found)
    run, times = found[1].run, max(one.times for one in slow)
    words = (
        f"without it the planner takes {run.axes.product()}, loops {run.loops}: {other_s / own_s:.2f} times the step"
    )
    print(f"  {words} of this layout; with it all ranks wait, up to {times:.2f} times the step\n")
