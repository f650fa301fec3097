"""Where the stages of a model are that does not fit on its device: at rest in the memory of the host, or on the device.

What there is of a stage lies in a few storages, of which everything else is a view: its flat weights, its flat
gradient, the optimizer's moments. A storage that is at rest has no memory on the device; views of it, among them those
that autograd keeps from forward to backward, are good again when it is back. On a CPU both memories are the host's;
what is moved, freed and counted is the same.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.schedule.stage_swaps import NOTHING, Amounts, Content
from pipeloom.terminal.words import format_bytes


def _take_room(file: int, size: int, folder: Path) -> None:
    """Take the room of a file at once: where a disk is full, a mapping would end the process without a word.

    Raises:
        RunError: there is not so much.
    """
    if size == 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot tell
            words = f"schedule.swap_folder: {folder} has no room for {format_bytes(size)} more: {error.strerror}"
            raise RunError(f"{words}; use a folder on a larger disk, or leave it out") from None


class _Home:
    """A storage of the device, and where it is at rest.

    Args:
        tensor: a view of all of the storage, with its first values; taken over.
        folder: where it is at rest, in a new file that is mapped to memory; ``None`` for memory of the host.
    """

    def __init__(self, tensor: Tensor, folder: Path | None) -> None:
        self._storage = tensor.untyped_storage()
        self.size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage, 0, (self.size,), (1,))
        self._is_cuda = tensor.device.type == "cuda"
        if folder is not None:
            with NamedTemporaryFile(dir=folder) as file:  # loses its name here, and its room with the mapping
                _take_room(file.fileno(), self.size, folder)
                # Shared: what is written goes to the file, and the kernel may take the pages back under pressure.
                self.rest = torch.from_file(file.name, shared=True, size=self.size, dtype=torch.uint8)
        else:
            # Pinned: copies from pageable memory would wait on the host and could not run beside compute.
            self.rest = torch.empty(self.size, dtype=torch.uint8, pin_memory=self._is_cuda)

    @property
    def address(self) -> int:
        """A key that no other storage has."""
        return self._storage._cdata  # noqa: SLF001

    def bring(self, *, with_values: bool) -> None:
        """Make room on the device; fill it, or leave what is there unknown."""
        # The same storage object: parameters, and views that autograd keeps, stay valid.
        self._storage.resize_(self.size)
        if with_values:
            self._bytes.copy_(self.rest, non_blocking=True)

    def leave(self, *, with_values: bool) -> None:
        """Give the room back; keep what is there, or forget it."""
        if with_values:
            self.rest.copy_(self._bytes, non_blocking=True)
        if (
            self._is_cuda
        ):  # the allocator has to wait for the copy, and for compute, before it gives the memory out again
            self._bytes.record_stream(torch.cuda.current_stream(self._bytes.device))
            self._bytes.record_stream(torch.cuda.default_stream(self._bytes.device))
        self._storage.resize_(0)

    def settle(self) -> None:
        """Let the host wait for what the current stream copies."""
        if self._is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()


class StageStore:
    """The stages of one rank, each at rest or on the device, and how much of the device they take.

    Args:
        budget: most bytes of them on the device at once.
        folder: where they are at rest, in files without a name, of which nothing is left however the process ends;
            ``None`` for memory of the host, pinned on CUDA.

    Attributes:
        budget: as given.
        peak_bytes: the most that were on the device at once since ``begin``.
        settle: waits for the stages that are on their way out; see ``begin``.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget = budget
        self.peak_bytes = 0
        self._folder = folder
        self._live_bytes = 0
        self._lock = threading.Lock()
        self._homes: dict[int, dict[Content, list[_Home]]] = {}
        self._home_of: dict[int, _Home] = {}
        self._here: dict[int, Content] = {}
        self.settle: Callable[[], None] = lambda: None

    def adopt(self, stage: int, weights: StageWeights) -> None:
        """Take a stage over, from the device to rest.

        Raises:
            RunError: the budget has no room for it.
        """
        weights.is_swapped = True
        parts = weights.parts  # makes the views, while there is memory
        assert parts, "a stage has parameters"
        self.add(stage, Content.WEIGHTS, weights.whole)
        self.add(stage, Content.GRADIENT, weights.gradient)
        if weights.shard.untyped_storage()._cdata not in self._home_of:  # noqa: SLF001
            self.add(stage, Content.STATE, weights.shard)

    def add(self, stage: int, content: Content, tensor: Tensor) -> None:
        """Take over a tensor of a stage, which is at rest, and with it all of its storage; it comes to rest as well.

        Raises:
            RunError: the budget has no room for it.
        """
        size = tensor.untyped_storage().nbytes()
        self._take(size)
        home = _Home(tensor, self._folder)
        home.leave(with_values=True)
        home.settle()
        self._give(size)
        self._homes.setdefault(stage, {}).setdefault(content, []).append(home)
        self._home_of[home.address] = home
        self._here[stage] = NOTHING

    def at_rest(self, tensor: Tensor) -> Tensor:
        """The view of what is at rest that corresponds to a view of what can be on the device.

        Right for what was at rest last; what is on the device may have changed since.
        """
        home = self._home_of[tensor.untyped_storage()._cdata]  # noqa: SLF001
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(home.rest.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def now(self, stage: int, content: Content, tensor: Tensor) -> Tensor:
        """A view of some of a stage: itself if it is on the device, else of what is at rest.

        The content is not on its way.
        """
        return tensor if content in self._here[stage] else self.at_rest(tensor)

    def amounts(self, stage: int) -> Amounts:
        """Bytes of what there is of a stage."""
        sizes = {part: sum(home.size for home in homes) for part, homes in self._homes[stage].items()}
        return Amounts(**{part.name.lower(): size for part, size in sizes.items() if part.name is not None})

    def begin(self, settle: Callable[[], None] = lambda: None) -> None:
        """Before a step whose lanes move the stages: count the peak anew.

        Args:
            settle: waits for the stages that these lanes are moving out.
        """
        self.peak_bytes, self.settle = self._live_bytes, settle

    def bring(self, stage: int, held: Content, brought: Content) -> None:
        """Make room for some of a stage on the device, and fill some of that.

        Raises:
            RunError: there is no room.
        """
        self._take(int(self.amounts(stage).of(held)))
        self._here[stage] = held
        for part, home in self._parts(stage, held):
            home.bring(with_values=part in brought)

    def leave(self, stage: int, taken: Content) -> None:
        """Give the stage's room on the device back; some of what is there comes to rest, the rest is forgotten."""
        held, self._here[stage] = self._here[stage], NOTHING
        for part, home in self._parts(stage, held):
            home.leave(with_values=part in taken)
        self._give(int(self.amounts(stage).of(held)))

    @contextmanager
    def visit(self, stage: int, held: Content, taken: Content = NOTHING) -> Iterator[None]:
        """Outside a step, have some of a stage on the device meanwhile; after an error nothing of it comes to rest."""
        self.bring(stage, held, held)
        try:
            yield
        except BaseException:
            self.leave(stage, NOTHING)
            raise
        self.leave(stage, taken)
        for _, home in self._parts(stage, taken):
            home.settle()

    def forget(self) -> None:
        """After a step that failed: everything is at rest again, as it was there."""
        for stage, held in self._here.items():
            if held:
                self.leave(stage, NOTHING)

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Count bytes of something else on the device meanwhile.

        Raises:
            RunError: there is no room.
        """
        self._take(size)
        try:
            yield
        finally:
            self._give(size)

    def _parts(self, stage: int, held: Content) -> Iterator[tuple[Content, _Home]]:
        for part, homes in self._homes[stage].items():
            if part in held:
                for home in homes:
                    yield part, home

    def _take(self, size: int) -> None:
        with self._lock:
            if self._live_bytes + size > self.budget:
                raise RunError(
                    f"stages have {self._live_bytes:,} bytes on the device and take {size:,} more, but the budget is "
                    f"{self.budget:,}"
                )
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _give(self, size: int) -> None:
        with self._lock:
            self._live_bytes -= size
