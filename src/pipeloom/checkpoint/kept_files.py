"""The state of a run in shared memory: a file for each rank, with the last two states. Without torch.

A rank writes its newer state over the older of the two. Between two states all ranks exchange numbers, so the older one
that a rank overwrites is complete on no rank alone: there is always a step whose state all ranks have.

A file begins with its description as JSON; at ``_CELLS`` is the step of each of the two states, 0 while it is written;
behind it the description of each state, then the tensors of the first and of the second one.
"""

import json
import mmap
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import CheckpointInfo
from pipeloom.errors import HostError, UserError
from pipeloom.system.files import parse_json
from pipeloom.system.host_memory import available_memory
from pipeloom.system.room import take_room
from pipeloom.system.temporary import SHARED_MEMORY
from pipeloom.terminal.words import format_bytes

NUM_STATES = 2
_CELLS = 1 << 22
_INFO_BYTES = 1 << 20
_INFOS = _CELLS + 4096
_TENSORS = _INFOS + NUM_STATES * _INFO_BYTES
_ALIGNMENT = 64


@dataclass(frozen=True)
class KeptTensor:
    """Elements of a tensor in a file; the interval and the part as in ``training.checkpoints.boxes.Elements``.

    Attributes:
        key: of the tensor, as in a checkpoint.
        dtype: its name in torch.
        whole, corner, part, first: place of the elements.
        count: number of elements.
        offset: in bytes, from the begin of a state.
    """

    key: str
    dtype: str
    whole: tuple[int, ...]
    corner: tuple[int, ...]
    part: tuple[int, ...]
    first: int
    count: int
    offset: int


class KeptFile:
    """The file of a rank.

    Args:
        file: exists, as ``create`` makes it.

    Attributes:
        tensors: what each state has.
        state_bytes: of a state.
    """

    def __init__(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        head = parse_json(self._memory[:_CELLS].split(b"\0", 1)[0].decode())
        self.state_bytes: int = head["state_bytes"]
        self.tensors = tuple(map(_tensor, head["tensors"]))
        self._steps = memoryview(self._memory)[_CELLS : _CELLS + 8 * NUM_STATES].cast("q")

    @classmethod
    def create(cls, file: Path, tensors: Sequence[KeptTensor], state_bytes: int) -> "KeptFile":
        """Make the file, and take its memory now.

        Raises:
            OSError: there is no room.
        """
        text = json.dumps({"state_bytes": state_bytes, "tensors": [asdict(one) for one in tensors]}).encode()
        assert len(text) < _CELLS, "too many tensors for the head of the file"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            take_room(descriptor, _TENSORS + NUM_STATES * state_bytes)
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)
        return cls(file)

    @property
    def steps(self) -> tuple[int, ...]:
        """Step of each state; 0 for one that is not complete."""
        return tuple(self._steps)

    def forget_after(self, step: int) -> None:
        """Drop states of later steps."""
        for index, one in enumerate(self.steps):
            if one > step:
                self._steps[index] = 0

    def begin(self) -> int:
        """Choose the older state to write over; returns its index."""
        index = min(range(NUM_STATES), key=lambda one: self._steps[one])
        self._steps[index] = 0
        return index

    def end(self, index: int, info: CheckpointInfo) -> None:
        """Note that the tensors of a state are written."""
        text = json.dumps(asdict(info)).encode()
        assert len(text) < _INFO_BYTES, "the position in the text is too long"
        begin = _INFOS + index * _INFO_BYTES
        self._memory[begin : begin + len(text) + 1] = text + b"\0"
        # Last: this is what makes the state complete.
        self._steps[index] = info.step

    def info(self, step: int) -> CheckpointInfo:
        """Description of a complete state."""
        begin = _INFOS + self.steps.index(step) * _INFO_BYTES
        return CheckpointInfo(**parse_json(self._memory[begin : begin + _INFO_BYTES].split(b"\0", 1)[0].decode()))

    def memory(self, index: int) -> memoryview:
        """The bytes of the tensors of a state."""
        begin = _TENSORS + index * self.state_bytes
        return memoryview(self._memory)[begin : begin + self.state_bytes]


def _tensor(values: dict[str, Any]) -> KeptTensor:
    found: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
    return KeptTensor(**found)


def aligned(size: int) -> int:
    """The size of a tensor in a file."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05}"


def newest_kept(folder: Path, num_ranks: int) -> int | None:
    """The newest step whose state all ranks of a folder have; ``None`` for none."""
    common: set[int] | None = None
    for rank in range(num_ranks):
        try:
            steps = {step for step in KeptFile(file_of(folder, rank)).steps if step}
        # A rank that ended before it made its file, or in the middle of that.
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None
        common = steps if common is None else common & steps
    return max(common, default=None) if common else None


def check_room(needed_bytes: float, place: Path = SHARED_MEMORY) -> None:
    """Refuse a run whose states do not fit into shared memory.

    Args:
        needed_bytes: of both states of all ranks of this host.
        place: the file system.

    Raises:
        HostError: names both numbers.
    """
    if not place.is_dir():
        raise HostError(f"restart.times needs a file system in memory at {place}, found none; leave it out")
    free = min(shutil.disk_usage(place).free, available_memory().size_bytes)
    if needed_bytes > free:
        raise HostError(
            f"restart.times keeps the last {NUM_STATES} states of each rank in {place}, which takes about "
            f"{format_bytes(needed_bytes, rounds_up=True)}; {format_bytes(free)} are free there; make it larger "
            "(mount -o remount,size=...), use a smaller model or more hosts, or leave restart.times out"
        )


def head_bytes(num_ranks: int) -> int:
    """Bytes of the files of so many ranks beside their tensors."""
    return num_ranks * _TENSORS
