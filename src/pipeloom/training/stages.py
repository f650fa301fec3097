"""Builds the stages of a run, and counts their bytes on meta tensors.

Schedules use these bytes to move activations and to swap stages. Counting needs neither memory nor other ranks.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeloom.config import RunConfig, ScheduleConfig
from pipeloom.cost.stages import layers_of_pieces
from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import make_shared_groups
from pipeloom.execute.communication.group import Group
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.saved import Parcel
from pipeloom.execute.stages.stage import split_backward_of
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import (
    Documents,
    SplitVocabulary,
    StageModule,
    TensorParallel,
    build_stage,
    stage_pieces,
)
from pipeloom.model.adapted import adapted_stage
from pipeloom.model.context_parallel import WHOLE_SEQUENCES, ContextGroup, ContextParallel
from pipeloom.model.deferred import defer
from pipeloom.model.expert_parallel import ALL_EXPERTS, ExpertGroup, ExpertParallel
from pipeloom.model.experts import balances_of, is_of_expert
from pipeloom.model.key_values import KeyValueCache
from pipeloom.model.tensor_parallel import WHOLE, TensorGroup
from pipeloom.runs.action_log import ActionLog
from pipeloom.schedule import Kind, Placement, Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.layout import Recompute
from pipeloom.workload.sharing import ranks_of_owners


def stage_of(
    config: RunConfig,
    pieces: range,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    parallel: TensorParallel = WHOLE,
    context: ContextParallel = WHOLE_SEQUENCES,
    sharing: ExpertParallel = ALL_EXPERTS,
) -> StageModule:
    """Build and initialize a stage of a run, without recomputation and not compiled.

    Its frozen parameters require no gradient.

    Args:
        config: resolved.
        pieces: indices of the stage's pieces (embedding, layers, head); see ``stage_pieces``.
        device: of its weights; on "meta" they take no memory.
        dtype: of the weights; ``None`` for that of the run.
        parallel: the tensor-parallel rank that it is built for.
        context: the ranks that share the tokens of its sequences.
        sharing: the ranks that share the experts of its layers.
    """
    numbers = dtype or getattr(torch, config.training.known_dtype)
    if config.model.adapted is not None:
        return adapted_stage(config.model.adapted, pieces, seed=config.training.seed, dtype=numbers, device=device)
    stage = build_stage(
        config.model,
        pieces,
        max_positions=config.data.seq_len,
        seed=config.training.seed,
        dtype=numbers,
        device=device,
        parallel=parallel,
        adapter=config.pairs,
        sharing=sharing,
    )
    stage.set_context(context)
    for balance in balances_of(stage).values():
        balance.num_tokens = config.layout.batch_size * config.data.seq_len
    stage.freeze(config.frozen_pieces) if config.pairs is None else stage.freeze_base()
    return stage


def shared_groups(config: RunConfig, world: World, placement: Placement, log: ActionLog | None) -> dict[int, Group]:
    """The ranks of weights that several stages share, by the first layer that has them; of those that this rank has.

    Collective, as ``make_groups``.

    Args:
        config: resolved.
        world: all ranks.
        placement: of the stages.
        log: where sums are noted.
    """
    sharing, partition = config.model.sharing, config.layout.partition
    if sharing is None:
        return {}
    assert partition is not None, "the layout is not resolved"
    sets = ranks_of_owners(sharing, layers_of_pieces(partition), placement.rank_by_stage)
    return make_shared_groups(config.layout, world, sets, log)


def output_specs(
    config: RunConfig, parallel: TensorParallel, microbatch_size: int, num_tokens: int
) -> tuple[TensorSpec, TensorSpec]:
    """Specs of a stage's output on a tensor-parallel rank: of every stage but the last, and the last one's logits.

    Computed, since operators on the meta device load PyTorch's symbolic shapes, which takes a third of the time of
    loading PyTorch.

    Args:
        config: resolved.
        parallel: the tensor-parallel rank.
        microbatch_size: sequences.
        num_tokens: of each sequence, without those of other context-parallel ranks.
    """
    dtype, vocab_size = getattr(torch, config.training.known_dtype), config.model.vocab_size or 0
    between = microbatch_size, num_tokens // parallel.size, config.model.hidden_size
    logits = microbatch_size, num_tokens, len(parallel.share(vocab_size))
    return TensorSpec(between, dtype), TensorSpec(logits, dtype)


@dataclass(frozen=True)
class StageSizes:
    """Bytes of the stages of a resolved configuration, counted; the ``sizes`` of ``recipe.build``.

    Attributes:
        config: resolved.
        trains: whether stages have gradients and optimizer state.
    """

    config: RunConfig
    trains: bool = True

    def kept(self, schedule: Schedule) -> KeptBytes:
        """Bytes that stages keep of micro-batches, also between the halves of split backwards."""
        return saved_bytes(self.config, splits=any(row.is_kind(Kind.BACKWARD_INPUT).any() for row in schedule.rows))

    def stages(self) -> tuple[Amounts, ...]:
        """Bytes of weights, gradient and optimizer state of each stage."""
        found = stage_amounts(self.config)
        return found if self.trains else tuple(Amounts(weights=one.weights, borrowed=one.borrowed) for one in found)


def stage_amounts(config: RunConfig) -> tuple[Amounts, ...]:
    """Bytes of weights, gradient and optimizer state of each stage of a resolved configuration."""
    assert config.layout.partition is not None
    return _amounts(config, config.layout.partition)


def piece_bytes(config: RunConfig) -> tuple[int, ...]:
    """Bytes of weights, gradient and optimizer state together, of each piece (embedding, layers, head)."""
    return tuple(int(one.total) for one in _amounts(config, (1,) * (config.model.num_layers + 2)))


@cache
def _amounts(config: RunConfig, partition: tuple[int, ...]) -> tuple[Amounts, ...]:
    """Bytes of each stage, or of a rank's experts in it where they alone are swapped."""
    is_part, last = config.layout.has_own_experts, config.layout.ep - 1
    sharing = ExpertParallel(ExpertGroup(last + 1, last)) if is_part else ALL_EXPERTS
    dtype = getattr(torch, config.training.known_dtype)
    narrow, wide = dtype.itemsize, master_dtype(dtype).itemsize
    rule, has_copy = config.optimizer.rule, narrow < wide and config.optimizer.wide_weights
    found: list[Amounts] = []
    for pieces in stage_pieces(partition):
        stage = stage_of(config, pieces, "meta", sharing=sharing)
        taken = {name: one for name, one in stage.named_parameters() if not is_part or is_of_expert(name)}
        trained = {name: tuple(one.shape) for name, one in taken.items() if one.requires_grad}
        count = sum(map(prod, trained.values()))
        state = sum(prod(its_shape) for each in trained.items() for its_shape in rule.state_shapes(*each).values())
        lent = config.model.hidden_size * (config.model.vocab_size or 0) if stage.borrows and not is_part else 0
        found.append(
            Amounts(
                weights=count * narrow,
                gradient=count * wide,
                state=(state + count * has_copy) * wide,  # float32 master weights are part of the state
                borrowed=lent * narrow,
                lent_gradient=lent * wide,
            )
        )
    return tuple(found)


def saved_bytes(config: RunConfig, *, splits: bool = False) -> KeptBytes:
    """Bytes that stages keep of a micro-batch, or of each of its slices, on the tensor-parallel rank that keeps most.

    These are the tensors that autograd saves, those of the loss included, without weights, batch and masks of
    documents. One stage of each kind runs on meta tensors.

    Args:
        config: resolved.
        splits: whether backwards are split into two halves.
    """
    layout, num_layers, experts = config.layout, config.model.num_layers, config.model.expert_layout
    assert layout.partition is not None, "the layout is not resolved"
    by_layer = layout.recompute_by_layer(num_layers)
    same = replace(config, schedule=ScheduleConfig())  # cache key: bytes do not depend on the schedule
    frozen = config.frozen_pieces
    alike: dict[tuple[bool, bool, int, tuple[tuple[Recompute, int | None, bool], ...]], _Saved] = {}
    by_stage: list[_Saved] = []
    for pieces in stage_pieces(layout.partition):
        layers = [piece - 1 for piece in pieces if 0 < piece <= num_layers]
        still = max(-1, min(frozen, pieces.stop) - pieces.start)  # -1: an earlier stage needs the input gradient
        of_layers = tuple(
            (by_layer[layer], config.model.window_of(layer), experts is not None and experts.are_in(layer))
            for layer in layers
        )
        kind = (0 in pieces, num_layers + 1 in pieces, still, of_layers)
        if kind not in alike:
            alike[kind] = _count(same, pieces, by_layer, splits=splits)
        by_stage.append(alike[kind])
    lengths = layout.slice_lengths(config.data.seq_len)
    shares = [length / sum(lengths) for length in lengths]
    whole, pending, inputs = ([one.of_slices[part] for one in by_stage] for part in range(3))
    if len(lengths) > 1:
        return KeptBytes(whole, pending if splits else (), inputs, shares, [one.caches for one in by_stage])
    whole, pending, inputs = ([sum(one) for one in each] for each in (whole, pending, inputs))
    return KeptBytes(whole, pending if splits else (), inputs, shares)


class _Saved(NamedTuple):
    """Bytes that one stage keeps of each slice (all; between halves of a backward; its input), and of its caches."""

    of_slices: tuple[list[int], list[int], list[int]]
    caches: int


@lru_cache(maxsize=1024)
def _count(config: RunConfig, pieces: range, by_layer: tuple[Recompute, ...], *, splits: bool) -> _Saved:
    layout, dtype = config.layout, getattr(torch, config.training.known_dtype)
    lengths = layout.slice_lengths(config.data.seq_len)
    if pieces.stop <= config.frozen_pieces:
        nothing = [0] * len(lengths)
        return _Saved((nothing, nothing, nothing), 0)
    # The last of the tensor-parallel ranks has the largest share.
    parallel = TensorParallel(TensorGroup(layout.tp, layout.tp - 1), layout.sequence_parallel)
    vocabulary = SplitVocabulary(parallel, config.model.vocab_size or 0)
    context = ContextParallel(ContextGroup(layout.cp, layout.cp - 1))
    sharing = ExpertParallel(ExpertGroup(layout.ep, layout.ep - 1), layout.ep_overlap)
    module = stage_of(config, pieces, "meta", parallel=parallel, context=context, sharing=sharing)
    module.set_recompute(by_layer)
    if splits:
        defer(module)
    needs_gradient = pieces.start > config.frozen_pieces
    cache = KeyValueCache(config.data.seq_len) if len(lengths) > 1 else None
    whole, inputs, gone = list[int](), list[int](), list[tuple[Tensor, Tensor, int]]()
    documents = list[Documents | None]()  # kept, since a mask that stages share does not count
    with _Kernels(is_gpu=config.training.device == "cuda"):
        for length in lengths:
            tokens = TensorSpec((layout.microbatch_size, length), torch.int64).empty("meta")
            given = tokens
            if not module.has_embedding:
                between, _ = output_specs(config, parallel, layout.microbatch_size, length)
                given = between.empty("meta").requires_grad_(needs_gradient)
            targets = tokens.flatten()  # part of the batch, so not counted
            parcel, begin = Parcel(owns_input=not module.has_embedding), 0 if cache is None else cache.begin
            documents.append(Documents(tokens) if config.data.by_document else None)
            with parcel.saving():
                output = module(given, cache, documents[-1])
                if module.has_head:
                    output = vocabulary.summed_cross_entropy(output.flatten(0, 1).to(master_dtype(dtype)), targets)
            parcel.close(given, output)
            whole.append(parcel.nbytes)
            inputs.append(0 if module.has_embedding else given.nbytes)
            gone.append((given, output, begin))
        pending: list[int] = []
        for given, output, begin in reversed(gone) if splits else ():
            if cache is not None:
                cache.begin = begin  # recomputation runs the slice forward again
            pending.insert(0, split_backward_of(module, given, output, torch.ones_like(output))[1].size)
    return _Saved((whole, pending, inputs), 0 if cache is None else cache.nbytes)


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  has no public name


class _Norm(torch.autograd.Function):
    """Saves what PyTorch's fused norm kernels save: the input, and a few numbers per token."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, tensor, deviations, *parameters = args
        ctx.save_for_backward(tensor, deviations, *parameters)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004  bytes do not depend on them
        tensor, _, *parameters = ctx.saved_tensors
        return torch.empty_like(tensor), None, *map(torch.empty_like, parameters)


class _Kernels(TorchFunctionMode):
    """Replaces operations that meta tensors decompose (attention, LayerNorm) by fused ones, so that they save the same.

    Attention saves one number per row of scores. RMSNorm saves what the kernel of GPUs saves on every device.

    Args:
        is_gpu: whether the kernels are those of GPUs, or of CPUs.
    """

    def __init__(self, *, is_gpu: bool) -> None:
        super().__init__()
        self._is_gpu = is_gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = kwargs["attn_mask"]
            # The CPU kernel takes an additive mask, which PyTorch makes from the bool matrix; on GPUs the mask is a
            # bias object without memory. That of documents is additive.
            if mask is not None and mask.dtype is torch.bool:
                mask = None if self._is_gpu else args[0].new_empty(mask.shape)
            # This kernel supports grouped queries.
            return _ATTENTION(*args, is_causal=kwargs["is_causal"], attn_mask=mask)[0]
        if func is functional.layer_norm:
            # On CPUs mean and deviation have the dtype of the input, on GPUs float32 or wider.
            dtype = master_dtype(args[0].dtype) if self._is_gpu else args[0].dtype
            return _Norm.apply(
                args[0], args[0].new_empty((*args[0].shape[:-1], 2), dtype=dtype), kwargs["weight"], kwargs["bias"]
            )
        return func(*args, **kwargs)


def make_store(config: RunConfig) -> StageStore | None:
    """The store of swapped stages; ``None`` without swaps.

    Raises:
        UserError: ``schedule.swap_folder`` cannot be written.
    """
    budget, folder = config.schedule.budget_bytes, config.schedule.swap_folder
    if budget is None:
        return None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"schedule.swap_folder: cannot write to {folder}: {error.strerror or error}") from None
    return StageStore(budget, folder)
