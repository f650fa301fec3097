"""What every transport must do: the same script of sends and receives, on each of them.

A script is a generator for each rank: it yields transfers to wait for and returns what it received.
"""

import time
import weakref
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
import torch
from in_process import Post
from toy import WIDTH

from pipeloom.errors import BoundaryError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked

SPEC = TensorSpec((WIDTH,), torch.float32)
LARGE = TensorSpec((512, 512), torch.float64)


def numbered(number, spec=SPEC):
    return torch.full(spec.shape, float(number), dtype=spec.dtype)


def value(transfer):
    tensor = transfer.take()
    assert tensor.unique().numel() == 1
    return tensor.flatten()[0].item()


def in_order(rank, transport):
    if rank == 0:
        for transfer in [transport.send(numbered(n), 1) for n in range(20)]:
            yield transfer
        return None
    transfers = [transport.receive(SPEC, 0) for _ in range(20)]
    for transfer in transfers:
        yield transfer
    return [value(transfer) for transfer in transfers]


def last_first(rank, transport):
    """Waiting in another order than posting changes nothing."""
    if rank == 0:
        for transfer in [transport.send(numbered(n), 1) for n in range(5)]:
            yield transfer
        return None
    transfers = [transport.receive(SPEC, 0) for _ in range(5)]
    for transfer in reversed(transfers):
        yield transfer
    return [value(transfer) for transfer in transfers]


def both_ways_at_once(rank, transport):
    """Two large messages that cross: neither send may wait for the other side to finish."""
    send = transport.send(numbered(rank, LARGE), 1 - rank)
    receive = transport.receive(LARGE, 1 - rank)
    yield receive
    yield send
    return value(receive)


def receive_before_send(rank, transport):
    """A receive posted long before its send does not block the rank."""
    if rank == 1:
        first = transport.receive(SPEC, 0)
        yield transport.send(numbered(7), 0)
        yield first
        return value(first)
    request = transport.receive(SPEC, 1)
    yield request
    yield transport.send(numbered(value(request) + 1), 1)
    return None


def mixed_specs(rank, transport):
    """Forward and backward tensors of other shapes share an edge."""
    specs = [SPEC, LARGE, SPEC, LARGE]
    if rank == 0:
        for transfer in [transport.send(numbered(n, spec), 1) for n, spec in enumerate(specs)]:
            yield transfer
        return None
    transfers = [transport.receive(spec, 0) for spec in specs]
    for transfer in transfers:
        yield transfer
    tensors = [transfer.take() for transfer in transfers]
    return [(tuple(tensor.shape), tensor.flatten()[0].item()) for tensor in tensors]


def times_are_ordered(rank, transport):
    """Transfers of one lane end one after the other."""
    if rank == 0:
        transfers = [transport.send(numbered(n, LARGE), 1) for n in range(4)]
    else:
        transfers = [transport.receive(LARGE, 0) for _ in range(4)]
    yield from transfers
    return [(transfer.begin, transfer.end) for transfer in transfers]


def taken_and_dropped(rank, transport):
    """Nothing of a transport keeps a tensor that its user has dropped, nor one that has been sent."""
    tensor = numbered(1, LARGE)
    transfer = transport.send(tensor, 1) if rank == 0 else transport.receive(LARGE, 0)
    yield transfer
    if rank == 1:
        tensor = transfer.take()
    seen = weakref.ref(tensor)
    del tensor
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # a lane's thread may be about to let go
    return seen() is None


def seen_without_waiting(rank, transport):
    """The ends of transfers are noticed though nobody waits for them."""
    count = 4
    for _ in range(2):
        if rank == 0:
            transfers = [transport.send(numbered(n), 1) for n in range(count)]
        else:
            transfers = [transport.receive(SPEC, 0) for _ in range(count)]
        deadline = time.monotonic() + 5
        while not all(transfer.is_done() for transfer in transfers) and time.monotonic() < deadline:
            time.sleep(0.001)
        yield from (transfer for transfer in transfers if not transfer.is_done())
    return all(transfer.is_done() for transfer in transfers)


def taken_over(rank, transport):
    """A rank may begin to wait while a thread does, and stop the thread from waiting for what comes later."""
    if rank == 0:
        sends = []
        for n in range(6):
            time.sleep(0.02)
            sends.append(transport.send(numbered(n), 1))
        yield from sends
        return None
    transfers = [transport.receive(SPEC, 0) for _ in range(6)]
    time.sleep(0.03)
    found = []
    for transfer in transfers[::2]:
        yield transfer
        found.append(value(transfer))
    yield from transfers[1::2]
    return found + [value(transfer) for transfer in transfers[1::2]]


def in_vain(rank, transport):
    """Waiting for what nobody sends ends in time."""
    if rank == 1:
        begin = time.monotonic()
        has_come = transport.receive(SPEC, 0).wait(0.2)
        return has_come, time.monotonic() - begin < 5
    time.sleep(0.5)
    return None
    yield


def play_in_process(script):
    post = Post()
    running = {rank: script(rank, post.transport(rank)) for rank in range(2)}
    waiting, answers = {}, {}
    for _ in range(1000):
        for rank in list(running):
            if rank not in waiting or waiting[rank].is_done():
                try:
                    waiting[rank] = next(running[rank])
                except StopIteration as end:
                    answers[rank] = end.value
                    del running[rank]
    assert not running, "the script hangs"
    return [answers[rank] for rank in range(2)]


def _rank_of_processes(script, shares_memory, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    edges = {(0, 1): [SPEC, LARGE], (1, 0): [SPEC, LARGE]}
    transport = Transport(rank, edges, world.device, timedelta(seconds=20), shares_memory=shares_memory)
    steps = script(rank, transport)
    try:
        while True:
            assert next(steps).wait(15), "timed out"
    except StopIteration as end:
        answer = end.value
    transport.close()
    world.leave()
    return answer


def play_over_gloo(script):
    return run_workers(partial(_rank_of_processes, script, False), 2)


def play_in_shared_memory(script):
    return run_workers(partial(_rank_of_processes, script, True), 2)


BETWEEN_PROCESSES = pytest.mark.parametrize("play", [play_over_gloo, play_in_shared_memory])
PLAYERS = pytest.mark.parametrize("play", [play_in_process, play_over_gloo, play_in_shared_memory])


@PLAYERS
@pytest.mark.parametrize("script", [in_order, last_first])
def test_tensors_arrive_in_the_order_of_their_edge(play, script):
    count = 20 if script is in_order else 5
    assert play(script)[1] == [float(n) for n in range(count)]


@BETWEEN_PROCESSES
def test_processes_see_the_ends_of_transfers_that_nobody_waits_for(play):
    assert play(seen_without_waiting) == [True, True]


@BETWEEN_PROCESSES
def test_a_rank_takes_over_from_a_thread_that_waits(play):
    assert play(taken_over)[1] == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


@BETWEEN_PROCESSES
def test_waiting_in_vain_between_processes_ends_in_time(play):
    assert play(in_vain)[1] == (False, True)


@PLAYERS
def test_messages_that_cross_do_not_wait_for_each_other(play):
    assert play(both_ways_at_once) == [1.0, 0.0]


@PLAYERS
def test_a_receive_may_be_posted_before_its_send(play):
    assert play(receive_before_send)[1] == 8.0


@PLAYERS
def test_tensors_of_several_specs_share_an_edge(play):
    assert play(mixed_specs)[1] == [((WIDTH,), 0.0), ((512, 512), 1.0), ((WIDTH,), 2.0), ((512, 512), 3.0)]


@PLAYERS
def test_tensors_are_freed(play):
    assert play(taken_and_dropped) == [True, True]


@PLAYERS
def test_transfers_of_a_lane_end_in_their_order_after_they_were_posted(play):
    for times in play(times_are_ordered):
        assert all(start_s <= end_s for start_s, end_s in times)
        assert all(before <= after for (_, before), (_, after) in pairwise(times))


def test_a_sent_tensor_is_a_copy_in_process():
    post = Post()
    tensor = numbered(1)
    post.transport(0).send(tensor, 1)
    receive = post.transport(1).receive(SPEC, 0)
    tensor.zero_()
    assert receive.is_done()
    assert value(receive) == 1.0


def test_another_shape_than_agreed_is_refused_in_process():
    post = Post()
    post.transport(0).send(numbered(1, LARGE), 1)
    receive = post.transport(1).receive(SPEC, 0)
    assert receive.is_done()
    with pytest.raises(BoundaryError, match=r"float64\[512, 512\], but float32\[6\] was agreed on"):
        receive.take()
