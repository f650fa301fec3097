"""Stages of a model: their pieces, and their initial weights.

An initial weight depends only on the seed and on its global name. Any partition of a model, on any number of ranks,
therefore starts from bit-identical weights.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipeloom.model.block_sparse import consists_of_blocks
from pipeloom.model.expert_parallel import ALL_EXPERTS, ExpertParallel
from pipeloom.model.experts import balances_of, share_experts
from pipeloom.model.tensor_parallel import WHOLE, TensorParallel
from pipeloom.model.transformer import TIED_NAME, Transformer
from pipeloom.workload.adapter import FIRST, SECOND, Adapter
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS

_INIT_STD = 0.02
"""Standard deviation of initial matrices and embeddings, as in GPT-2 and llama models."""
_RESIDUAL_OUTPUTS = ("attention.output.weight", ".down.weight")
"""Projections into the residual stream; two in each layer, the second one of each expert."""


def stage_pieces(partition: Sequence[int]) -> list[range]:
    """The pieces of each stage.

    Args:
        partition: number of pieces of each stage, all at least 1.

    Returns:
        One range of pieces for each stage; together they cover ``range(sum(partition))`` in order.
    """
    assert all(size >= 1 for size in partition), f"a stage without pieces: {partition}"
    return [range(begin, end) for begin, end in pairwise(accumulate(partition, initial=0))]


def build_stage(
    config: ModelConfig,
    pieces: range,
    *,
    max_positions: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = WHOLE,
    adapter: Adapter | None = None,
    sharing: ExpertParallel = ALL_EXPERTS,
) -> Transformer:
    """Build and initialize one stage.

    Matrices and embeddings are normal(0, 0.02), projections into the residual stream divided by ``sqrt(2 L)``, matrices
    of kept blocks by the root of their density; norms multiply by 1, and biases are 0. Adapters begin as those of PEFT:
    ``A`` is uniform within one over the root of its inputs, ``B`` is zero, or drawn as ``A``.

    Args:
        config: resolved model.
        pieces: the stage's pieces.
        max_positions: longest sequence of the model.
        seed: of the weights; the same on all ranks.
        dtype: of the weights. Values are drawn in float32 and converted.
        device: of the weights; on "meta" they have no values. A tied head without its embedding needs a call of
            ``Transformer.borrow`` before it runs; on "meta" that is done here.
        parallel: the tensor-parallel rank; the weights do not depend on the number of ranks.
        adapter: low-rank adapters of the layers; ``None`` for none.
        sharing: the ranks that share the experts of layers; the weights do not depend on it.
    """
    # On meta first, which skips PyTorch's own initialization.
    with torch.device("meta"):
        stage = Transformer(config, max_positions, pieces, parallel, adapter).to(dtype)
    share_experts(stage, sharing)
    if sharing.overlaps:
        stage.run_in_halves()
    if torch.device(device).type == "meta":
        if stage.borrows:
            sizes = {"max_positions": max_positions, "seed": seed}
            first = build_stage(config, range(1), **sizes, dtype=dtype, device=device, parallel=parallel)
            # Detached: a module registers an nn.Parameter that is assigned to it as one of its own.
            stage.borrow(first.get_parameter(TIED_NAME).detach().requires_grad_(adapter is None))
        return stage
    # Not to_empty, whose empty_like of a tensor on meta loads PyTorch's symbolic shapes, half a second of a start.
    stage._apply(partial(_without_values, torch.device(device)))  # noqa: SLF001
    slices = stage.slices()
    with torch.no_grad():
        # One parameter at a time: at most one whole matrix in float32 exists beside the stage.
        for name, weight in stage.named_parameters():
            here = slices[name]
            # Each tensor-parallel rank draws the whole matrix and copies its slice: any tp has the same weights.
            if name.endswith((FIRST, SECOND)):
                whole = _first_of_pair(name, here.whole, seed, adapter)
            else:
                whole = first_value(name, here.whole, seed, config)
            weight.copy_(here.of(whole, weight.shape))
    for balance in balances_of(stage).values():
        balance.make_bias(device)
    return stage


def _without_values(device: torch.device, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def generator_seed(seed: int, name: str) -> int:
    """Seed of the random numbers of one part of a model, from the seed of all and the part's name."""
    # Not hash(), which is salted in every process. 63 bits fit into the int64 of manual_seed.
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _first_of_pair(name: str, shape: tuple[int, ...], seed: int, adapter: Adapter | None) -> Tensor:
    """Initial value of a whole matrix of an adapter; float32, on the CPU."""
    assert adapter is not None
    if name.endswith(SECOND) and not adapter.draws_second:
        return torch.zeros(*shape, dtype=torch.float32)
    generator, bound = torch.Generator().manual_seed(generator_seed(seed, name)), shape[1] ** -0.5
    return torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def first_value(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Tensor:
    """Initial value of a whole parameter; float32, on the CPU."""
    if name.endswith(".bias"):
        return torch.zeros(*shape, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if MODELS[config.family].zero_centered_norms else 1.0, dtype=torch.float32)
    # Each layer adds two terms to the residual stream; GPT-2 divides by the root of their number (report, section 2.3).
    scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    if config.blocks is not None and consists_of_blocks(name, config):
        scale /= math.sqrt(config.blocks.density)  # fewer inputs for each output, with the same variance of the sum
    # Always on the CPU: CUDA's generator returns other numbers for the same seed.
    generator = torch.Generator().manual_seed(generator_seed(seed, name))
    return torch.empty(*shape, dtype=torch.float32).normal_(0.0, _INIT_STD * scale, generator=generator)
