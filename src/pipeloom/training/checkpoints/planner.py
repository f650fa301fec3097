"""Save and load planners for torch.distributed.checkpoint (DCP): what each rank writes and reads.

A rank holds a contiguous part of a stage's flat buffer, which may begin and end inside a parameter; DCP's shards are
boxes. The planners decompose each part into boxes of the whole parameter, so that any layout can read what another one
wrote. They hold the tensors themselves; the state dict passed to DCP is empty.
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
from pipeloom.training.checkpoints.boxes import Box, Elements
from pipeloom.training.checkpoints.differences import Shapes


class ElementsSavePlanner(DefaultSavePlanner):
    """Writes a rank's elements, by key.

    Before anything is written, DCP's global planner checks that the boxes of all ranks cover every tensor exactly once.
    """

    def __init__(self, elements: Mapping[str, Elements]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._elements = elements
        self._views: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        items: list[WriteItem] = []
        for key, held in self._elements.items():
            for box, view in held.boxes():
                # By key and offset, as DCP identifies the chunks of a tensor.
                index = MetadataIndex(key, box.begin)
                self._views[index] = view
                data = TensorWriteData(_chunk(box), TensorProperties(dtype=view.dtype), torch.Size(held.whole))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The elements of a box."""
        return self._views[index]


class ElementsLoadPlanner(DefaultLoadPlanner):
    """Reads a rank's elements, by key; shapes have been compared before (``differences``)."""

    def __init__(self, elements: Mapping[str, Elements]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._elements = elements
        self._views: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """One item for each overlap of a box of this rank with a stored box.

        Raises:
            UserError: the checkpoint lacks elements.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, held in self._elements.items():
            boxes = held.boxes()
            self._views |= {MetadataIndex(key, box.begin): view for box, view in boxes}
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, [_chunk(box) for box, _ in boxes])
            # create_read_items_for_chunk_list silently omits elements that no chunk contains.
            if sum(prod(item.lengths) for item in found) != len(held.values):
                raise UserError(f"the checkpoint is not complete: elements of {key} are missing; use another one")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The view that the elements of a box are read into."""
        return self._views[index]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.size))


def shapes_in(metadata: Metadata) -> Shapes:
    """Shapes of a checkpoint's tensors by key; ``None`` for what is no tensor."""
    return {
        key: tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        for key, found in metadata.state_dict_metadata.items()
    }
