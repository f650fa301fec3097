"""Eight layouts of six pieces, on one to four ranks, with every axis and every level of sharding."""

from pipeloom.workload.layout import Layout

LAYOUTS = {
    "one rank": Layout(pp=1, loops=1, num_microbatches=4, microbatch_size=1),
    "loops": Layout(pp=2, loops=2, num_microbatches=2, microbatch_size=2, partition=(1, 2, 2, 1)),
    "full": Layout(pp=1, loops=3, dp=2, shard="full", num_microbatches=2, microbatch_size=1),
    "linear": Layout(pp=4, loops=1, num_microbatches=4, microbatch_size=1),
    "tensor, no sharding": Layout(pp=1, loops=2, tp=2, dp=2, num_microbatches=2, microbatch_size=1),
    "tensor, full": Layout(
        pp=1, loops=3, tp=2, sequence_parallel=True, dp=2, shard="full", num_microbatches=2, microbatch_size=1
    ),
    "gradients": Layout(pp=2, loops=1, dp=2, shard="gradients", num_microbatches=1, microbatch_size=2),
    "hybrid": Layout(pp=1, loops=2, dp=4, replicate=2, shard="optimizer", num_microbatches=1, microbatch_size=1),
}
SHARED_EXPERTS = {
    "experts over all": Layout(pp=1, loops=2, dp=4, ep=4, shard="full", num_microbatches=1, microbatch_size=1),
    "experts over half": Layout(pp=1, loops=2, dp=4, ep=2, shard="full", num_microbatches=1, microbatch_size=1),
    "experts and matrices": Layout(pp=1, loops=3, tp=2, dp=2, ep=2, num_microbatches=2, microbatch_size=1),
}
"""Layouts of runs with experts that ranks share."""
PLACEMENTS = {"loops": "v", "linear": "linear"}
