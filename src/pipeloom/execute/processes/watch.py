"""Positions of all ranks, for the message when one of them waits too long."""

import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist


class Watch:
    """Publishes this rank's position when it has not changed for a while, so that other ranks can read it.

    A healthy run publishes nothing: the store is written once for each stall.

    Args:
        store: shared by all ranks.
        rank, size: this process and how many there are.
        position: returns this rank's position; called from a thread.
        quiet_s: time without a change after which the position is published.
        beat: called after each such time, from the thread, with whether the position has not changed.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        position: Callable[[], str],
        *,
        quiet_s: float = 2.0,
        beat: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store = dist.PrefixStore("pipeloom/position", store)
        self._rank = rank
        self._size = size
        self._position = position
        self._quiet_s = quiet_s
        self._beat = beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def positions(self) -> str:
        """Every rank's last published position and this rank's own, one line each."""
        lines = []
        for rank in range(self._size):
            if rank == self._rank:
                lines.append(self._position())
            elif self._store.check([str(rank)]):
                lines.append(self._store.get(str(rank)).decode())
            else:
                lines.append(
                    f"process {rank} has published no position: it is stopped, or it was at work until a moment ago"
                )
        return "\n".join(f"  {line}" for line in lines)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        last, published = self._position(), None
        while not self._ended.wait(self._quiet_s):
            now = self._position()
            self._beat(now == last)
            # A stalled rank writes once, a running one never.
            if now == last and now != published:
                self._store.set(str(self._rank), now)
                published = now
            last = now


def where_threads_are(depth: int = 4) -> str:
    """The innermost frames of this process's threads, the main one first; for a rank that hangs.

    Args:
        depth: most frames of each, from the outer to the inner one.
    """
    frames, me = sys._current_frames(), threading.get_ident()  # noqa: SLF001  the module has no other name for it
    threads = sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread())
    lines: list[str] = []
    for one in threads:
        frame = frames.get(one.ident or 0)
        if frame is None or one.ident == me:
            continue
        inner = traceback.extract_stack(frame)[-depth:]
        places = [f"{place.filename.rpartition('/')[2]}:{place.lineno} {place.name}" for place in inner]
        lines.append(f"{one.name}: {', '.join(places)}")
    return "\n".join(lines)
