"""Stages of a model that is larger than its device: each is at rest in host memory, or on the device.

A stage consists of a few storages, of which all its tensors are views: flat weights, flat gradient, optimizer state. A
storage at rest has no memory on the device; views of it, also those that autograd holds from forward to backward, are
valid again when it is back. On a CPU both memories are host memory; moves, frees and counts are the same.
"""

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
from pipeloom.system.room import take_room
from pipeloom.terminal.words import format_bytes


def _take_room(file: int, size: int, folder: Path) -> None:
    """Take the room of an empty file.

    Raises:
        RunError: the disk lacks the space.
    """
    try:
        take_room(file, size)
    except OSError as error:
        words = f"schedule.swap_folder: {folder} has no room for {format_bytes(size)} more: {error.strerror}"
        raise RunError(f"{words}; use a folder on a larger disk, or leave it out") from None


class _Home:
    """A storage of the device with its copy in host memory.

    Args:
        tensor: a view of the whole storage, with initial values; its memory is freed.
        folder: of the mapped file that holds the copy; ``None`` for host memory.
    """

    def __init__(self, tensor: Tensor, folder: Path | None) -> None:
        self._storage = tensor.untyped_storage()
        self.size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage, 0, (self.size,), (1,))
        self._is_cuda = tensor.device.type == "cuda"
        if folder is not None:
            with NamedTemporaryFile(dir=folder) as file:  # loses its name here, and its space with the mapping
                _take_room(file.fileno(), self.size, folder)
                # Shared: writes go to the file, so the kernel may evict the pages under memory pressure.
                self.rest = torch.from_file(file.name, shared=True, size=self.size, dtype=torch.uint8)
        else:
            # Pinned: copies from pageable memory block the host and cannot run concurrently with compute.
            self.rest = torch.empty(self.size, dtype=torch.uint8, pin_memory=self._is_cuda)

    @property
    def address(self) -> int:
        """A unique key of the storage."""
        return self._storage._cdata  # noqa: SLF001

    def bring(self, *, with_values: bool) -> None:
        """Allocate the storage on the device; copy its values, or leave them uninitialized."""
        # The same storage object: parameters, and views that autograd keeps, stay valid.
        self._storage.resize_(self.size)
        if with_values:
            self._bytes.copy_(self.rest, non_blocking=True)

    def leave(self, *, with_values: bool) -> None:
        """Free the storage on the device; copy its values to the host first, or discard them."""
        if with_values:
            self.rest.copy_(self._bytes, non_blocking=True)
        if self._is_cuda:  # the allocator must wait for the copy, and for compute, before it reuses the memory
            self._bytes.record_stream(torch.cuda.current_stream(self._bytes.device))
            self._bytes.record_stream(torch.cuda.default_stream(self._bytes.device))
        self._storage.resize_(0)

    def settle(self) -> None:
        """Block the host until the copies of the current stream are finished."""
        if self._is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()


class StageStore:
    """The stages of one rank, each at rest or on the device, and their memory on the device.

    Args:
        budget: most bytes of stages on the device at the same time.
        folder: of files for stages at rest. The files have no name, so none remains when the process ends in any
            way. ``None`` for host memory, pinned on CUDA.

    Attributes:
        budget: as given.
        peak_bytes: peak on the device since ``begin``.
        settle: waits for stages that are being moved out; see ``begin``.
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
        """Take a stage from the device and move it to host memory.

        Raises:
            RunError: it exceeds the budget.
        """
        weights.is_swapped = True
        if weights.frozen is not None:
            assert not weights.order.size, "a stage in which some parameters are frozen is not swapped"
            self.add(stage, Content.WEIGHTS, weights.frozen.whole)
            return
        parts = weights.parts  # creates the views, while the storages have memory
        assert parts, "a stage has parameters"
        self.add(stage, Content.WEIGHTS, weights.whole)
        self.add(stage, Content.GRADIENT, weights.gradient)
        if weights.shard.untyped_storage()._cdata not in self._home_of:  # noqa: SLF001
            self.add(stage, Content.STATE, weights.shard)

    def add(self, stage: int, content: Content, tensor: Tensor) -> None:
        """Take a tensor of a stage at rest, with its whole storage, and move it to host memory, too.

        Raises:
            RunError: it exceeds the budget.
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
        """The view of host memory that corresponds to a view of a device storage; other tensors as they are.

        It has the values of the last move out; those on the device may have changed since.
        """
        home = self._home_of.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        if home is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(home.rest.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def now(self, stage: int, content: Content, tensor: Tensor) -> Tensor:
        """The tensor if its content is on the device, otherwise the view of host memory.

        The content must not be in transfer.
        """
        return tensor if content in self._here[stage] else self.at_rest(tensor)

    def amounts(self, stage: int) -> Amounts:
        """Bytes of the contents of a stage."""
        sizes = {part: sum(home.size for home in homes) for part, homes in self._homes[stage].items()}
        return Amounts(**{part.name.lower(): size for part, size in sizes.items() if part.name is not None})

    def begin(self, settle: Callable[[], None] = lambda: None) -> None:
        """Reset the peak before a step.

        Args:
            settle: waits for stages that the step's lanes are moving out.
        """
        self.peak_bytes, self.settle = self._live_bytes, settle

    def bring(self, stage: int, held: Content, brought: Content) -> None:
        """Allocate contents of a stage on the device, and copy some of them from the host.

        Raises:
            RunError: they exceed the budget.
        """
        self._take(int(self.amounts(stage).of(held)))
        self._here[stage] = held
        for part, home in self._parts(stage, held):
            home.bring(with_values=part in brought)

    def leave(self, stage: int, taken: Content) -> None:
        """Free a stage on the device; copy some contents to the host first, discard the others."""
        held, self._here[stage] = self._here[stage], NOTHING
        for part, home in self._parts(stage, held):
            home.leave(with_values=part in taken)
        self._give(int(self.amounts(stage).of(held)))

    @contextmanager
    def visit(self, stage: int, held: Content, taken: Content = NOTHING) -> Iterator[None]:
        """Context with contents of a stage on the device, outside a step; after an error nothing is copied back."""
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
        """After a failed step: discard everything on the device; host memory is unchanged."""
        for stage, held in self._here.items():
            if held:
                self.leave(stage, NOTHING)

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Context in which other memory of the device counts against the budget.

        Raises:
            RunError: it exceeds the budget.
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
