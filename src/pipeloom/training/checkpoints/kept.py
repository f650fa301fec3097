"""Keeps a rank's state in shared memory, and reads it back under the same or another layout."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.checkpoint.checkpoint_folder import CheckpointInfo
from pipeloom.checkpoint.kept_files import KeptFile, KeptTensor, aligned, file_of
from pipeloom.errors import RunError
from pipeloom.training.checkpoints.boxes import Box, Elements


class Kept:
    """Writes the states of a rank.

    Args:
        folder: in shared memory.
        rank: of this process.
        held: what the rank holds, as in a checkpoint; the tensors of later states have the same sizes.
        step: that the run resumes from. States of later steps in an earlier file of the rank do not count any more:
            with them, a rank could write over the only state that all ranks have.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, folder: Path, rank: int, held: Mapping[str, Elements], step: int = 0) -> None:
        tensors, offset = list[KeptTensor](), 0
        for key, one in held.items():
            dtype = str(one.values.dtype).removeprefix("torch.")
            place = (one.whole, one.corner, one.part, one.first, len(one.values))
            tensors.append(KeptTensor(key, dtype, *place, offset))
            offset += aligned(one.values.numel() * one.values.element_size())
        file = file_of(folder, rank)
        if not file.exists() or KeptFile(file).tensors != tuple(tensors):
            draft = file.with_suffix(".part")
            KeptFile.create(draft, tensors, offset)
            draft.rename(file)
        self._file = KeptFile(file)
        self.forget_after(step)
        self._views = [
            {one.key: values for one, values in _values(self._file, state)} for state in range(len(self._file.steps))
        ]

    def forget_after(self, step: int) -> None:
        """Drop states of later steps."""
        self._file.forget_after(step)

    def keep(self, held: Mapping[str, Elements], info: CheckpointInfo) -> None:
        """Copy the state of a step over the older of the two."""
        state = self._file.begin()
        views = self._views[state]
        for key, one in held.items():
            views[key].copy_(one.values)
        self._file.end(state, info)


def recall(folder: Path, step: int, held: Mapping[str, Elements]) -> CheckpointInfo:
    """Read the state of a step from the files of all ranks that kept it, whatever their layout was.

    Args:
        folder: in shared memory.
        step: whose state all files have.
        held: views to write into.

    Raises:
        RunError: the files lack elements.
    """
    files = [KeptFile(file) for file in sorted(folder.glob("rank-?????"))]
    stored: dict[str, list[Elements]] = {}
    for file in files:
        for one, values in _values(file, file.steps.index(step)):
            elements = Elements(values, one.whole, one.corner, one.part, one.first)
            # Replicas hold the same elements, which need to be read once.
            if not any(_is_same(elements, other) for other in stored.setdefault(one.key, [])):
                stored[one.key].append(elements)
    for key, own in held.items():
        copied = sum(
            _copy(box, view, other, values)
            for other, values in _boxes(stored.get(key, []))
            for box, view in own.boxes()
        )
        if copied != len(own.values):
            raise RunError(f"the state of step {step} in memory lacks elements of {key}")
    return files[0].info(step)


def _boxes(stored: list[Elements]) -> Iterator[tuple[Box, Tensor]]:
    for one in stored:
        yield from one.boxes()


def _is_same(one: Elements, other: Elements) -> bool:
    return (one.corner, one.part, one.first, len(one.values)) == (
        other.corner,
        other.part,
        other.first,
        len(other.values),
    )


def _values(file: KeptFile, state: int) -> Iterator[tuple[KeptTensor, Tensor]]:
    memory = file.memory(state)
    for one in file.tensors:
        dtype = getattr(torch, one.dtype)
        if one.count:
            yield one, torch.frombuffer(memory, dtype=dtype, count=one.count, offset=one.offset)
        else:
            yield one, torch.empty(0, dtype=dtype)


def _copy(box: Box, view: Tensor, other: Box, values: Tensor) -> int:
    """Copy the elements of another box that are in a box; returns their number."""
    inner: list[slice] = []
    outer: list[slice] = []
    count = 1
    for begin, size, its_begin, its_size in zip(box.begin, box.size, other.begin, other.size, strict=True):
        first, end = max(begin, its_begin), min(begin + size, its_begin + its_size)
        if first >= end:
            return 0
        inner.append(slice(first - begin, end - begin))
        outer.append(slice(first - its_begin, end - its_begin))
        count *= end - first
    view[tuple(inner)].copy_(values[tuple(outer)])
    return count
