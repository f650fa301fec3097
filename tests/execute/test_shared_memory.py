"""Both ends of an edge in shared memory: blocks that are used again, a rank that ends, and who may share."""

import errno
import mmap
import os
import resource
import socket
import threading
from contextlib import closing

import pytest
import torch

from pipeloom.errors import BoundaryError, PeerLostError, RunError
from pipeloom.execute.communication import shared_memory
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.shared_memory import Listener, SharedReceiver, SharedSender, connect

SPEC = TensorSpec((3, 5), torch.float32)
WAIT_S = 10.0
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a file")


@pytest.fixture
def ends():
    with closing(Listener(is_open=True)) as listener:
        mine = connect(listener.name)
        sender, receiver = SharedSender(mine, "rank 1"), SharedReceiver(listener.accept(WAIT_S)[1], "rank 0")
    yield sender, receiver
    for one in (sender, receiver):
        if one is not None:
            one.end()


def received(receiver, spec=SPEC):
    receipt = receiver.receive(spec)
    assert receipt.wait(WAIT_S)
    return receipt.take()


def test_a_received_tensor_is_the_receivers_own(ends):
    sender, receiver = ends
    tensor = torch.arange(15.0).view(3, 5)
    sent = sender.send(tensor)
    assert sent.is_done()
    tensor.zero_()
    first = received(receiver)
    assert first.equal(torch.arange(15.0).view(3, 5))
    for _ in range(40):  # the block of the first message is used again
        sender.send(tensor)
        received(receiver)
    assert first.equal(torch.arange(15.0).view(3, 5))


def test_blocks_are_used_again(ends):
    sender, receiver = ends
    for _ in range(200):
        sender.send(torch.zeros(SPEC.shape))
        received(receiver)
    assert os.fstat(sender._ends.memory).st_size <= 16 * os.sysconf("SC_PAGESIZE")


def test_messages_of_many_sizes_use_the_same_blocks(ends):
    sender, receiver = ends
    rows = [int(number) for number in torch.randint(500, 1000, (300,), generator=torch.Generator().manual_seed(1))]
    for count in rows:
        sender.send(torch.full((count, 16), float(count)))
        assert received(receiver, TensorSpec((count, 16), torch.float32)).eq(count).all()
    most = max(rows) * 16 * 4
    # The receiver returns several blocks at once, and a block is at most twice as large as its message.
    assert os.fstat(sender._ends.memory).st_size <= 8 * 1.25 * most


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 40_000, 196_608, 1_000_000, 123_456_789])
def test_a_block_is_hardly_larger_than_its_message(num_bytes):
    size = shared_memory._block_size(num_bytes)
    assert size % mmap.ALLOCATIONGRANULARITY == 0
    assert max(1, num_bytes) <= size <= max(num_bytes * 1.125, num_bytes + mmap.ALLOCATIONGRANULARITY)
    assert shared_memory._block_size(size) == size


@pytest.mark.parametrize("ahead", [1, 7, 100])
def test_a_sender_may_be_ahead_by_any_number(ends, ahead):
    sender, receiver = ends
    for begin in range(0, 3 * ahead, ahead):
        for number in range(begin, begin + ahead):
            sender.send(torch.full(SPEC.shape, float(number)))
        found = [received(receiver)[0, 0].item() for _ in range(ahead)]
        assert found == [float(number) for number in range(begin, begin + ahead)]


@pytest.mark.parametrize(
    "spec", [TensorSpec((0, 4), torch.float32), TensorSpec((), torch.int64), TensorSpec((7,), torch.bfloat16)]
)
def test_tensors_of_any_spec(ends, spec):
    sender, receiver = ends
    sender.send(torch.ones(spec.shape, dtype=spec.dtype))
    tensor = received(receiver, spec)
    assert TensorSpec.of(tensor) == spec
    assert tensor.eq(1).all()


def test_a_message_without_memory_is_an_error_and_no_signal(ends, monkeypatch):
    sender, _ = ends

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory, "take_room", refuse)
    with pytest.raises(RunError, match="no shared memory for a message of 60 bytes to rank 1: No space left"):
        sender.send(torch.zeros(SPEC.shape))


def test_strides_do_not_matter(ends):
    sender, receiver = ends
    tensor = torch.arange(15.0).view(5, 3).T
    sender.send(tensor)
    assert received(receiver).equal(tensor)


def test_another_size_than_agreed_is_refused(ends):
    sender, receiver = ends
    sender.send(torch.zeros(4))
    receipt = receiver.receive(SPEC)
    assert receipt.wait(WAIT_S)
    with pytest.raises(BoundaryError, match=r"rank 0 sent 16 bytes, but float32\[3, 5\] was agreed on"):
        receipt.take()


def test_another_thread_sees_what_has_arrived_though_the_rank_has_not_looked(ends):
    sender, receiver = ends
    receipts = [receiver.receive(SPEC) for _ in range(3)]
    for _ in range(2):
        sender.send(torch.zeros(SPEC.shape))
    assert [receipt.has_passed() for receipt in receipts] == [True, True, False]
    assert all(receipt.line is None for receipt in receipts)
    assert receipts[0].is_done()
    assert [receipt.has_passed() for receipt in receipts] == [True, True, False]


def test_what_was_sent_arrives_before_the_end_of_its_sender(ends):
    sender, receiver = ends
    sender.send(torch.ones(SPEC.shape))
    sender._ends.close()
    sender._ends = sender._ends._replace(**{name: os.open(os.devnull, os.O_RDWR) for name in sender._ends._fields})
    assert received(receiver).eq(1).all()
    receipt = receiver.receive(SPEC)
    assert receipt.wait(WAIT_S)
    with pytest.raises(PeerLostError, match="rank 0 closed the connection"):
        receipt.take()


def test_a_receiver_that_waits_notices_the_end_of_its_sender(ends):
    sender, receiver = ends
    receipt = receiver.receive(SPEC)
    ended = threading.Timer(0.1, lambda: os.dup2(os.open(os.devnull, os.O_RDWR), sender._ends.messages))
    ended.start()
    assert receipt.wait(WAIT_S)
    ended.join()
    with pytest.raises(PeerLostError):
        receipt.take()


def test_a_sender_notices_the_end_of_its_receiver(ends):
    sender, receiver = ends
    os.dup2(os.open(os.devnull, os.O_RDWR), receiver._ends.messages)
    with pytest.raises(PeerLostError, match="rank 1 closed the connection"):
        sender.send(torch.ones(SPEC.shape))


def test_nobody_shares_with_a_listener_that_is_closed_or_on_another_host():
    with closing(Listener(is_open=False)) as listener:
        assert connect(listener.name) is None
    with closing(Listener(is_open=True)) as listener:
        name = listener.name
    assert connect(name) is None


def test_a_listener_takes_no_connection_without_memory():
    with closing(Listener(is_open=True)) as listener:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(b"\0pipeloom-" + bytes(listener.name.tolist()))
        with pytest.raises(PeerLostError):
            listener.accept(WAIT_S)


def test_nobody_shares_under_a_limit_on_the_size_of_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda limit: {resource.RLIMIT_FSIZE: (1 << 30, -1)}[limit])
    with closing(Listener(is_open=True)) as listener:
        assert connect(listener.name) is None
