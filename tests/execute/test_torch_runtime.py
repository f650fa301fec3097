"""A schedule of ours, exported as CSV, runs in PyTorch's own pipelining runtime to the same loss and gradients."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from toy import Toy, make_executor, worst_difference

from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Level

MICROBATCHES = 4


def mean_square(output, target):
    return (output * output).mean()


def _theirs(rank, schedule, csv_file, toy, level):
    """PyTorch's runtime on our CSV: this rank's modules with gradients, and the losses."""
    modules = toy.modules()
    mine = schedule.placement.stages_of(rank)
    stages = [PipelineStage(modules[s], s, schedule.num_stages, torch.device("cpu")) for s in mine]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=mean_square)
    runtime._load_csv(str(csv_file), format="compute_only" if level is Level.COMPUTE else "compute_comms")
    batch = torch.cat(toy.inputs())
    has_first, has_last = 0 in mine, schedule.num_stages - 1 in mine
    losses: list[torch.Tensor] = []
    runtime.step(
        *([batch] if has_first else []),
        **({"target": torch.zeros_like(batch), "losses": losses} if has_last else {}),
        return_outputs=False,
    )
    return modules, [loss.item() for loss in losses]


def _ours(rank, schedule, toy, world):
    modules, outputs = toy.modules(), toy.outputs()
    transport = Transport(rank, edges_of(schedule, outputs), world.device, timedelta(seconds=30))
    executor = make_executor(schedule, rank, modules, outputs, transport)
    result = executor.run(toy.inputs(), lambda output, _: (output * output).mean() / MICROBATCHES)
    transport.close()
    return modules, [value.item() * MICROBATCHES for _, value in sorted(result.outputs.items())]


def _compare(schedule, csv_file, level, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    toy = Toy(schedule.num_stages, MICROBATCHES)
    mine = schedule.placement.stages_of(rank)
    theirs, their_losses = _theirs(rank, schedule, csv_file, toy, level)
    ours, our_losses = _ours(rank, schedule, toy, world)
    world.leave()
    difference = worst_difference([ours[s] for s in mine], [theirs[s] for s in mine])
    return difference, our_losses, sorted(their_losses)


@pytest.mark.parametrize("level", [Level.COMPUTE, Level.COMMUNICATION])
@pytest.mark.parametrize("family", ["breadth-first", "depth-first", "hybrid"])
def test_pytorch_runs_our_schedule_to_the_same_loss(tmp_path, family, level):
    compute_only = make_schedule(family, pp=2, loops=2, num_microbatches=MICROBATCHES)
    lowered = lower(compute_only)
    file = tmp_path / "schedule.csv"
    file.write_text(format_torch_csv(compute_only if level is Level.COMPUTE else lowered))
    answers = run_workers(partial(_compare, lowered, file, level), 2)
    assert max(difference for difference, _, _ in answers) < 1e-12
    assert len(answers[1][1]) == MICROBATCHES
    assert sorted(answers[1][1]) == pytest.approx(answers[1][2], rel=1e-12)
