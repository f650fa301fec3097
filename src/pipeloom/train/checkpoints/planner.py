"""What each rank writes into a checkpoint and reads from it, for torch.distributed.checkpoint.

A rank holds a contiguous part of a stage's flat buffer, which cuts parameters anywhere. Here every such cut becomes
boxes of the whole parameter, so that what one layout wrote can be read by any other. The state that is saved or loaded
maps each key to the rank's elements of that tensor, as one flat tensor; an interval for each key selects them.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pipeloom.errors import UserError
from pipeloom.train.checkpoints.boxes import Box, Interval

_MOST_NAMED = 5
"""Wrong keys of one sort that a message names; of another model thousands are wrong, all for the same few reasons."""


class IntervalSavePlanner(DefaultSavePlanner):
    """Writes a rank's intervals.

    Before anything is written, torch's own planner proves that the boxes of all ranks cover every tensor exactly once.

    Args:
        intervals: for each key of the state, which elements of the whole tensor it holds.
    """

    def __init__(self, intervals: Mapping[str, Interval]) -> None:
        # The state is flat already; flattening would only add a mapping of names to the metadata.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._intervals = intervals
        self._views: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        items = []
        for key, interval in self._intervals.items():
            values: Tensor = self.state_dict[key]
            for box, view in _views(interval, values):
                # By key and offset, as DCP identifies the chunks of a tensor.
                index = MetadataIndex(key, box.begin)
                self._views[index] = view
                properties = TensorProperties(dtype=values.dtype)
                data = TensorWriteData(_chunk(box), properties, torch.Size(interval.whole))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The elements of a box."""
        return self._views[index]


class IntervalLoadPlanner(DefaultLoadPlanner):
    """Reads a rank's intervals.

    Args:
        intervals: for each key of the state, which elements of the whole tensor it holds.
        expected: shape of every tensor that the checkpoint has to have, those of other ranks included.
    """

    def __init__(self, intervals: Mapping[str, Interval], expected: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._intervals = intervals
        self._expected = expected
        self._views: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """An item for each overlap of a box here with a box that was written.

        Raises:
            UserError: the checkpoint is not of these tensors.
        """
        assert self.metadata is not None
        # Each rank compares all tensors and not only its own, so that one message names everything that is wrong.
        problems = differences(self._expected, self.metadata)
        if problems:
            raise UserError("\n".join(["the checkpoint is not of this model:", *(f"  - {one}" for one in problems)]))
        items: list[ReadItem] = []
        for key, interval in self._intervals.items():
            boxes = list(_views(interval, self.state_dict[key]))
            self._views |= {MetadataIndex(key, box.begin): view for box, view in boxes}
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, [_chunk(box) for box, _ in boxes])
            # create_read_items_for_chunk_list returns overlaps, and says nothing of elements that no chunk has.
            if sum(prod(item.lengths) for item in found) != interval.count:
                raise UserError(f"the checkpoint is not complete: elements of {key} are missing; use another one")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the elements of a box go."""
        return self._views[index]


def differences(expected: Mapping[str, tuple[int, ...]], metadata: Metadata) -> list[str]:
    """How the tensors of a checkpoint differ from those that are expected, all in a few sentences; empty if not at all.

    Args:
        expected: shape of each tensor by key.
        metadata: of the checkpoint.
    """
    stored = {
        key: tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        for key, found in metadata.state_dict_metadata.items()
    }
    shapes = [
        f"{key} {_as_shape(stored[key])} instead of {_as_shape(shape)}"
        for key, shape in expected.items()
        if key in stored and stored[key] != shape
    ]
    sorts = {
        "it lacks": sorted(expected.keys() - stored.keys()),
        "nothing here has the name of": sorted(stored.keys() - expected.keys()),
        "it has another shape for": shapes,
    }
    return [f"{sort} {_listed(names)}" for sort, names in sorts.items() if names]


def _as_shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _views(interval: Interval, values: Tensor) -> list[tuple[Box, Tensor]]:
    """The boxes of an interval, each with its elements among the flat values."""
    boxes = interval.boxes()
    # Views: what is loaded goes straight into the weights, and what is saved is copied nowhere.
    parts = values.split([prod(box.size) for box in boxes])
    return [(box, part.view(box.size)) for box, part in zip(boxes, parts, strict=True)]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.size))
