"""Memory that is put aside by one lane and fetched by another, and how much is held."""

import threading
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.execute.communication.collectives import Finish, Job


class Live:
    """Bytes that are held for backwards, both halves of them, now and at most; lanes' threads count, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def begin(self) -> None:
        """Before a step."""
        self._now = self.most = 0

    def add(self, nbytes: int) -> None:
        """More are held, or, where negative, fewer."""
        with self._lock:
            self._now += nbytes
            self.most = max(self.most, self._now)


class Vault:
    """Memory that one lane puts aside and another fetches.

    Args:
        waits: whether lanes run in threads of their own.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, ...], tuple[Tensor, Any]] = {}
        self._error: Exception | None = None
        self._num_begun = 0

    def begin(self) -> None:
        """Before a step, or after one that failed: who still waits for something of that gets an error."""
        with self._changed:
            self._kept.clear()
            self._error = None
            self._num_begun += 1
            self._changed.notify_all()

    def put(self, key: tuple[int, ...], memory: Tensor, device: torch.device) -> None:
        """Put memory aside; on CUDA, what the current stream does to it until now counts."""
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._changed:
            self._kept[key] = memory, event
            self._changed.notify_all()

    def watched(self, job: Job) -> Job:
        """A job that puts things here: if it fails, nobody waits for what it would have brought."""
        try:
            for finish in job:
                yield self._watched(finish)
        except Exception as error:
            self._fail(error)
            raise

    def _watched(self, finish: Finish) -> Finish:
        def watched() -> bool:
            try:
                return finish()
            except Exception as error:
                self._fail(error)
                raise

        return watched

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def until(self, key: tuple[int, ...]) -> Finish:
        """Wait until something is there.

        Raises:
            RunError: in ``finish``, if the step was given up meanwhile.
        """
        begun = self._num_begun

        def finish() -> bool:
            with self._changed:
                while self._waits and key not in self._kept and self._error is None and begun == self._num_begun:
                    self._changed.wait()
                if begun != self._num_begun:
                    raise RunError("the step was given up")
                if self._error is not None:
                    raise self._error
                return key in self._kept

        return finish

    def fetch(self, key: tuple[int, ...], device: torch.device) -> Tensor:
        """Take it out; on CUDA the current stream works behind who put it there."""
        with self._changed:
            memory, event = self._kept.pop(key)
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
            if memory.is_cuda:
                # The allocator knows the stream that made the memory; without this it
                # could give it out again while this one reads.
                memory.record_stream(torch.cuda.current_stream(device))
        return memory
