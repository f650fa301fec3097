"""Groups on CPUs, in shared memory and over gloo: what each operation computes, and which of them a rank gets."""

import gc
import os
import threading
from contextlib import closing
from functools import partial

import pytest
import torch

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.communication import collectives, shared_groups
from pipeloom.execute.communication.collectives import Note, own_group
from pipeloom.execute.communication.shared_groups import Link, SharedGroup
from pipeloom.execute.communication.shared_memory import Listener, SharedReceiver, SharedSender, connect
from pipeloom.execute.communication.torch_groups import GlooGroup
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a file")
NOTE = Note(None, "test")
SMALL, LARGE = 24, 120_000
"""Elements of tensors that are exchanged whole, and in parts; divisible by 2, 3 and 4."""


def drawn(rank, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).to(dtype)


def of_every_operation(group):
    """Name -> whether an operation did what it has to, on this rank."""
    size, index, found = group.size, group.index, {}
    # In shared memory sums are in the order of the ranks, over gloo in any order.
    same = torch.equal if isinstance(group, SharedGroup) else partial(torch.allclose, atol=1e-5)
    for count in (SMALL, LARGE):
        every = [drawn(rank, count) for rank in range(size)]
        total = sum(every[1:], every[0].clone())

        whole = every[index].clone()
        group.all_reduce(whole)()
        found[f"sum of {count}"] = same(whole, total)

        whole = every[index].clone()
        group.all_reduce(whole, "max")()
        found[f"maximum of {count}"] = whole.equal(torch.stack(every).amax(0))

        whole, part = every[index].clone(), torch.empty(count // size)
        group.reduce_scatter(part, whole)()
        found[f"part of the sum of {count}"] = same(part, total.view(size, -1)[index]) and whole.equal(every[index])

        whole = every[index].clone()
        part = whole.view(size, -1)[index]
        group.reduce_scatter(part, whole)()  # in its own memory
        found[f"part of the sum of {count}, in place"] = same(part, total.view(size, -1)[index])

        whole = torch.empty(size * count)
        group.gather(whole, every[index])()
        found[f"all of {count}"] = whole.equal(torch.cat(every))

        received = torch.empty(count), torch.empty(2)
        group.pass_on(received, (every[index], torch.full((2,), float(index))))()
        before = (index - 1) % size
        found[f"that before, {count}"] = received[0].equal(every[before]) and received[1].eq(before).all().item()
    return found


def uneven(group):
    """All-to-all of other sizes each time, some of them empty, while the next one has begun; sums of any size."""
    size, index, ends = group.size, group.index, []
    for step in range(12):
        sizes = [[(a * 7 + b * 3 + step) % 5 * 1000 for b in range(size)] for a in range(size)]
        sent = [torch.full((sizes[index][to], 2), float(10 * index + to)) for to in range(size)]
        received = [torch.empty(sizes[source][index], 2) for source in range(size)]
        ends.append((group.exchange(received, sent), received))
        for one in sent if isinstance(group, SharedGroup) else ():
            one.zero_()  # they have been sent
        if step % 2:
            for end, _ in ends[-2:]:
                end()
    arrived = all(one.eq(10 * source + index).all() for _, received in ends for source, one in enumerate(received))
    odd = torch.full((LARGE + 1,), float(index))
    group.all_reduce(odd)()
    narrow = torch.full((LARGE,), 1 / 3, dtype=torch.bfloat16)
    group.all_reduce(narrow)()
    exact = torch.full((1,), 1 / 3, dtype=torch.bfloat16).float().mul(size).to(torch.bfloat16)
    return {
        "exchanged": arrived,
        "odd": odd.eq(sum(range(size))).all().item(),
        "bfloat16 is rounded once": narrow.eq(exact).all().item() or not isinstance(group, SharedGroup),
    }


def _rank(check, kind, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    shared_groups._PIECE_BYTES = 40_000  # less than the large tensors
    if kind is GlooGroup:
        collectives.links_of = lambda *_: {}
    group = own_group([range(size)], world, NOTE)
    assert type(group) is kind
    found = check(group)
    world.leave()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", [SharedGroup, GlooGroup])
@pytest.mark.parametrize("check", [of_every_operation, uneven])
def test_operations(size, kind, check):
    for found in run_workers(partial(_rank, check, kind), size):
        assert found
        assert [name for name, is_right in found.items() if not is_right] == []


def _rank_of_two_groups(rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    if rank == 3:
        shared_groups.connect = lambda *_: None
    group = own_group([[0, 2], [1, 3]], world, NOTE)
    tensor = torch.full((5,), float(rank))
    group.all_reduce(tensor)()
    with_one = own_group([[0, 1, 2]], world, NOTE)
    world.leave()
    return type(group), tensor[0].item(), type(with_one).__name__


def test_a_group_with_a_rank_that_shares_no_memory_uses_gloo():
    found = run_workers(_rank_of_two_groups, 4)
    assert [(kind, total) for kind, total, _ in found] == [(SharedGroup, 2), (GlooGroup, 4)] * 2
    assert [name for *_, name in found] == ["SharedGroup"] * 3 + ["Alone"]


def edge(source, target):
    """Both ends of an edge between two processes, in this one."""
    with closing(Listener(is_open=True)) as listener:
        ends = connect(listener.name)
        return SharedSender(ends, f"process {target}"), SharedReceiver(listener.accept(5.0)[1], f"process {source}")


def pair(timeout_s=0.05):
    """Both ranks of a group of processes 5 and 7, in this one."""
    (there, from_five), (back, from_seven) = edge(5, 7), edge(7, 5)
    first = SharedGroup({7: Link(there, from_seven)}, (5, 7), 0, timeout_s=timeout_s)
    return first, SharedGroup({5: Link(back, from_five)}, (5, 7), 1, timeout_s=timeout_s)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_who_waits_for_a_rank_that_does_not_come_stops_and_names_it(count):
    first, _second = pair()
    end = first.all_reduce(torch.ones(count))
    with pytest.raises(StallError, match=r"process 7 did not come in time: Timed out after 0\.05 s"):
        end()


def test_who_waits_for_a_rank_that_has_ended_stops_and_names_it():
    first, second = pair()
    end = first.all_reduce(torch.ones(SMALL))
    os.dup2(os.open(os.devnull, os.O_RDWR), second._links[0].sender._ends.messages)
    with pytest.raises(PeerLostError, match="process 7 closed the connection"):
        end()


def test_two_ranks_hold_two_pieces_of_a_large_tensor_at_most(monkeypatch):
    monkeypatch.setattr(shared_groups, "_PIECE_BYTES", 256 * 1024)
    groups, found = pair(timeout_s=20.0), []
    tensors = [torch.full((1_000_000,), float(index)) for index in range(2)]

    def sum_up(index):
        groups[index].all_reduce(tensors[index])()
        found.append(index)

    threads = [threading.Thread(target=sum_up, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(found) == [0, 1]
    assert all(tensor.eq(1).all() for tensor in tensors)
    for group in groups:
        (link,) = group._links.values()
        assert os.fstat(link.sender._ends.memory).st_size <= 3 * 256 * 1024


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_descriptors_are_closed_with_their_group():
    groups = list(pair())
    numbers = [one for group in groups for link in group._links.values() for end in link for one in end._ends]
    assert len(numbers) == 12
    assert all(map(is_open, numbers))
    groups.clear()
    gc.collect()
    assert not any(map(is_open, numbers))
