"""Bytes of a run's stages, by which its schedule moves activations and swaps stages."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeloom.config import RunConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.stages.saved import Parcel
from pipeloom.execute.stages.stage import split_backward_of
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import TensorParallel, stage_pieces
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.model.deferred import defer
from pipeloom.model.tensor_parallel import Single
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.train.stage_swaps import stage_amounts
from pipeloom.train.stages import stage_of


def moves_anything(config: RunConfig) -> bool:
    """Whether a run's schedule may move activations."""
    return config.schedule.balance or config.schedule.offload


@dataclass(frozen=True)
class StageSizes:
    """Bytes of a run's stages, counted on stages of meta tensors.

    Attributes:
        config: resolved.
    """

    config: RunConfig

    def kept(self, schedule: Schedule) -> KeptBytes:
        """What stages keep of micro-batches, and of their halves where backwards are split."""
        splits = any(row.is_kind(Kind.BACKWARD_INPUT).any() for row in schedule.rows)
        saved, num_tokens = saved_bytes(self.config, splits=splits), self.config.data.seq_len
        shares = [length / num_tokens for length in self.config.layout.slice_lengths(num_tokens)]
        return KeptBytes(saved.whole, saved.pending, saved.inputs, shares)

    def stages(self) -> tuple[Amounts, ...]:
        """Weights, gradient and state of each stage."""
        return stage_amounts(self.config)


class SavedBytes(NamedTuple):
    """For each stage what it keeps of a micro-batch.

    Attributes:
        whole: what autograd saves and nobody else holds.
        inputs: the input alone.
        pending: what waits for the second half of a backward that is split; empty where none is.
    """

    whole: list[int]
    inputs: list[int]
    pending: list[int]


def saved_bytes(config: RunConfig, *, splits: bool = False) -> SavedBytes:
    """What stages keep.

    Every stage runs once on meta tensors, which takes neither memory nor other ranks. What the loss saves is in it.
    There attention is written out, so where a device has a kernel for it that is not recomputed, it saves less.

    Args:
        config: resolved.
        splits: whether backwards run in two halves.
    """
    layout, dtype = config.layout, getattr(torch, config.training.known_dtype)
    assert layout.partition is not None, "the layout is not resolved"
    parallel = TensorParallel(_Rank(layout.tp), layout.sequence_parallel)
    tensor = TensorSpec((layout.microbatch_size, config.data.seq_len), torch.int64).empty("meta")
    found = SavedBytes([], [], [])
    for number, pieces in enumerate(stage_pieces(layout.partition)):
        module = stage_of(config, pieces, "meta", parallel=parallel)
        module.set_recompute(layout.recompute_by_layer(config.model.num_layers))
        if splits:
            defer(module)
        parcel = Parcel(owns_input=number > 0)
        # Tokens have no gradient; what comes from another stage has one, or autograd would save less.
        given = tensor.detach().requires_grad_(tensor.is_floating_point())
        with parcel.saving():
            output = module(given)
            if module.has_head:
                wide = output.flatten(0, 1).to(master_dtype(dtype))
                # Targets of any value: on meta tensors nothing is looked up, and only what the loss saves counts.
                output = summed_cross_entropy(wide, torch.zeros(len(wide), dtype=torch.int64, device="meta"))
        parcel.close(given, output)
        found.whole.append(parcel.nbytes)
        found.inputs.append(given.nbytes if number > 0 else 0)
        if splits:
            found.pending.append(split_backward_of(module, given, output, torch.ones_like(output))[1].size)
        tensor = output
    return found


class _Rank(Single):
    """The first of some tensor-parallel ranks, which exchange nothing of meta tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
