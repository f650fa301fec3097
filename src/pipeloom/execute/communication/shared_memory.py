"""Messages between two ranks of one host through memory that both map, without threads.

The sender copies a tensor into a block of shared memory and writes a line to a pipe. The receiver reads the line,
copies the block into a tensor when that is needed, and returns the block through a second pipe. The kernel orders the
copies by the pipes, wakes a receiver that waits, and closes the pipes of a process that ends, so that its peer
notices.
"""

import fcntl
import math
import mmap
import os
import resource
import secrets
import select
import socket
import struct
import termios
import time
from collections import defaultdict, deque
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import BoundaryError, PeerLostError, RunError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.system.room import take_room
from pipeloom.terminal.words import format_bytes

_LINE = struct.Struct("=qqqd")
"""A message: offset and size of its block, its bytes, and the sender's clock, which all processes of a host share."""
_MARK = struct.Struct("=q")
"""What a connection begins with: the number of the sender."""
_PLACE = struct.Struct("=q")
"""A block that is returned: its offset."""
_KEPT_BLOCKS, _KEPT_BYTES = 8, 256 * 1024
"""Blocks are returned together when there are so many, or so many bytes."""
_SPIN_S = 5e-5
"""A receiver looks for so long before it sleeps, where its last wait was short, too: waking it takes as long."""
_MOST_LINES = 1024
"""Lines of one read: whole lines, since a write of less than a page is never divided."""
_SIZES_OF_AN_OCTAVE = 8
"""Sizes of blocks from one power of two to the next."""
_Line = tuple[int, int, int, float]


class Ends(NamedTuple):
    """File descriptors of one end of a directed edge.

    Attributes:
        memory: of the blocks.
        messages: pipe from sender to receiver.
        returns: pipe from receiver to sender.
    """

    memory: int
    messages: int
    returns: int

    def close(self) -> None:
        """Close them; the other end reads the end of its pipe."""
        for one in self:
            os.close(one)


class Listener:
    """The receiver's offer to share memory: a Unix socket with a random name that only this network namespace has.

    Attributes:
        name: ``uint8[32]`` for the sender; zeros where it is not open, or where the system has no such memory.

    Args:
        is_open: whether to offer it.
        senders: that may connect before the first is accepted.
    """

    NAME_BYTES = 32

    def __init__(self, *, is_open: bool, senders: int = 1) -> None:
        self._socket: socket.socket | None = None
        self.name = torch.zeros(self.NAME_BYTES, dtype=torch.uint8)
        if is_open and hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED"):
            name = secrets.token_hex(self.NAME_BYTES // 2).encode()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(_address(name))
            self._socket.listen(senders)
            self.name = torch.tensor(list(name), dtype=torch.uint8)

    def accept(self, timeout_s: float) -> tuple[int, Ends]:
        """Take the number and the descriptors of a sender that has connected.

        Raises:
            PeerLostError: it closed the connection.
        """
        assert self._socket is not None, "the sender found no socket to connect to"
        self._socket.settimeout(timeout_s)
        while True:
            connection, _ = self._socket.accept()
            with connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                # Any process of this host may connect; only one of this user is the rank that was given the name.
                if struct.unpack("3i", credentials)[1] == os.geteuid():
                    mark, descriptors, _, _ = socket.recv_fds(connection, _MARK.size, len(Ends._fields))
                    if len(descriptors) != len(Ends._fields) or len(mark) != _MARK.size:
                        raise PeerLostError("a rank of this host closed the connection")
                    ends = Ends(*descriptors)
                    os.set_blocking(ends.messages, False)
                    return _MARK.unpack(mark)[0], ends

    def close(self) -> None:
        """End the offer."""
        if self._socket is not None:
            self._socket.close()


def connect(name: Tensor, number: int = 0) -> Ends | None:
    """Share memory with the receiver that listens under a name.

    Args:
        name: of the receiver.
        number: of this sender, for a receiver with several.

    Returns:
        ``None`` if the receiver is not on this host, or if this process may not write large files (``ulimit -f``):
        the system applies that limit to shared memory, too, and its blocks are made while the schedule runs.
    """
    if not name.any() or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with connection:
        try:
            connection.connect(_address(bytes(name.tolist())))
        except OSError:  # another host, or another network of this host
            return None
        memory = os.memfd_create("pipeloom-messages", os.MFD_CLOEXEC)
        (messages_out, messages_in), (returns_out, returns_in) = os.pipe(), os.pipe()
        socket.send_fds(connection, [_MARK.pack(number)], [memory, messages_out, returns_in])
        os.close(messages_out)
        os.close(returns_in)
        os.set_blocking(returns_out, False)
        return Ends(memory, messages_in, returns_out)


def _address(name: bytes) -> bytes:
    # A zero byte first: no file, and visible in one network namespace, so that ranks on emulated hosts do not meet.
    return b"\0pipeloom-" + name


class _Block:
    """A part of the shared memory, as this process maps it, for one message at a time.

    Args:
        memory: file descriptor of the shared memory.
        offset: of the block.
        size: in bytes.
    """

    __slots__ = ("_bytes", "_dtype", "_shape", "_tensor", "offset", "size")

    def __init__(self, memory: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self._bytes = self._tensor = torch.frombuffer(mmap.mmap(memory, size, offset=offset), dtype=torch.uint8)
        self._shape, self._dtype = tuple(self._bytes.shape), torch.uint8

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The block as a tensor; it is usually that of the message before."""
        if self._dtype is not dtype or self._shape != shape:
            size = math.prod(shape) * dtype.itemsize
            self._tensor = self._bytes[:size].view(dtype).view(shape)
            self._shape, self._dtype = tuple(shape), dtype
        return self._tensor


@lru_cache(maxsize=1024)
def _block_size(num_bytes: int) -> int:
    """The size of the block of a message: few sizes, so that messages of many sizes use the same blocks."""
    pages = -(-max(1, num_bytes) // mmap.ALLOCATIONGRANULARITY)
    step = max(1, (1 << (pages.bit_length() - 1)) // _SIZES_OF_AN_OCTAVE)
    return -(-pages // step) * step * mmap.ALLOCATIONGRANULARITY


class Sent(UnderWay):
    """A message that its sender has copied."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin, self.end = begin_s, end_s

    def is_done(self) -> bool:
        """Always: the sender may change its tensor."""
        return True


class SharedSender:
    """The sending end of a directed edge.

    Args:
        ends: from ``connect``.
        peer: the receiving process, for messages.
    """

    def __init__(self, ends: Ends, peer: str) -> None:
        self._ends, self._peer = ends, peer
        self._size = 0
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._used: dict[int, _Block] = {}

    def send(self, tensor: Tensor) -> Sent:
        """Send a copy of a tensor.

        Raises:
            PeerLostError: the other rank ended.
            RunError: there is no memory for another message.
        """
        begin_s = time.perf_counter()
        num_bytes = tensor.nbytes
        size = _block_size(num_bytes)
        blocks = self._free[size]
        block = blocks.pop() if blocks else self._returned(size) or self._grown(size, num_bytes)
        self._used[block.offset] = block
        block.view(tensor.shape, tensor.dtype).copy_(tensor)
        end_s = time.perf_counter()
        try:
            os.write(self._ends.messages, _LINE.pack(block.offset, block.size, num_bytes, end_s))
        except OSError as error:
            raise PeerLostError(f"{self._peer} closed the connection: {error}") from error
        return Sent(begin_s, end_s)

    def _returned(self, size: int) -> _Block | None:
        """A block that the receiver has returned, of this size or at most twice as large; ``None`` without one."""
        with suppress(BlockingIOError):
            for (offset,) in _PLACE.iter_unpack(os.read(self._ends.returns, _MOST_LINES * _PLACE.size)):
                block = self._used.pop(offset)
                self._free[block.size].append(block)
        found = min((one for one, blocks in self._free.items() if blocks and size <= one <= 2 * size), default=None)
        return None if found is None else self._free[found].pop()

    def _grown(self, size: int, num_bytes: int) -> _Block:
        """A new block: the receiver still has all others, as many as the schedule lets the sender be ahead."""
        offset = self._size
        try:
            take_room(self._ends.memory, size, offset)
        except OSError as error:
            message = f"a message of {format_bytes(num_bytes)} to {self._peer}"
            raise RunError(f"there is no shared memory for {message}: {error.strerror}") from None
        self._size += size
        return _Block(self._ends.memory, offset, size)

    def end(self) -> None:
        """Close this end."""
        self._ends.close()


class SharedReceiver:
    """The receiving end of a directed edge.

    Args:
        ends: from ``Listener.accept``.
        peer: the sending process, for messages.
    """

    def __init__(self, ends: Ends, peer: str) -> None:
        self._ends, self._peer = ends, peer
        self._blocks: dict[int, _Block] = {}
        self._arrived: deque[_Line] = deque()
        self._open: deque[Receipt] = deque()
        self._poll = select.poll()
        self._poll.register(ends.messages, select.POLLIN)
        self._has_ended = False
        self._used: list[int] = []
        self._used_bytes = 0
        self._spins = True

    def receive(self, spec: TensorSpec) -> "Receipt":
        """Receive the next tensor, into a fresh buffer when it is taken."""
        receipt = Receipt(self, spec)
        if self._arrived:
            receipt.arrive(self._arrived.popleft())
        else:
            self._open.append(receipt)
        return receipt

    def receive_like(self, tensor: Tensor) -> "Receipt":
        """As ``receive``, of the shape and the dtype of a tensor."""
        return self.receive(TensorSpec.of(tensor))

    def look(self) -> None:
        """Assign messages that have arrived to receives in their order."""
        try:
            found = os.read(self._ends.messages, _MOST_LINES * _LINE.size)
        except BlockingIOError:
            return
        self._has_ended = not found
        for line in _LINE.iter_unpack(found):
            if self._open:
                self._open.popleft().arrive(line)
            else:
                self._arrived.append(line)

    def wait_for(self, receipt: "Receipt", timeout_s: float) -> bool:
        """Wait until the message of a receive has arrived; ``False`` if that takes too long."""
        begin_s = now_s = time.perf_counter()
        while receipt.line is None and not self._has_ended:
            if self._spins and now_s - begin_s <= _SPIN_S:
                os.sched_yield()  # to the sender, if there are fewer cores than ranks
            else:
                # Whole milliseconds, rounded up; ready at once where the other rank has ended.
                left_s = begin_s + timeout_s - now_s
                if left_s <= 0 or not self._poll.poll(left_s * 1e3 + 1):
                    return False
            self.look()
            now_s = time.perf_counter()
        self._spins = now_s - begin_s < 2 * _SPIN_S
        return True

    def has_arrived(self, receipt: "Receipt") -> bool:
        """Whether the message of a receive is in the pipe or has been read; other threads may call it."""
        waiting = list(self._open)
        if receipt.line is not None or receipt not in waiting:
            return True
        (unread,) = struct.unpack("i", fcntl.ioctl(self._ends.messages, termios.FIONREAD, bytes(4)))
        return waiting.index(receipt) < unread // _LINE.size

    def view(self, line: _Line | None, spec: TensorSpec) -> Tensor:
        """The tensor of a message, in its block; see ``give_back``."""
        if line is None:
            raise PeerLostError(f"{self._peer} closed the connection")
        offset, size, num_bytes, _ = line
        if num_bytes != spec.nbytes:
            raise BoundaryError(f"{self._peer} sent {num_bytes} bytes, but {spec} was agreed on")
        block = self._blocks.get(offset)
        if block is None:
            block = self._blocks[offset] = _Block(self._ends.memory, offset, size)
        return block.view(spec.shape, spec.dtype)

    def give_back(self, line: _Line | None) -> None:
        """Let the sender use the block of a message again."""
        assert line is not None, "nothing has arrived"
        self._used.append(line[0])
        self._used_bytes += line[2]
        if len(self._used) >= _KEPT_BLOCKS or self._used_bytes >= _KEPT_BYTES:
            with suppress(BrokenPipeError):  # a sender that has ended needs no block
                os.write(self._ends.returns, b"".join(map(_PLACE.pack, self._used)))
            self._used.clear()
            self._used_bytes = 0

    @property
    def has_ended(self) -> bool:
        """Whether the sender has ended, and all that it sent has been read."""
        return self._has_ended

    def end(self) -> None:
        """Close this end."""
        self._ends.close()


class Receipt(UnderWay):
    """A receive. It is finished when its message has arrived.

    Attributes:
        line: of the message; ``None`` before it has arrived.
    """

    def __init__(self, receiver: SharedReceiver, spec: TensorSpec) -> None:
        self._receiver, self._spec = receiver, spec
        self.begin = self.end = time.perf_counter()
        self.line: _Line | None = None

    def arrive(self, line: _Line) -> None:
        """Assign the message; the receive ended when the sender had copied it, if it was posted by then."""
        self.line, self.end = line, max(self.begin, line[3])

    def is_done(self) -> bool:
        """Whether the message has arrived, or none will."""
        if self.line is None:
            self._receiver.look()
        return self.line is not None or self._receiver.has_ended

    def has_passed(self) -> bool:
        """Whether the message has arrived, whether or not the rank has looked."""
        return self._receiver.has_arrived(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the message; ``False`` if that takes longer than ``timeout_s``."""
        return self._receiver.wait_for(self, timeout_s)

    def take(self) -> Tensor:
        """The tensor, once.

        Raises:
            PeerLostError: the other rank ended.
            BoundaryError: it sent another number of bytes.
        """
        tensor = self._receiver.view(self.line, self._spec).clone()
        self._receiver.give_back(self.line)
        return tensor

    def view(self) -> Tensor:
        """The tensor in the memory of its message, until ``give_back``; errors as of ``take``."""
        return self._receiver.view(self.line, self._spec)

    def give_back(self) -> None:
        """Let the sender use that memory again."""
        self._receiver.give_back(self.line)
