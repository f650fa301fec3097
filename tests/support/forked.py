"""``pipeloom`` in a process that is forked from the tests': without their imports, as a command of its own costs."""

import multiprocessing
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CONTEXT = multiprocessing.get_context("fork")


class Forked:
    """A command that runs.

    Args:
        folder: for what it prints.
        words: behind ``pipeloom``.
        prepare: called in the process before the command begins; its workers inherit what that changes.
        environment: variables to set.
    """

    def __init__(
        self,
        folder: Path,
        words: list[str],
        prepare: Callable[[], object] = lambda: None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._files = [folder / f"printed-{len(list(folder.glob('printed-*')))}-{name}" for name in ("out", "err")]
        for file in self._files:
            file.touch()
        self._process = _CONTEXT.Process(target=self._run, args=(words, prepare, environment or {}))
        self._process.start()

    def _run(self, words: list[str], prepare: Callable[[], object], environment: dict[str, str]) -> None:
        for number, file in enumerate(self._files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.update(environment)
        os.setpgid(0, 0)
        from pipeloom.cli import main

        status = 99
        try:
            prepare()
            status = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    @classmethod
    def ranks(
        cls, folder: Path, words: list[str], number: int, prepare: Callable[[], object] = lambda: None
    ) -> list["Forked"]:
        """The ranks of a run on this host, with the variables that a launcher such as torchrun sets."""
        place = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = free_port()
        each = ({**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number))
        return [cls(folder, words, prepare, environment) for environment in each]

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        """Its messages."""
        return self._files[1].read_text()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """Send it, and not its workers, a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self, timeout_s: float = 60) -> int:
        """Wait for its end; its exit status. Nothing of it is left, whatever happens."""
        self._process.join(timeout_s)
        status, pid = self._process.exitcode, self._process.pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.join()
        assert status is not None, f"it did not end within {timeout_s:g} s: {self.stdout}{self.stderr}"
        return status


def free_port() -> str:
    """A port for a launcher, which binds it a moment later.

    Below those that systems choose for connections and for calls without a port, so that none takes it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(
            20_000, 30_000
        )  # of its own, since Hypothesis sets the seed of the other
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
