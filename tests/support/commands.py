"""Runs ``pipeloom`` as a person does: a process of its own, with what it printed, took and left behind."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_server

THINKS = (*(f"pipeloom.cli.{name}" for name in ("plan", "schedule", "simulate", "train", "validate")),)
"""What most commands import; without PyTorch, so that a command's memory is its own."""
TRAINS = (
    *THINKS,
    "matplotlib.pyplot",
    "torch._dynamo",
    "pipeloom.training.trainer",
    "pipeloom.training.conversions.export",
)
"""What commands import that train, verify or export."""


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        returncode: exit status; negative where a signal ended it.
        stdout: what it printed.
        stderr: the same for errors.
        peak_bytes: most resident memory of the process or of one that it waited for.
        cpu_s: CPU time of all of these, which other programs do not change.
        is_too_long: whether it was killed after its time.
    """

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int
    cpu_s: float
    is_too_long: bool = False


class Command:
    """A command that runs in a session of its own.

    Args:
        words: behind ``pipeloom``.
        cwd: its folder.
        env: its environment.
        imported: modules that it finds imported.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path = Path(),
        env: dict[str, str] | None = None,
        imported: tuple[str, ...] = TRAINS,
    ) -> None:
        env = dict(os.environ if env is None else env)
        # packages are found where PYTHONPATH names them when a process begins
        self._server = _server(imported, env.get("PYTHONPATH"))
        self._printed = self._server.new_files()
        start = {"words": words, "cwd": str(cwd.absolute()), "env": env}
        self.pid: int = self._server.answer({"start": {**start, "printed": list(map(str, self._printed))}})
        self._ended: tuple[int, int, float] | None = None

    def poll(self) -> int | None:
        """Exit status, or ``None`` while it runs."""
        return self._end(blocks=False)

    def wait(self, timeout_s: float = 100.0) -> Outcome:
        """Wait for its end; after so many seconds it is killed, with every process that it started."""
        is_too_long = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (is_too_long.set(), self.kill()))
        timer.start()
        try:
            self._end(blocks=True)
        finally:
            timer.cancel()
        assert self._ended is not None
        out, err = (file.read_bytes().decode("utf-8", "replace") for file in self._printed)
        err = _COMPILES.sub("", err)
        status, peak_bytes, cpu_s = self._ended
        return Outcome(status, out, err, peak_bytes, cpu_s, is_too_long.is_set())

    def kill(self) -> None:
        """Kill it and every process that it started."""
        os.killpg(self.pid, signal.SIGKILL)

    def _end(self, *, blocks: bool) -> int | None:
        if self._ended is None:
            self._ended = self._server.answer({"wait": self.pid, "blocks": blocks})
        return None if self._ended is None else self._ended[0]


def pipeloom(words: Sequence[str], cwd: Path = Path(), env: dict[str, str] | None = None) -> Outcome:
    """Run ``pipeloom WORDS`` and wait for it, at most 100 seconds."""
    done = Command(words, cwd, env).wait()
    assert not done.is_too_long, done.stdout + done.stderr
    return done


_COMPILES = re.compile(r"^Compiling pipeloom\S+ \(once on this machine\) \.\.\.\n", re.MULTILINE)
"""A note of whichever command is the first on a machine."""


class _Server:
    """The process that starts commands."""

    def __init__(self, imported: tuple[str, ...], path: str | None) -> None:
        self._words = [sys.executable, command_server.__file__, *imported]
        self._env = os.environ if path is None else {**os.environ, "PYTHONPATH": path}
        self._process: subprocess.Popen[str] | None = None
        self._started = list[int]()
        self._folder = TemporaryDirectory(prefix="pipeloom-commands-")
        self._numbers = count()

    def answer(self, request: dict[str, object]) -> Any:
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(self._words, **pipes, text=True, start_new_session=True, env=self._env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            found = json.loads(self._process.stdout.readline())
        except BaseException:  # such as a test's time limit, behind which the next test would read this answer
            self._kill()
            raise
        if "start" in request:
            self._started.append(found)
        return found

    def _kill(self) -> None:
        """End the server and what it started; the next request starts another."""
        assert self._process is not None
        for pid in (*self._started, self._process.pid):
            for kill in (os.killpg, os.kill):  # one that has just begun has no group yet
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        self._process.communicate()
        self._process, self._started = None, []

    def new_files(self) -> list[Path]:
        """Two that do not exist."""
        number = next(self._numbers)
        return [Path(self._folder.name) / f"{number}.{name}" for name in ("stdout", "stderr")]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # closes what it reads, which ends it
        self._folder.cleanup()


@cache
def _server(imported: tuple[str, ...], path: str | None) -> _Server:
    server = _Server(imported, path)
    atexit.register(server.close)
    return server


def environment(folder: Path) -> dict[str, str]:
    """Variables under which a command writes its caches and temporary files below ``folder``, not to the user's."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    own = {name: str(folder / path) for name, path in {"XDG_CACHE_HOME": ".cache", "TMPDIR": ".tmp"}.items()}
    (folder / ".tmp").mkdir(parents=True, exist_ok=True)
    return {**inherited, **own, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


_LIBRARIES = (".tmp/torchinductor", ".cache/matplotlib", ".cache/fontconfig")
"""Caches of libraries, which they write when they are imported."""


def run_command(
    *words: str, folder: Path, timeout_s: float = 60.0, imported: tuple[str, ...] = THINKS, **variables: str
) -> tuple[Outcome, list[str]]:
    """Run ``pipeloom WORDS`` in a folder and wait for it.

    Args:
        words: of the command line.
        folder: where it runs.
        timeout_s: it is killed after this many seconds, with every process that it started.
        imported: modules that it finds imported.
        variables: of the environment, over those of ``environment``.

    Returns:
        What it did, and the paths below the folder that appeared, changed or vanished; without caches of libraries.
    """
    env = {**environment(folder), **variables}
    before = _states(folder)
    done = Command(words, folder, env, imported).wait(timeout_s)
    return done, sorted(path for path, _ in before.items() ^ _states(folder).items())


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file and folder below a folder, temporary and cached ones included."""
    states: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        name, state = str(path.relative_to(folder)), path.lstat()
        if name == ".cache" or name.startswith(_LIBRARIES):
            continue
        states[name] = (0, 0) if path.is_dir() else (state.st_size, state.st_mtime_ns)
    return states
