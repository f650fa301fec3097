"""The first micro-batch of every stage before the first step: what is compiled on first use is compiled then."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from pipeloom.execute.boundary import TensorSpec
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.profile import stage_runner
from pipeloom.execute.stage import Objective, Stage
from pipeloom.execute.world import World


def warm_up(
    world: World,
    stages: Mapping[int, Stage],
    data_parallel: DataParallel,
    *,
    outputs: Sequence[TensorSpec],
    tokens: Tensor,
    objective: Objective,
    first: Collection[int] = (0,),
) -> None:
    """Run every stage forward and backward once. Every rank calls it, each with equally many stages.

    Some go first: what they compile is on disk when the others come. These wait as long as communication may take
    (``World.timeout``), not as long as a tensor may in a step. Gradients that this leaves behind are dropped.

    Args:
        world: this process among the others.
        stages: this rank's.
        data_parallel: gathers their weights.
        outputs: the agreed spec of every stage's output.
        tokens: stage 0's input.
        objective: applied to the last stage's output.
        first: ranks that go first: rank 0, with the tensor-parallel ranks that compute with it.
    """
    for index, stage in stages.items():
        run = stage_runner(stage, outputs, tokens, objective, world.device)
        with data_parallel.gathered(index, world.timeout.total_seconds()):
            for is_first in (True, False):
                if (world.rank in first) is is_first:
                    run()
                world.wait_for_all()
        for parameter in stage.module.parameters():
            parameter.grad = None
