"""Starts the processes of a program, watches its steps from outside, and reads their memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from peers.case import Program, Row, Size
from peers.start import RUN, START
from pipeloom.runs.run_folder import METRICS
from side_by_side.hosts import INTERFACE, enter, shaped_hosts, why_not
from user_environment import user_environment

_LIMIT_S = 240.0
_GLANCE_S = 0.01
_KIB = 1024


@dataclass(frozen=True)
class Launched:
    """What came of a program that was started once.

    Attributes:
        losses: of all steps.
        seconds: of the steps that count.
        start_s: from the command to the end of the first step.
        memory_bytes: proportional set size of all processes, the largest seen during the last step.
    """

    losses: list[float]
    seconds: list[float]
    start_s: float
    memory_bytes: int


def why_skipped(row: Row, program: Program) -> str | None:
    """Why a program cannot run here, for people; ``None`` if it can."""
    if program.needs is not None and find_spec(program.needs) is None:
        return f"the package {program.needs} is missing (pip install '{program.needs}')"
    return why_not() if row.link is not None else None


def launch(row: Row, program: Program, size: Size, start: Path) -> Launched:
    """Run a program until all of its steps are done, then end it.

    Args:
        row: the layout.
        program: what trains.
        size: of the model.
        start: folder that ``write_start`` wrote to.

    Raises:
        RuntimeError: it ended early, or took too long; with what it printed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeloom-")))
        hosts = None if row.link is None else stack.enter_context(shaped_hosts(row.num_ranks, row.link))
        words, lines = _words(row, program, size, start, folder)
        printed = stack.enter_context((folder / "printed.txt").open("wb"))
        port, begin_s, started = _free_port(), time.monotonic(), []
        try:
            # pipeloom starts the ranks of one host itself.
            forks = program.kind == "pipeloom" and hosts is None
            for rank in range(1 if forks else row.num_ranks):
                given = _environment(row.threads) | ({} if forks else _place(rank, row.num_ranks, hosts, port))
                inside = None if hosts is None else partial(enter, hosts[rank])
                started.append(
                    subprocess.Popen(  # one thread runs here, so the function before the command is safe
                        words,
                        env=given,
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                        preexec_fn=inside,  # noqa: PLW1509
                    )
                )
            return _watched(started, lines, size, begin_s)
        except RuntimeError as error:
            output = (folder / "printed.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{row.name}, {program.name}: {error}\n{output[-3000:]}") from error
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _words(row: Row, program: Program, size: Size, start: Path, folder: Path) -> tuple[list[str], Path]:
    """The command, and the file that gets a line for each step."""
    if program.kind == "pipeloom":
        run = folder / "run"
        words = [sys.executable, "-m", "pipeloom", "train", str(start / RUN), *row.words(program, size)]
        return [*words, "--output.folder", str(run)], run / METRICS
    lines = folder / METRICS
    words = [sys.executable, "-m", "peers.programs", program.kind, str(start / START), str(lines)]
    words += ["--threads", str(row.threads), "--pp", str(row.pp), "--loops", str(program.loops)]
    return words + (["--schedule", program.schedule] if program.schedule else []), lines


def _environment(threads: int) -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**user_environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _place(rank: int, size: int, hosts: Sequence[str] | None, port: int) -> dict[str, str]:
    """torchrun's variables."""
    where = {"MASTER_ADDR": "127.0.0.1"} if hosts is None else {"MASTER_ADDR": "10.78.0.1"}
    if hosts is not None:
        where["GLOO_SOCKET_IFNAME"] = INTERFACE
    each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if hosts is not None else {"LOCAL_RANK": str(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port), **where, **each}


def _watched(started: list[subprocess.Popen[bytes]], lines: Path, size: Size, begin_s: float) -> Launched:
    start_s, memory = 0.0, 0
    while True:
        found = lines.read_bytes() if lines.exists() else b""
        done = found.count(b"\n")
        now_s = time.monotonic() - begin_s
        if done and not start_s:
            start_s = now_s
        if done == size.steps:
            break
        if any(process.poll() for process in started):
            raise RuntimeError("a process ended early")
        if now_s > _LIMIT_S:
            raise RuntimeError(f"no end after {_LIMIT_S:g} s")
        if done == size.steps - 1:
            memory = max(memory, sum(_pss_bytes(pid) for pid in _descendants({one.pid for one in started})))
        time.sleep(_GLANCE_S)
    steps = [json.loads(line) for line in found.splitlines()]
    seconds = [line["step_time_s"] for line in steps][size.warmup : size.steps - 1]
    return Launched([line["loss"] for line in steps], seconds, start_s, memory)


def _descendants(pids: set[int]) -> set[int]:
    """Processes and those that they started."""
    found, new = set(pids), set(pids)
    while new:
        children: set[int] = set()
        for pid in new:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    children |= set(map(int, (task / "children").read_text().split()))
        new = children - found
        found |= new
    return found


def _pss_bytes(pid: int) -> int:
    """Memory of a process; what several share is divided among them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    return 0
