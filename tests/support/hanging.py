"""Runs that hang at a known place, and whether the answer names it.

A hang is put into one rank of a run before its processes fork: it writes where it is to a file, and sleeps.
"""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from forked import Forked
from small_run import write_text
from torch.distributed.checkpoint import FileSystemWriter

from pipeloom.errors import UserError
from pipeloom.execute.communication.collectives import BlockingGroup
from pipeloom.execute.communication.shared_groups import SharedGroup
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.messages import Messages
from pipeloom.runs.action_log import ENDED, GONE
from pipeloom.runs.hang import read_hang
from pipeloom.schedule.kinds import SEND_KINDS
from pipeloom.system.processes import lives, start_of
from pipeloom.training.loading import Loading

LIMIT_S = 3.0
"""``training.stall_timeout_s`` of the runs."""
SPARE_S = 5.0
"""An answer is right if it is there so long after the limit."""
LAYOUTS = {
    "pipeline": "--layout.pp 2 --layout.loops 2 --layout.num-microbatches 4",
    "four stages": "--layout.pp 4 --layout.num-microbatches 4 --schedule.family 1f1b",
    "replicas": "--layout.pp 2 --layout.dp 2 --layout.loops 2 --layout.shard full --layout.num-microbatches 4",
    "tensor": "--layout.pp 2 --layout.tp 2 --layout.num-microbatches 2",
}
MODEL = (
    "--model.num-layers 4 --model.hidden-size 16 --model.num-heads 2 --data.seq-len 8 --training.no-predict "
    "--training.validation-batches 1 --training.sample-tokens 0 --training.steps 1000 --checkpoint.final none"
)


@dataclass(frozen=True)
class Hang:
    """A hang.

    Attributes:
        kind: where it is.
        layout: of the run, one of ``LAYOUTS``.
        rank: that hangs.
        count: how many of such places the rank passes before.
    """

    kind: str
    layout: str
    rank: int
    count: int


def hangs(number, seed=0):
    """So many hangs, of all kinds in turn."""
    draw = random.Random(seed)
    found = []
    for index in range(number):
        kind = KINDS[index % len(KINDS)]
        layout = {"replicas' exchange": "replicas", "tensor-parallel exchange": "tensor"}.get(kind)
        layout = layout or draw.choice([*LAYOUTS])
        size = 2 if layout == "pipeline" else 4
        found.append(Hang(kind, layout, draw.randrange(size), draw.randrange(3, 20)))
    return found


class Place:
    """Counts the places of a hang in a rank, and hangs at the last one."""

    def __init__(self, hang, file):
        self.hang, self.file, self.left = hang, file, hang.count

    def is_here(self):
        if not dist.is_initialized() or dist.get_rank() != self.hang.rank or not self.file.parent.exists():
            return False
        self.left -= 1
        return self.left == -1

    def note(self, **where):
        draft = self.file.with_suffix(".draft")
        draft.write_text(
            json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), **where} | {"started": start_of(os.getpid())})
        )
        draft.rename(self.file)

    def stay(self, **where):
        self.note(**where)
        time.sleep(600)


def before_send(place):
    starter = Messages.starter

    def hanging(self, row, slot):
        start, action = starter(self, row, slot), row.actions[slot]

        def watched():
            if place.is_here():
                place.stay(what=str(action), slot=slot)
            return start()

        return watched if action.kind in SEND_KINDS else start

    Messages.starter = hanging


def after_send(place):
    run = Executor._run

    def hanging(self, slot, job):
        run(self, slot, job)
        if self._actions[slot].kind in SEND_KINDS and place.is_here():
            after = str(self._actions[slot + 1]) if slot + 1 < len(self._actions) else ""
            place.stay(what=after, slot=slot + 1)

    Executor._run = hanging


def in_exchange_of_replicas(place):
    start = SharedGroup._start

    def hanging(self, sent, received):
        if "replica" in place.hang.layout and place.is_here():
            place.stay()
        return start(self, sent, received)

    SharedGroup._start = hanging


def in_tensor_parallel_exchange(place):
    run = BlockingGroup._run

    def hanging(self, exchange, start):
        if place.is_here():
            place.stay()
        return run(self, exchange, start)

    BlockingGroup._run = hanging


def in_data(place):
    read = Loading._read

    def hanging(self):
        if place.is_here():
            place.stay(what="read of the batch")
        return read(self)

    Loading._read = hanging


def in_checkpoint(place):
    write = FileSystemWriter.write_data

    def hanging(self, plan, planner):
        if place.is_here():
            place.stay(what="write of the checkpoint's files")
        return write(self, plan, planner)

    FileSystemWriter.write_data = hanging


def stopped(number, process):
    """A signal to the rank itself, in the middle of a row."""

    def prepare(place):
        run = Executor._run

        def hanging(self, slot, job):
            if place.is_here():
                place.note(process=process)
                os.kill(os.getpid(), number)
                time.sleep(600)
            run(self, slot, job)

        Executor._run = hanging

    return prepare


PREPARE = {
    "before a send": before_send,
    "after a send": after_send,
    "replicas' exchange": in_exchange_of_replicas,
    "tensor-parallel exchange": in_tensor_parallel_exchange,
    "data": in_data,
    "checkpoint": in_checkpoint,
    "stopped": stopped(signal.SIGSTOP, "is stopped"),
    "killed": stopped(signal.SIGKILL, GONE),
}
KINDS = tuple(PREPARE)


def is_right(state, hang, where):
    """Whether an answer names the rank first, and the place where that is known."""
    if not state.found or state.found[0].rank != hang.rank:
        return False
    first = state.found[0]
    if "process" in where and first.process not in (where["process"], GONE, ENDED):  # at the end it is killed
        return False
    return ("what" not in where or first.what == where["what"]) and first.slot == where.get("slot", first.slot)


def answer_to(hang, folder):
    """Let a run hang: (seconds after which the answer was right, or ``None``; the last answer; what the run printed).

    The answer has to stay right until the run ends, or the limit and the spare seconds are over.
    """
    file, run = folder / "hang" / "where.json", folder / "run"
    words = f"train {MODEL} {LAYOUTS[hang.layout]} --training.stall-timeout-s {LIMIT_S:g}".split()
    words += ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache")]
    words += ["--output.folder", str(run), *(["--checkpoint.every", "2"] if hang.kind == "checkpoint" else [])]
    command = Forked(folder, words, lambda: PREPARE[hang.kind](Place(hang, file)))
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() or not command.is_running, 60)
        file.parent.mkdir()  # from now on the rank may hang
        wait_for(lambda: file.exists() or not command.is_running, 60)
        where = json.loads(file.read_text())
        right_s, state = None, None
        while (now_s := time.monotonic()) < where["at_s"] + LIMIT_S + SPARE_S:
            with suppress(UserError):
                state = read_hang(run)
                if not is_right(state, hang, where):
                    right_s = None
                elif right_s is None:
                    right_s = now_s - where["at_s"]
            if not command.is_running:
                break
            time.sleep(0.25)
        if not command.is_running:
            state = read_hang(run)
            right_s = right_s if is_right(state, hang, where) else None
    finally:
        with suppress(ProcessLookupError, FileNotFoundError):
            where = json.loads(file.read_text())
            if lives(where["pid"], where["started"]):  # the number of one that has ended may be another program's
                os.kill(where["pid"], signal.SIGKILL)
        with suppress(AssertionError):
            command.end(0.1 if command.is_running else 10)
    return right_s, state, command.stderr


def wait_for(condition, limit_s):
    """Wait until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.05)


def fresh(folder):
    """The same folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
