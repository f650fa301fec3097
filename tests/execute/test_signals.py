"""What a rank does at a signal to end, and what the process does that started the ranks."""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import pytest

from pipeloom.errors import Interrupted
from pipeloom.execute.processes.signals import StopSignals
from pipeloom.execute.processes.workers import run_workers
from pipeloom.system.end_signals import STOPS, raised_signals

FORKED = multiprocessing.get_context("fork")
HAS_SAID = threading.Event()  # each rank is a fork of its own


class Rank:
    """A process that behaves as a rank, and what it has printed."""

    def __init__(self, work, grace_s=5.0):
        self._reader, writer = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(target=self._run, args=(work, grace_s, writer))
        self.process.start()
        writer.close()
        assert self._reader.recv() == "begun"

    def _run(self, work, grace_s, writer):
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)

        def print_line(text):
            writer.send(text)
            HAS_SAID.set()

        with StopSignals(grace_s, "the setting", print_line, lambda number: writer.send(number.name)) as signals:
            work(signals, partial(writer.send, "begun"))
        os._exit(0)

    def kill(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        """Exit status, and what was printed."""
        self.process.join(20)
        printed = []
        while self._reader.poll():
            try:
                printed.append(self._reader.recv())
            except EOFError:
                break
        return self.process.exitcode, printed


def wait_in_a_library(seconds):
    """Wait where no handler of Python runs, but for a moment after a signal, which ends this wait of C."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctypes.CDLL(None).usleep(int((until - time.monotonic()) * 1e6))


def until_asked(signals, begin):
    signals.waits = True
    begin()
    while signals.number is None:
        time.sleep(0.01)
    HAS_SAID.wait(10)  # the number comes first
    os._exit(signals.number)


def busy(seconds, signals, begin):
    signals.waits = True
    begin()
    wait_in_a_library(seconds)


def not_waiting(signals, begin):
    begin()
    wait_in_a_library(10)


def long_step(signals, begin):
    signals.waits = True
    signals.expect(60, "a step takes 60 s")
    begin()
    wait_in_a_library(10)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_noted_and_the_rank_goes_on(number):
    rank = Rank(until_asked)
    rank.kill(number)
    status, printed = rank.end()
    assert status == number
    assert printed[0].startswith("the run ends after this step, with a checkpoint, within 5 s (the setting)")


def test_outside_of_steps_a_signal_ends_the_rank_at_once_even_inside_a_library():
    rank = Rank(not_waiting)
    begin = time.monotonic()
    rank.kill(signal.SIGTERM)
    assert rank.end() == (75, ["SIGTERM"])
    assert time.monotonic() < begin + 5


def test_a_rank_that_does_not_end_within_the_grace_is_ended():
    rank = Rank(partial(busy, 10), grace_s=0.3)
    begin = time.monotonic()
    rank.kill(signal.SIGHUP)
    status, printed = rank.end()
    assert (status, printed[-1]) == (129, "SIGHUP")
    assert "did not end in order within 0.3 s (the setting); it ends at once" in printed[1]
    assert 0.3 <= time.monotonic() - begin < 5


def test_a_step_that_is_longer_than_the_grace_is_not_waited_for():
    rank = Rank(long_step)
    begin = time.monotonic()
    rank.kill(signal.SIGTERM)
    status, printed = rank.end()
    assert (status, printed[-1]) == (75, "SIGTERM")
    assert "cannot end in order within 5 s (the setting), since a step takes 60 s" in printed[0]
    assert time.monotonic() < begin + 4


def test_a_second_interrupt_ends_the_rank_at_once_but_neither_its_echo_nor_a_second_termination_does():
    rank = Rank(partial(busy, 10))
    begin = time.monotonic()
    rank.kill(signal.SIGINT)
    rank.kill(signal.SIGINT)
    time.sleep(0.7)
    rank.kill(signal.SIGTERM)
    time.sleep(0.1)
    assert rank.process.is_alive()
    rank.kill(signal.SIGINT)
    status, printed = rank.end()
    assert (status, printed[-2:]) == (130, ["interrupted again: the run ends at once", "SIGINT"])
    assert time.monotonic() < begin + 5


def ignoring(signals, begin):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals(5, "the setting", print, print) as inner:
        inner.waits = True
        begin()
        time.sleep(0.3)
        os._exit(0 if inner.number is None else 1)


def test_a_signal_that_nohup_lets_a_process_ignore_stays_ignored():
    rank = Rank(ignoring)
    rank.kill(signal.SIGHUP)
    assert rank.end()[0] == 0


def test_handlers_are_as_before_when_nothing_has_come():
    before = [signal.getsignal(number) for number in STOPS]
    with StopSignals(5, "the setting", print, print):
        assert [signal.getsignal(number) for number in STOPS] != before
    assert [signal.getsignal(number) for number in STOPS] == before


def test_a_termination_is_raised_with_its_status():
    with raised_signals(), pytest.raises(Interrupted, match="interrupted by SIGHUP") as caught:
        signal.raise_signal(signal.SIGHUP)
    assert caught.value.status == 129


def _interrupts_its_parent(number, rendezvous, rank, size):
    if rank == 0:
        os.kill(os.getppid(), number)
    time.sleep(30)


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_workers_that_note_nothing_end_with_the_signal_that_their_parent_gets(grace_s):
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        run_workers(partial(_interrupts_its_parent, signal.SIGTERM), 2, grace_s=grace_s)
    assert time.monotonic() < begin + 10


def _fails_after_a_signal(rendezvous, rank, size):
    with StopSignals(5, "the setting", print, print) as signals:
        signals.waits = True
        os.kill(os.getppid(), signal.SIGINT)
        while signals.number is None:
            time.sleep(0.01)
    raise ZeroDivisionError("no luck today")


def test_a_failure_after_a_signal_is_not_hidden():
    with pytest.raises(Interrupted, match="interrupted by SIGINT") as caught:
        run_workers(_fails_after_a_signal, 1, grace_s=5)
    assert "no luck today" in caught.value.__notes__[0]
