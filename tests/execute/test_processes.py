"""The pipeline over real processes: gradients, and what happens when a process fails."""

import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.errors import TRACEBACK, UserError, WorkerError
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import make_groups
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.executor import Executor
from pipeloom.execute.lanes import ThreadLane
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.processes import workers
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.stage import Stage
from pipeloom.families import make_schedule
from pipeloom.passes import add_data_parallel, exchanges, lower
from pipeloom.workload.layout import Layout


def _gather_with_nobody(rendezvous, rank, size):
    """Rank 1 never comes to the first gather."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    layout = Layout(pp=1, loops=2, dp=2, shard="full", num_microbatches=2)
    toy, clock = Toy(2, 2), Clock()
    plain = lower(make_schedule("breadth-first", pp=1, loops=2, num_microbatches=2))
    schedule = add_data_parallel(plain, *exchanges("full", residency=2, prefetch=1, gradient_buffers=None))
    groups, modules = make_groups(layout, world), toy.modules()
    parallel = DataParallel(schedule, enumerate(modules), "full", groups, ThreadLane(clock))
    stages = {i: Stage(m, i, toy.outputs()[i], needs_input_gradient=i > 0) for i, m in enumerate(modules)}
    transport = Transport(0, {}, world.device, timedelta(seconds=30), layout.pipelines())
    parts = [Compute(stages), Messages(toy.outputs()), parallel]
    if rank == 1:
        time.sleep(20)
    Executor(schedule, 0, parts, transport=transport, clock=clock).run(toy.inputs(), objective, 2.0)


def test_a_rank_whose_gather_does_not_come_says_so():
    with pytest.raises(WorkerError, match="waiting for 0UNSHARD with its data-parallel ranks"):
        run_workers(_gather_with_nobody, 2)


class Faulty(nn.Module):
    """A stage that misbehaves on its third micro-batch."""

    def __init__(self, module, fault):
        super().__init__()
        self.module, self.fault, self.calls = module, fault, 0

    def forward(self, tensor):
        self.calls += 1
        output = self.module(tensor)
        return self.fault(output) if self.calls == 3 else output


def raise_error(output):
    raise ZeroDivisionError("no luck today")


def wrong_shape(output):
    return output[:, :4]


def die(output):
    os.kill(os.getpid(), signal.SIGKILL)


def fall_asleep(output):
    time.sleep(30)
    return output


def _step(fault, timeout_s, rendezvous, rank, size):
    """One toy step; stage 1 has a fault."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    toy = Toy(4, 4)
    modules, outputs = toy.modules(), toy.outputs()
    if fault is not None:
        modules[1] = Faulty(modules[1], fault)
    schedule = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4))
    transport = Transport(rank, edges_of(schedule, outputs), world.device, timedelta(seconds=30))
    executor = make_executor(schedule, rank, modules, outputs, transport)
    executor.run(toy.inputs(), objective, timeout_s)
    expected = toy.modules()
    reference(expected, toy.inputs(), objective)
    mine = schedule.placement.stages_of(rank)
    transport.close()
    world.leave()
    return worst_difference([modules[s] for s in mine], [expected[s] for s in mine])


def test_a_step_without_a_fault_is_right():
    assert max(run_workers(partial(_step, None, 20), 2)) < 1e-12


def _failure(fault, timeout_s=20.0):
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run_workers(partial(_step, fault, timeout_s), 2)
    assert time.monotonic() - begin < timeout_s + 10
    return caught.value


def test_a_killed_worker_is_named_and_ends_the_run():
    assert str(_failure(die)) == "rank 1 was killed by signal 9 (SIGKILL)"


def test_a_failed_action_is_shown_with_its_rows_and_its_traceback():
    error = _failure(raise_error)
    assert "action 1F2 failed: ZeroDivisionError: no luck today" in str(error)
    assert ">1F2<" in str(error)
    assert "> rank 1:" in str(error)
    assert any("raise_error" in note for note in error.__notes__)


def test_a_wrong_shape_is_one_clear_message():
    error = _failure(wrong_shape)
    assert "the output of stage 1 for micro-batch 2 is float64[3, 4], but float64[3, 6] was agreed on" in str(error)
    assert ">1F2<" in str(error)
    assert "Traceback" not in "".join(getattr(error, "__notes__", []))


def test_a_rank_that_waits_too_long_says_for_what():
    error = _failure(fall_asleep, timeout_s=2.0)
    assert "timed out after 2 s: rank 0 is at slot" in str(error)
    assert "waiting for 2RECV_F2 with rank 1" in str(error)
    assert not error.is_reason  # it is the one that it waits for


def _two_opinions(rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    spec = TensorSpec((2, 8 + rank), torch.float32)
    Transport(rank, {(0, 1): [spec]}, world.device, timedelta(seconds=20))


def test_ranks_that_disagree_on_a_shape_say_so_before_the_first_step():
    with pytest.raises(WorkerError, match=r"rank 0 sends float32\[2, 8\], but rank 1 expects float32\[2, 9\]"):
        run_workers(_two_opinions, 2)


def _user_mistake(rendezvous, rank, size):
    error = UserError("the text is too short")
    error.add_note("it is that of the file notes.txt")
    raise error


def test_a_users_mistake_in_a_worker_stays_a_users_mistake():
    with pytest.raises(UserError, match="the text is too short") as refused:
        run_workers(_user_mistake, 2)
    assert refused.value.__notes__ == ["it is that of the file notes.txt"]


def _mistake_with_a_cause(rendezvous, rank, size):
    error = UserError("the optimizer is wrong")
    error.add_note("it is that of a plug-in")
    raise error from KeyError("momentun")


@pytest.mark.parametrize("variable", ["", "1"])
def test_the_traceback_of_a_users_mistake_is_printed_on_demand(monkeypatch, variable):
    monkeypatch.setenv(TRACEBACK, variable)
    with pytest.raises(UserError, match="the optimizer is wrong") as refused:
        run_workers(_mistake_with_a_cause, 1)
    (note,) = refused.value.__notes__
    assert "it is that of a plug-in" in note
    assert ("KeyError: 'momentun'" in note) == bool(variable)


def _exit(rendezvous, rank, size):
    os._exit(3)


def test_a_worker_that_ends_without_a_word_is_reported():
    with pytest.raises(WorkerError, match="rank 0 ended with status 3"):
        run_workers(_exit, 1)


def test_results_come_back_by_rank():
    assert run_workers(_rank, 3) == [0, 10, 20]


def _rank(rendezvous, rank, size):
    return 10 * rank


def _fail_alone(rendezvous, rank, size):
    if rank == 1:
        raise RuntimeError("no luck")
    time.sleep(30)


def _sums(rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    found = [world.sum([rank, 0.1, -(2.0**52)]) for _ in range(2)]
    world.leave()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_rank_gets_the_same_sum(size):
    every = run_workers(_sums, size)
    assert len(every) == size
    assert all(sums == every[0] for sums in every)
    for first, second, third in every[0]:
        assert (first, third) == (sum(range(size)), -size * 2.0**52)
        assert second == pytest.approx(0.1 * size, rel=1e-15)


def test_the_worker_that_failed_is_the_reason_and_the_others_are_ended(monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_S", 0.1)
    with pytest.raises(WorkerError, match="no luck") as failed:
        run_workers(_fail_alone, 3)
    assert (failed.value.rank, failed.value.is_reason, failed.value.ended) == (1, True, (0, 2))


def _stop_one(rendezvous, rank, size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)


def test_a_process_that_stays_stopped_is_killed():
    with pytest.raises(WorkerError, match=r"rank 1 was stopped \(SIGSTOP\) for 0\.4 s, and was killed") as failed:
        run_workers(_stop_one, 2, stopped_s=0.4)
    assert (failed.value.rank, failed.value.was_killed) == (1, True)
