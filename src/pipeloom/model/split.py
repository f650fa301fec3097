"""Stages of a model: which pieces they hold, and their weights at the start.

A weight's first value depends on the seed and on its global name only. Any partition of a model, on any number of
ranks, therefore starts from bit-identical weights.
"""

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipeloom.model.tensor_parallel import WHOLE, TensorParallel
from pipeloom.model.transformer import TIED_NAME, Transformer
from pipeloom.workload.model import ModelConfig

_INIT_STD = 0.02
"""Standard deviation of matrices and embeddings, as GPT-2 and llama models use it."""
_RESIDUAL_OUTPUTS = ("attention.output.weight", "feed_forward.down.weight")
"""Projections that add to the residual stream; two in each layer."""


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
) -> Transformer:
    """Build and initialize one stage.

    Matrices and embeddings are normal(0, 0.02), projections into the residual stream smaller by ``sqrt(2 L)``; norms
    are 1 and biases 0.

    Args:
        config: resolved model.
        pieces: the pieces that the stage holds.
        max_positions: longest sequence that the model takes.
        seed: chooses the weights; the same on all ranks.
        dtype: type of the weights. Values are drawn in float32 whatever it is.
        device: where the weights live; on "meta" they have shapes but no values. A tied head without its embedding has
            to be lent a matrix before it runs (``Transformer.borrow``); on "meta" it has one.
        parallel: the ranks that share the stage's matrices; together they start from the same weights as one would.
    """
    # Shapes first, without PyTorch's own initialization, which would draw from the global generator and be overwritten.
    with torch.device("meta"):
        stage = Transformer(config, max_positions, pieces, parallel).to(dtype)
    if torch.device(device).type == "meta":
        if stage.borrows:
            sizes = {"max_positions": max_positions, "seed": seed}
            first = build_stage(config, range(1), **sizes, dtype=dtype, device=device, parallel=parallel)
            # Detached: a module registers any nn.Parameter that becomes its attribute, and the stage would count it.
            stage.borrow(first.get_parameter(TIED_NAME).detach().requires_grad_())
        return stage
    stage.to_empty(device=device)
    slices = stage.slices()
    with torch.no_grad():
        # One parameter at a time: at most one whole matrix in float32 exists beside the stage.
        for name, weight in stage.named_parameters():
            here = slices[name]
            # The whole matrix is drawn, of which each tensor-parallel rank
            # copies its part: any tp has the same weights.
            weight.copy_(here.of(_first_value(name, here.whole, seed, config.num_layers), weight.shape))
    return stage


def _first_value(name: str, shape: Sequence[int], seed: int, num_layers: int) -> Tensor:
    """What a parameter holds before the first step; float32, on the CPU."""
    if name.endswith(".bias"):
        return torch.zeros(*shape, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return torch.ones(*shape, dtype=torch.float32)
    # Each layer adds two terms to the residual stream: GPT-2 divides by the root of their number (report, section 2.3).
    scale = 1 / math.sqrt(2 * num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    # On the CPU, whatever the device: CUDA's generator returns other numbers for the same seed.
    # Not hash(), which Python salts in every process. 63 bits fit into the int64 that manual_seed takes.
    bits = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(bits)
    return torch.empty(*shape, dtype=torch.float32).normal_(0.0, _INIT_STD * scale, generator=generator)
