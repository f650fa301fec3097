"""Tensors that autograd saves for the backward of a micro-batch on a stage: collected, moved out, restored.

Saved-tensor hooks put a box between autograd and each storage, so that a storage can move while the graph stays.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

_ALIGNMENT = 64
"""Alignment of storages in the packed memory, in bytes: enough for vector loads and any dtype."""
_MESSAGES = 32
"""Approximate number of messages of a parcel. While a message is packed, its bytes are in memory twice."""
_MESSAGE_BYTES = 65536
"""Smallest size of a message, in bytes."""


class _Box:
    """A storage that autograd saved, once for all tensors that are views of it.

    Attributes:
        storage: contains its bytes now; ``None`` while they are moved out.
        begin: offset of its bytes in the storage.
        nbytes: its size.
    """

    __slots__ = ("begin", "nbytes", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.begin = 0
        self.nbytes = storage.nbytes()


class _Handle(NamedTuple):
    """What autograd holds in place of a tensor."""

    box: _Box
    dtype: torch.dtype
    first: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Layout of storages in one contiguous memory, and its partition into messages.

    Attributes:
        begins: for each storage its offset in bytes.
        total_bytes: of the memory.
        messages: for each message its byte range; only alignment gaps are left out.
        members: for each message its range of storages.
    """

    begins: tuple[int, ...]
    total_bytes: int
    messages: tuple[tuple[int, int], ...]
    members: tuple[tuple[int, int], ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, sizes: tuple[int, ...]) -> "Packing":
        """The packing of storages of given sizes in bytes. A large storage is one message, sent without a copy."""
        begins: list[int] = []
        behind = 0
        for size in sizes:
            begins.append(behind)
            behind += -(-size // _ALIGNMENT) * _ALIGNMENT
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        most = max(_MESSAGE_BYTES, behind // _MESSAGES)
        members: list[tuple[int, int]] = []
        first = 0
        for number, end in enumerate(ends):
            is_last = number + 1 == len(sizes)
            if is_last or end - begins[first] >= most or sizes[number + 1] >= most:
                members.append((first, number + 1))
                first = number + 1
        messages = tuple((begins[first], ends[behind - 1]) for first, behind in members)
        return cls(tuple(begins), behind, messages, tuple(members))


class Parcel:
    """Tensors that autograd saves for a micro-batch or slice and that have no other owner.

    The storage's reference count after the forward decides: parameters, tied and cached tensors, casts that are kept
    elsewhere, and the batch have other references, and moving them would free nothing. The stage's input and output
    have other references for a moment longer, and move nevertheless.

    Args:
        owns_input: whether only the backward needs the stage's input, as for a received one.
    """

    def __init__(self, *, owns_input: bool) -> None:
        self._owns_input = owns_input
        self._boxes: list[_Box] = []
        self._by_storage: dict[int, _Box] = {}
        self.packing = Packing.of(())

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that move."""
        return sum(box.nbytes for box in self._boxes)

    def saving(self) -> AbstractContextManager[None]:
        """Context for the forward."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "_Handle | Tensor":
        # Subclasses and sparse tensors are more than a view of one storage.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        box = self._by_storage.get(storage._cdata)  # noqa: SLF001  names the storage as long as the box holds it
        if box is None:
            box = self._by_storage[storage._cdata] = _Box(storage)  # noqa: SLF001
            self._boxes.append(box)
        return _Handle(box, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Take one tensor, in place of a forward; returns a function that returns it after ``restore``."""
        handle = self._pack(tensor)
        self.close(tensor, tensor)
        return lambda: _unpack(handle)

    def close(self, tensor: Tensor, output: Tensor) -> None:
        """Decide what moves, after the forward, from the stage's input and output."""
        given, made = (one.untyped_storage()._cdata for one in (tensor, output))  # noqa: SLF001
        device = output.device
        # A stage may return a view of its input, whose storage has other owners.
        own = {made, given} if self._owns_input else {made} - {given}
        moving = []
        for name, box in self._by_storage.items():
            is_ours = name in own or (name != given and torch._C._storage_Use_Count(name) == 1)  # noqa: SLF001
            if box.nbytes > 0 and is_ours and _device_of(box) == device:
                moving.append(box)
        self._boxes = moving
        self._by_storage.clear()
        self.packing = Packing.of(tuple(box.nbytes for box in moving))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Each storage as ``uint8[n]`` with its offset in the packing; the parcel drops its reference."""
        for box, begin in zip(self._boxes, self.packing.begins, strict=True):
            yield begin, _let_go(box)

    def messages(self, count: Callable[[int], None]) -> Iterator[Tensor]:
        """The messages of the packing, ``uint8[n]``; the parcel drops its references to their storages.

        Args:
            count: called with changes of memory in bytes; a message counts until the next one is requested.
        """
        for (begin, end), (first, behind) in zip(self.packing.messages, self.packing.members, strict=True):
            if behind == first + 1:
                yield _let_go(self._boxes[first])
            else:
                yield self._packed(range(first, behind), begin, end, count)
            count(begin - end)

    def _packed(self, members: range, begin: int, end: int, count: Callable[[int], None]) -> Tensor:
        """Some storages in one message."""
        message: Tensor | None = None
        for number in members:
            piece = _let_go(self._boxes[number])
            if message is None:
                message = torch.empty(end - begin, dtype=torch.uint8, device=piece.device)
                count(end - begin)
            at = self.packing.begins[number] - begin
            message[at : at + piece.numel()].copy_(piece)
            count(-piece.numel())
        assert message is not None
        return message

    def restore(self, memory: Tensor) -> None:
        """Restore all storages, from memory with the layout of the packing."""
        storage = memory.untyped_storage()
        for box, begin in zip(self._boxes, self.packing.begins, strict=True):
            box.storage, box.begin = storage, begin


def _device_of(box: _Box) -> torch.device | None:
    """Device of a box's bytes; some, such as the state of a generator, are on the host although the stage is not."""
    return None if box.storage is None else box.storage.device


def _let_go(box: _Box) -> Tensor:
    storage, box.storage = box.storage, None
    assert storage is not None, "what was taken away is taken away again"
    piece = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]
    piece = piece[box.begin : box.begin + box.nbytes]
    if piece.is_cuda:  # its memory is not used again before this stream has read it
        piece.record_stream(torch.cuda.current_stream(piece.device))
    return piece


def _unpack(handle: "_Handle | Tensor") -> Tensor:
    if isinstance(handle, Tensor):
        return handle
    box, dtype, first, shape, stride = handle
    assert box.storage is not None, "the backward came before what it needs was back"
    tensor = torch.empty(0, dtype=dtype, device=box.storage.device)
    tensor.set_(box.storage, box.begin // dtype.itemsize + first, shape, stride)  # type: ignore[arg-type]
    # a generator reads its state, which compiled recomputation saves, from where the storage begins
    return tensor.clone() if dtype is torch.uint8 and box.begin else tensor


def hollow(tensor: Tensor, output: Tensor) -> "tuple[Tensor, Tensor | GradientEdge]":
    """Input and output as a backward needs them, without their memory.

    Args:
        tensor: the input; a leaf of the graph loses its memory and can still get its gradient.
        output: replaced by its edge of the graph, unless it is a scalar, from which the backward starts.
    """
    # A shape expanded from one element: the stage still counts its bytes when the backward takes it.
    hollowed = tensor.new_empty(()).expand(tensor.shape)
    if tensor.requires_grad:
        tensor.data = hollowed
        hollowed = tensor
    return hollowed, output if output.numel() == 1 else get_gradient_edge(output)
