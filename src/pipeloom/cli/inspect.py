"""``pipeloom inspect``: what the ranks of a run do, and why it stands still."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Place
from pipeloom.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom inspect``.

    Reads what each rank noted last in the run folder, while the run hangs or after its processes have ended. Finds, by
    the dependencies of the schedule, what has all that it needs and has not ended: rank, slot, action, for how long.
    """

    folder: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`."""


COMMAND = Command(
    name="inspect", options=Options, examples={"pipeloom inspect outputs/demo": "what the run stands still for"}
)
_MOST_SHOWN = 3
_MOST_RANKS = 32


def run(words: list[str]) -> int:
    """Parse the arguments, and print what stands still, and where every rank is."""
    options, problems = read_flags(COMMAND, words)
    from pipeloom.runs.standstill import read_standstill
    from pipeloom.runs.standstill_words import sentences_of, state_of
    from pipeloom.terminal.words import count, seconds

    state = or_note(lambda: read_standstill(options.folder), problems)
    if problems or state is None:
        raise ConfigError(problems, SOURCE)
    missing = sorted(set(range(state.ranks[0].size)) - {one.rank for one in state.ranks})
    step = max(one.step for one in state.ranks)
    if all(one.has_ended and not one.has_failed for one in state.ranks):
        print(f"the run has ended in order, after step {step}")
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
        print(f"  no file of rank {', '.join(map(str, missing[:_MOST_RANKS]))}: on a host that does not see the folder")
    return 0
