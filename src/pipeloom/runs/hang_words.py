"""What blocks a run, in words."""

from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints, step_of
from pipeloom.errors import PipeloomError
from pipeloom.runs.action_log import ENDED, GONE, LoggedRank
from pipeloom.runs.hang import Blocker, Hang, read_hang
from pipeloom.runs.run_folder import ACTIONS, INTERRUPTION
from pipeloom.schedule import Action
from pipeloom.system.files import read_text
from pipeloom.terminal.words import seconds

_BETWEEN = "between two actions"


def place_of(it: Blocker, state: Hang) -> str:
    """Where something hangs, such as ``rank 2, slot 14 of 96 of training, 1B7 (backward)``."""
    place = f"rank {it.rank}"
    if it.slot is not None and it.row in state.schedules:
        schedule = state.schedules[it.row]
        owner = next(one for one in state.ranks if one.rank == it.rank)
        count = len(schedule.rows[owner.place.pipeline])
        if not it.what:
            return f"{place}, behind the {count} actions of {it.row}"
        return f"{place}, slot {it.slot} of {count} of {it.row}, {it.what} ({Action.parse(it.what).kind.words})"
    return f"{place}, {it.what}" if it.what else f"{place}, {_BETWEEN}"


def sentences_of(it: Blocker, state: Hang) -> list[str]:
    """What blocks the run, for how long, with whom, and what became of its process."""
    for_s = f"{seconds(max(0, state.now_ns - it.since_ns) * 1e-9)}"
    place = place_of(it, state)
    if it.has_begun:
        found = [f"{place}: has all that it needs, and has not ended for {for_s}"]
    elif it.what:
        found = [f"{place}: has all that it needs, and has not begun; the rank did nothing for {for_s}"]
    else:
        found = [f"{place}: the rank did nothing for {for_s}"]
    if len(it.ranks) > 1:
        together = ", ".join(map(str, it.ranks))
        found.append(
            f"ranks {together} have all begun it: the connection between them, or any of them, may be the reason"
        )
    owner = next(one for one in state.ranks if one.rank == it.rank)
    if owner.has_failed:
        found.append(f"process {owner.pid} ended with {owner.text.splitlines()[0]}")
    elif it.process != "runs":
        how = " (SIGSTOP, or a debugger); SIGCONT continues it" if it.process == "is stopped" else ""
        more = ", without a note of its end: it was killed" if it.process == GONE else ""
        if it.process == ENDED:
            more = f", since {'another rank' if state.failed.rank is None else f'rank {state.failed.rank}'} had failed"
        found.append(f"process {owner.pid} on host {owner.host} {it.process}{how}{more}")
    return found


def state_of(rank: LoggedRank, state: Hang) -> str:
    """What a rank does, in a line."""
    if rank.has_ended:
        return f"ended with {rank.text.splitlines()[0]}" if rank.has_failed else "ended in order"
    waits_for = state.waits.get(rank.rank)
    if waits_for is not None:
        return f"waits for {waits_for}" if waits_for else "waits"
    own = [it for it in state.found if it.rank == rank.rank]
    if not own:
        return "nothing noted"
    place = place_of(own[0], state).split(", ", 1)[1]
    return place if place == _BETWEEN else f"at {place}"


def end_of(run: Path, state: Hang) -> str:
    """How a run ended whose ranks have all ended in order; empty for others."""
    if not all(one.has_ended and (one.is_interrupted or not one.has_failed) for one in state.ranks):
        return ""
    step = max(one.step for one in state.ranks)
    of_rank = next((one.text for one in state.ranks if one.is_interrupted), "")
    ended = f"the run has ended in order, after step {step}"
    if not of_rank:
        return ended
    # The process that started the ranks got the signal and sent them another one.
    file = run / ACTIONS / INTERRUPTION
    why = (read_text(file) if file.is_file() else of_rank).strip()
    saved = [step_of(one) for one in list_checkpoints(run)[-1:]]
    if saved == [step]:
        return f"{ended}, with a checkpoint: {why}"
    return f"{ended}: {why}; " + (f"the last checkpoint is of step {saved[0]}" if saved else "there is no checkpoint")


def blocked_by(run: Path) -> str:
    """What blocked a run that failed, in a line; empty where that was not noted."""
    try:
        state = read_hang(run)
    except PipeloomError:
        return ""
    # Of ranks that another one's failure ended, none is the reason.
    is_known = bool(state.found) and state.failed.rank in (None, state.found[0].rank)
    return "\n  ".join(sentences_of(state.found[0], state)) if is_known else ""
