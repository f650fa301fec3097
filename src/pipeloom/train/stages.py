"""The stages of a run, as its configuration describes them."""

import torch

from pipeloom.config import RunConfig
from pipeloom.model import TensorParallel, Transformer, build_stage
from pipeloom.model.tensor_parallel import WHOLE


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
