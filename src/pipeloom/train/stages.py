"""The stages of a run, as its configuration describes them, and the bytes of each, counted on stages of meta tensors.

By these bytes schedules move activations and swap stages. Counting takes neither memory nor other ranks.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeloom.config import RunConfig, ScheduleConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.stages.saved import Parcel
from pipeloom.execute.stages.stage import split_backward_of
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import TensorParallel, Transformer, build_stage, stage_pieces
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.model.deferred import defer
from pipeloom.model.key_values import KeyValueCache
from pipeloom.model.tensor_parallel import WHOLE, TensorGroup
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.layout import Recompute


def stage_of(
    config: RunConfig,
    pieces: range,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    parallel: TensorParallel = WHOLE,
) -> Transformer:
    """Build and initialize a stage of a run; nothing in it is recomputed or compiled yet.

    Args:
        config: resolved.
        pieces: of the model, embedding, layers, head, counted from 0; see ``stage_pieces``.
        device: where its weights live; on "meta" they take no memory.
        dtype: of the weights; ``None`` for that of the run.
        parallel: the tensor-parallel rank that it is built for.
    """
    return build_stage(
        config.model,
        pieces,
        max_positions=config.data.seq_len,
        seed=config.training.seed,
        dtype=dtype or getattr(torch, config.training.known_dtype),
        device=device,
        parallel=parallel,
    )


@dataclass(frozen=True)
class StageSizes:
    """Bytes of the stages of a resolved configuration, as a recipe takes them."""

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


def stage_amounts(config: RunConfig) -> tuple[Amounts, ...]:
    """For each stage of a resolved configuration the bytes of its weights, gradient and optimizer state."""
    assert config.layout.partition is not None
    return _amounts(config, config.layout.partition)


def piece_bytes(config: RunConfig) -> tuple[int, ...]:
    """For each piece of a resolved model, embedding, layers, head, the bytes of all that there is of it."""
    return tuple(int(one.total) for one in _amounts(config, (1,) * (config.model.num_layers + 2)))


@cache
def _amounts(config: RunConfig, partition: tuple[int, ...]) -> tuple[Amounts, ...]:
    dtype = getattr(torch, config.training.known_dtype)
    narrow, wide = dtype.itemsize, master_dtype(dtype).itemsize
    kept = len(config.optimizer.rule.state) + (narrow < wide)  # the weights in wide numbers are a part of the state
    found: list[Amounts] = []
    for pieces in stage_pieces(partition):
        stage = stage_of(config, pieces, "meta")
        count = sum(parameter.numel() for parameter in stage.parameters())
        lent = config.model.hidden_size * (config.model.vocab_size or 0) if stage.borrows else 0
        found.append(
            Amounts(
                weights=count * narrow,
                gradient=count * wide,
                state=count * wide * kept,
                borrowed=lent * narrow,
                lent_gradient=lent * wide,
            )
        )
    return tuple(found)


class SavedBytes(NamedTuple):
    """For each stage what it keeps of a micro-batch.

    Attributes:
        whole: what autograd saves and nobody else holds, and keys and values for later token slices.
        inputs: what is left where the forward runs again: the input, and those keys and values.
        pending: what waits for the second half of a backward that is split; empty where none is.
    """

    whole: list[int]
    inputs: list[int]
    pending: list[int]


def saved_bytes(config: RunConfig, *, splits: bool = False) -> SavedBytes:
    """What stages keep, on the tensor-parallel rank that keeps most.

    A stage of each kind runs once. What the loss saves is in it. ``splits``: whether backwards run in two halves.
    """
    layout, num_layers = config.layout, config.model.num_layers
    assert layout.partition is not None, "the layout is not resolved"
    by_layer = layout.recompute_by_layer(num_layers)
    same = replace(config, schedule=ScheduleConfig())  # runs with other schedules share what was counted
    alike: dict[tuple[bool, bool, tuple[Recompute, ...]], tuple[int, int, int]] = {}
    by_stage: list[tuple[int, int, int]] = []
    for pieces in stage_pieces(layout.partition):
        layers = [piece - 1 for piece in pieces if 0 < piece <= num_layers]
        kind = (0 in pieces, num_layers + 1 in pieces, tuple(by_layer[layer] for layer in layers))
        if kind not in alike:
            alike[kind] = _count(same, pieces, by_layer, splits=splits)
        by_stage.append(alike[kind])
    whole, inputs, pending = zip(*by_stage, strict=True)
    return SavedBytes(list(whole), list(inputs), list(pending) if splits else [])


@lru_cache(maxsize=256)
def _count(config: RunConfig, pieces: range, by_layer: tuple[Recompute, ...], *, splits: bool) -> tuple[int, int, int]:
    """One stage's part of ``SavedBytes``."""
    layout, dtype = config.layout, getattr(torch, config.training.known_dtype)
    sizes = layout.microbatch_size, config.data.seq_len
    # The last of the tensor-parallel ranks has the largest share.
    last = TensorParallel(TensorGroup(layout.tp, layout.tp - 1), layout.sequence_parallel)
    module = stage_of(config, pieces, "meta", parallel=last)
    module.set_recompute(by_layer)
    if splits:
        defer(module)
    tokens = TensorSpec(sizes, torch.int64).empty("meta")
    given = tokens
    if not module.has_embedding:
        own_tokens = sizes[1] // layout.tp  # messages between stages carry a rank's own
        given = TensorSpec((sizes[0], own_tokens, config.model.hidden_size), dtype).empty("meta").requires_grad_()
    targets = tokens.flatten()  # the batch's, so that no stage owns them
    cache = KeyValueCache(config.data.seq_len) if layout.num_slices > 1 else None
    parcel, pending = Parcel(owns_input=not module.has_embedding), 0
    with _Kernels(is_gpu=config.training.device == "cuda"):
        with parcel.saving():
            output = module(given, cache)
            if module.has_head:
                output = summed_cross_entropy(output.flatten(0, 1).to(master_dtype(dtype)), targets)
        parcel.close(given, output)
        if splits:
            pending = split_backward_of(module, given, output, torch.ones_like(output))[1].size
    earlier = 0 if cache is None else cache.nbytes
    left = 0 if module.has_embedding else given.nbytes
    return parcel.nbytes + earlier, left + earlier, pending


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  has no public name


class _FusedNorm(torch.autograd.Function):
    """Keeps what PyTorch's one kernel of an RMS norm does: its input, and a deviation for each token."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, tensor, weight = args
        deviation = tensor[..., :1].to(master_dtype(tensor.dtype))
        ctx.save_for_backward(tensor, deviation.contiguous().clone(), weight)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004  bytes do not depend on them
        tensor, _, weight = ctx.saved_tensors
        return torch.empty_like(tensor), torch.empty_like(weight)


class _Kernels(TorchFunctionMode):
    """The kernels of a device in place of those of meta tensors, which write attention and RMS norms out.

    Attention is one kernel on every device, which keeps a number for each row of scores; an RMS norm on GPUs.
    """

    def __init__(self, *, is_gpu: bool) -> None:
        super().__init__()
        self._is_gpu = is_gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            settings = {name: kwargs[name] for name in ("attn_mask", "is_causal")}  # it takes grouped queries as it is
            return _ATTENTION(*args, **settings)[0]
        if func is functional.rms_norm and self._is_gpu:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        return func(*args, **kwargs)
