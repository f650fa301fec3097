"""Which of a run's activations move to another rank or to the host: passes over its schedule, and what they go by."""

import torch

from pipeloom.config import RunConfig
from pipeloom.execute.boundary import TensorSpec
from pipeloom.execute.saved import Parcel
from pipeloom.execute.weights import master_dtype
from pipeloom.model import TensorParallel, build_stage, stage_pieces
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.model.tensor_parallel import Single
from pipeloom.schedule import Schedule, balance, offload

_GIGA = 1e9


def swaps_anything(config: RunConfig) -> bool:
    """Whether a run's schedule may move activations."""
    return config.schedule.balance or config.schedule.offload


def moving(config: RunConfig, schedule: Schedule) -> Schedule:
    """The schedule with what ``schedule.balance`` and ``schedule.offload`` ask for.

    How long things take is not known yet; a backward is taken for two forwards, and moving what a forward keeps for
    one. With both, pairs of ranks share first, and the host takes what is still too much.

    Args:
        config: resolved.
        schedule: with all its communication.

    Raises:
        UserError: ranks need more than ``schedule.activation_gb``.
    """
    settings = config.schedule
    if not swaps_anything(config):
        return schedule
    whole, inputs = saved_bytes(config)
    sizes = {"input_bytes": whole, "recomputed_bytes": inputs}
    room = None if settings.activation_gb is None else [settings.activation_gb * _GIGA] * schedule.num_ranks
    if settings.balance:
        schedule = balance(schedule, **sizes, budget_bytes=None if settings.offload else room)
    if settings.offload:
        assert room is not None, "offloading needs a limit"
        schedule = offload(schedule, **sizes, budget_bytes=room)
    return schedule


def saved_bytes(config: RunConfig) -> tuple[list[int], list[int]]:
    """For each stage what it keeps of a micro-batch: what autograd saves and nobody else holds; the input alone.

    Every stage runs once on meta tensors, which takes neither memory nor other ranks. What the loss saves is in it.
    There attention is written out, so where a device has a kernel for it that is not recomputed, it saves less.

    Args:
        config: resolved.
    """
    layout, dtype = config.layout, getattr(torch, config.training.dtype)
    assert layout.partition is not None, "the layout is not resolved"
    parallel = TensorParallel(_Rank(layout.tp), layout.sequence_parallel)
    tensor = TensorSpec((layout.microbatch_size, config.data.seq_len), torch.int64).empty("meta")
    whole: list[int] = []
    inputs: list[int] = []
    for number, pieces in enumerate(stage_pieces(layout.partition)):
        module = build_stage(
            config.model,
            pieces,
            max_positions=config.data.seq_len,
            seed=config.training.seed,
            dtype=dtype,
            device="meta",
            parallel=parallel,
        )
        module.set_recompute(layout.recompute_by_layer(config.model.num_layers))
        parcel = Parcel(owns_input=number > 0)
        given = tensor.detach().requires_grad_(tensor.is_floating_point())
        with parcel.saving():
            output = module(given)
            if module.has_head:
                wide = output.flatten(0, 1).to(master_dtype(dtype))
                output = summed_cross_entropy(wide, torch.zeros(len(wide), dtype=torch.int64, device="meta"))
        parcel.close(given, output)
        whole.append(parcel.nbytes)
        inputs.append(given.nbytes if number > 0 else 0)
        tensor = output
    return whole, inputs


class _Rank(Single):
    """The first of some tensor-parallel ranks, which exchange nothing of meta tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
