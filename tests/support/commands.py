"""Runs ``pipeloom`` as a person does: a process of its own, with what it printed, took and left behind."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        status: exit status; negative where a signal ended it.
        stdout: what it printed.
        stderr: the same for errors.
        peak_bytes: most resident memory of the process or of one that it waited for.
        written: paths below the folder that appeared, changed or vanished; without caches of libraries.
        is_too_long: whether it was killed after ``timeout_s``.
    """

    status: int
    stdout: str
    stderr: str
    peak_bytes: int
    written: list[str]
    is_too_long: bool


def environment(folder: Path) -> dict[str, str]:
    """Variables under which a command writes its caches and temporary files below ``folder``, not to the user's."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    own = {name: str(folder / path) for name, path in {"XDG_CACHE_HOME": ".cache", "TMPDIR": ".tmp"}.items()}
    (folder / ".tmp").mkdir(parents=True, exist_ok=True)
    return {**inherited, **own, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


_LIBRARIES = (".tmp/torchinductor", ".cache/matplotlib", ".cache/fontconfig")
"""Caches of libraries, which they write when they are imported."""


def run_command(*words: str, folder: Path, timeout_s: float = 60.0, **variables: str) -> Outcome:
    """Run ``pipeloom WORDS`` in a folder and wait for it.

    Args:
        words: of the command line.
        folder: where it runs.
        timeout_s: it is killed after this many seconds, with every process that it started.
        variables: of the environment, over those of ``environment``.
    """
    env = {**environment(folder), **variables}
    before = _states(folder)
    output, errors = folder.parent / f"{folder.name}.stdout", folder.parent / f"{folder.name}.stderr"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeloom", *words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        is_over = threading.Event()
        timer = threading.Timer(timeout_s, _kill, (process.pid, is_over))
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)  # only wait4 returns the memory of exactly this process
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return Outcome(
        status=process.returncode,
        stdout=output.read_bytes().decode("utf-8", "replace"),
        stderr=errors.read_bytes().decode("utf-8", "replace"),
        peak_bytes=usage.ru_maxrss * 1024,
        written=sorted(path for path, _ in before.items() ^ _states(folder).items()),
        is_too_long=is_over.is_set(),
    )


def _kill(pid: int, is_over: threading.Event) -> None:
    is_over.set()
    os.killpg(pid, signal.SIGKILL)


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file and folder below a folder, temporary and cached ones included."""
    states: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        name, state = str(path.relative_to(folder)), path.lstat()
        if name == ".cache" or name.startswith(_LIBRARIES):
            continue
        states[name] = (0, 0) if path.is_dir() else (state.st_size, state.st_mtime_ns)
    return states
