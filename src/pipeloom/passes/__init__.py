"""From one schedule to another: lowering to communication, splitting, slicing, recomputing, moving what is kept."""

from pipeloom.passes.balance import balance
from pipeloom.passes.cut import add_slices, join_backward, sliced, split_backward
from pipeloom.passes.freeze import freeze
from pipeloom.passes.lower_messages import lower
from pipeloom.passes.lower_sharding import add_data_parallel, add_reduce_grad, add_unshard, exchanges
from pipeloom.passes.lower_stage_swaps import add_stage_swaps, add_updates, place_of_updates
from pipeloom.passes.lower_tied import add_tied
from pipeloom.passes.moves import Moves, add_moves, offload
from pipeloom.passes.recompute import recompute_beyond

__all__ = [
    "Moves",
    "add_data_parallel",
    "add_moves",
    "add_reduce_grad",
    "add_slices",
    "add_stage_swaps",
    "add_tied",
    "add_unshard",
    "add_updates",
    "balance",
    "exchanges",
    "freeze",
    "join_backward",
    "lower",
    "offload",
    "place_of_updates",
    "recompute_beyond",
    "sliced",
    "split_backward",
]
