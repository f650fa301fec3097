"""Faults of a run that goes on: done from outside, or by a thread in each rank that waits for commands.

A run with faults and a quiet one write the same weights, losses and, in the order of the steps, the same windows.
"""

import errno
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from forked import Forked
from small_run import write_text
from torch.distributed.checkpoint import FileSystemWriter

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints
from pipeloom.errors import UserError
from pipeloom.runs.action_log import read_ranks
from pipeloom.runs.run_folder import ACTIONS, METRICS, WARNINGS, RunFolder
from pipeloom.training import again
from pipeloom.training.checkpoints.saving import Saving
from pipeloom.training.loading import Loading
from pipeloom.training.trainer import Trainer

MODEL = (
    "--model.num-layers 4 --model.hidden-size 32 --model.num-heads 2 --data.seq-len 16 "
    "--training.validation-batches 1 --training.sample-tokens 0 --checkpoint.every 3 --checkpoint.keep 4"
)
LAYOUT = "--layout.pp 2 --layout.dp 2 --layout.loops 2 --layout.num-microbatches 4"
STALL_S = 3.0
"""``training.stall_timeout_s`` where a rank is stopped; a busy machine may let a rank wait as long by itself."""
LONG_S = 60.0
GAP = 4
"""Steps between two faults."""


class Commands:
    """In each rank: does what files of the folder command, once each."""

    def __init__(self, folder):
        self.folder, self.is_full, self.slow_s = folder, False, 0.0

    def install(self):
        """Before the ranks fork: they all get a thread, and places where faults act."""
        run, begin, write = Trainer.run, Saving.begin_step, FileSystemWriter.write_data
        take, add, keep = Loading.take, RunFolder.add_metrics, again.temporary_folder
        me = self

        def run_watched(trainer):
            threading.Thread(target=me.watch, daemon=True).start()
            return run(trainer)

        def begin_step(saving):
            time.sleep(me.slow_s)
            me.slow_s = 0.0
            begin(saving)

        def write_data(writer, plan, planner):
            if me.is_full:
                me.is_full = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(writer, plan, planner)

        def take_noted(loading):
            step, batch = loading._first + loading._taken, take(loading)
            if dist.get_rank() == 0:
                me.append("windows", f"{step} {zlib.crc32(batch.tobytes())}")
            return batch

        def add_noted(folder, metrics):
            add(folder, metrics)
            me.append("done", str(metrics["step"]))

        @contextmanager
        def folder_noted(place):
            with keep(place) as folder:
                me.append("kept", str(folder))
                yield folder

        again.temporary_folder = folder_noted
        Trainer.run, Saving.begin_step, FileSystemWriter.write_data = run_watched, begin_step, write_data
        Loading.take, RunFolder.add_metrics = take_noted, add_noted

    def append(self, name, line):
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")

    def watch(self):
        while True:
            time.sleep(0.02)
            for kind in ("full disk", "slow rank", "refused port"):
                with suppress(FileNotFoundError):
                    (self.folder / f"{kind}-{dist.get_rank()}").unlink()
                    self.obey(kind)

    def obey(self, kind):
        if kind == "full disk":
            self.is_full = True
        elif kind == "slow rank":
            self.slow_s = 0.7
        else:
            for one in Path("/proc/self/fd").iterdir():
                with suppress(OSError):
                    if str(one.readlink()).startswith("socket:"):
                        socket.socket(fileno=os.dup(int(one.name))).shutdown(socket.SHUT_RDWR)


class Fault(NamedTuple):
    """A fault: its kind, the rank, the step behind which it comes, and how much later."""

    kind: str
    rank: int
    step: int
    delay_s: float


class Chaos:
    """A run in a folder, with faults.

    Args:
        folder: of the run, and of what its ranks note.
        steps: of the run.
        more: further words of the command.
        stall_s: how long a rank waits.
    """

    def __init__(self, folder, steps, more="", stall_s=LONG_S):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run, self.steps = folder, folder / "run", steps
        more += "" if "--training.predict" in more else " --training.no-predict"
        words = f"train {MODEL} {LAYOUT} --training.stall-timeout-s {stall_s:g} --training.steps {steps} {more}"
        data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder.parent / "cache")]
        self.words = [*words.split(), *data, "--output.folder", str(self.run)]
        self.command = None

    def start(self):
        again = ["--checkpoint.resume", str(self.run)] if (self.run / "checkpoints").exists() else []
        self.command = Forked(self.folder, [*self.words, *again], Commands(self.folder).install)

    def finish(self, limit_s=600):
        """Its exit status."""
        status = self.command.end(limit_s)
        assert status == 0, f"{status}: {self.command.stdout}{self.command.stderr}"

    def done(self):
        """The newest step of the metrics."""
        with suppress(FileNotFoundError, IndexError, ValueError):
            return json.loads((self.run / METRICS).read_text().splitlines()[-1])["step"]
        return 0

    def wait_until(self, step, limit_s=60):
        end_s = time.monotonic() + limit_s
        while self.done() < step:
            assert time.monotonic() < end_s, f"step {step} is not done: {self.command.stdout}{self.command.stderr}"
            if not self.command.is_running and self.done() < step:
                raise AssertionError(f"it ended: {self.command.stdout}{self.command.stderr}")
            time.sleep(0.01)

    def do(self, fault):
        """Wait for the step of a fault, do it, and return the seconds until a later step is done."""
        self.wait_until(fault.step)
        time.sleep(fault.delay_s)
        begin_s, step = time.monotonic(), self.done()
        DO[fault.kind](self, fault.rank)
        self.wait_until(step + 2)  # the next one may have been nearly done
        return time.monotonic() - begin_s

    def pid(self, rank):
        """The process of a rank that runs: the number of one that has ended may be another program's."""
        for _ in range(500):
            with suppress(UserError, StopIteration):
                ranks = read_ranks(self.run / ACTIONS)
                return next(one.pid for one in ranks if one.rank == rank and one.process == "runs")
            time.sleep(0.02)
        raise AssertionError("the rank does not run")

    def kill(self, rank, number=signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)

    def newest_file(self, rank):
        for _ in range(200):
            with suppress(FileNotFoundError, IndexError):
                files = sorted(list_checkpoints(self.run)[-1].glob("*.distcp"))
                return files[rank % len(files)]
            time.sleep(0.02)
        raise AssertionError("there is no checkpoint")

    def terminate(self, _):
        self.command.send_signal(signal.SIGTERM)
        assert self.command.end(60) == 75, self.command.stderr
        self.start()

    def cut(self, rank):
        file = self.newest_file(rank)
        os.truncate(file, file.stat().st_size // 2)
        self.kill(rank)

    def flip(self, rank):
        file = self.newest_file(rank)
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
        self.kill(rank)

    def lose(self, rank):
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)
        self.kill(rank)

    def tell(self, kind):
        return lambda rank: (self.folder / f"{kind}-{rank}").touch()


DO = {
    "kill": Chaos.kill,
    "stop": lambda chaos, rank: chaos.kill(rank, signal.SIGSTOP),
    "full disk": lambda chaos, rank: chaos.tell("full disk")(rank),
    "cut file": Chaos.cut,
    "flipped byte": Chaos.flip,
    "refused port": lambda chaos, rank: chaos.tell("refused port")(rank),
    "slow rank": lambda chaos, rank: chaos.tell("slow rank")(rank),
    "lost folder": Chaos.lose,
    "SIGTERM": Chaos.terminate,
}
KINDS = tuple(DO)


def faults(number, seed=0, kinds=KINDS):
    """So many faults, of all kinds, in an order that is drawn."""
    draw = random.Random(seed)
    order = [kinds[index % len(kinds)] for index in range(number)]
    draw.shuffle(order)
    return [
        Fault(kind, draw.randrange(4), GAP * (index + 1), draw.uniform(0, 0.05)) for index, kind in enumerate(order)
    ]


def curve(run: Path):
    """Step, loss and gradient norm of each line of the metrics."""
    lines = map(json.loads, (run / METRICS).read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def windows(folder: Path):
    """Step -> what was read for it at last."""
    return dict(line.split() for line in (folder / "windows").read_text().splitlines())


def repeated(folder: Path):
    """For each restart the number of completed steps that were done again."""
    steps = [int(line) for line in (folder / "done").read_text().splitlines()]
    return [before - now + 1 for before, now in pairwise(steps) if now <= before]


def differences(chaos: Chaos, quiet: Chaos):
    """What of a run with faults differs from the quiet run, in words."""
    found = []
    if (chaos.run / "model.safetensors").read_bytes() != (quiet.run / "model.safetensors").read_bytes():
        found.append("the weights")
    if curve(chaos.run) != curve(quiet.run):
        found.append("the losses")
    if windows(chaos.folder) != windows(quiet.folder):
        found.append("the windows")
    return found


def restarts(chaos: Chaos):
    """Lines about restarts."""
    file = chaos.run / WARNINGS
    return [line for line in file.read_text().splitlines() if "started again" in line] if file.exists() else []
