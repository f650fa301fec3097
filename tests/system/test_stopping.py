"""Work ends at its time limit or at Ctrl-C, wherever it is, and what is shielded is not cut in two."""

import signal
import sys
import threading
import time

import pytest

from pipeloom.system.stopping import Stop, shielded

ROOM_S = 0.3
"""Time in which work has begun on a busy machine too, before a limit that is meant to be up in its middle."""


def forever():
    while True:
        sum(range(1000))


def sleep_beyond(deadline):
    time.sleep(max(0.0, deadline - time.monotonic()) + 0.05)


def test_work_without_a_look_at_the_clock_ends_when_its_time_is_up():
    stop, begin = Stop(time.monotonic() + 0.05), time.monotonic()
    stop.run(forever)
    assert stop.reason == "time"
    assert time.monotonic() - begin >= 0.05


def test_a_time_that_is_over_already_ends_the_work_at_once():
    stop = Stop(time.monotonic() - 1)
    stop.run(forever)
    assert stop.reason == "time"


def test_ctrl_c_ends_the_work_and_is_the_terminals_again_behind_it():
    def work():
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
        forever()

    stop = Stop(None)
    stop.run(work)
    assert stop.reason == "interrupt"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("loses_exceptions")
@pytest.mark.parametrize("is_interrupt", [True, False])
def test_an_exception_that_a_destructor_swallows_is_raised_again(is_interrupt):
    class Slow:
        def __del__(self):
            if is_interrupt:
                signal.raise_signal(signal.SIGINT)
            sleep_beyond(deadline)

    def work():
        value = Slow()
        del value
        swallowed.append(True)
        forever()

    deadline = time.monotonic() + ROOM_S
    swallowed, stop = [], Stop(None if is_interrupt else deadline)
    stop.run(work)
    assert (swallowed, stop.reason) == ([True], "interrupt" if is_interrupt else "time")


def test_work_that_is_done_in_time_has_no_reason_and_leaves_no_timer():
    done, stop = [], Stop(time.monotonic() + 60)
    before = signal.getsignal(signal.SIGALRM)
    stop.run(lambda: done.append(1))
    assert (done, stop.reason) == ([1], None)
    assert signal.getsignal(signal.SIGALRM) is before


def test_errors_of_the_work_are_the_callers():
    with pytest.raises(IndexError):
        Stop(time.monotonic() + 60).run([].pop)


def test_what_is_shielded_is_done_before_the_end():
    done = []

    def work():
        with shielded():
            sleep_beyond(deadline)
            done.append("whole")
        done.append("too much")

    deadline = time.monotonic() + ROOM_S
    stop = Stop(deadline)
    stop.run(work)
    assert (done, stop.reason) == (["whole"], "time")


def test_a_timer_that_there_was_goes_on():
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        Stop(time.monotonic() + 60).run(lambda: time.sleep(0.01))
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] < 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_in_another_thread_nothing_is_raised():
    done = []
    stop = Stop(time.monotonic() + 0.01)
    thread = threading.Thread(target=lambda: stop.run(lambda: done.append(time.sleep(0.05))))
    thread.start()
    thread.join()
    assert (len(done), stop.reason) == (1, None)


@pytest.mark.parametrize("is_interrupt", [True, False])
def test_an_exception_that_c_code_replaces_by_its_own_ends_the_work_too(is_interrupt):
    def work():
        try:
            if is_interrupt:
                signal.raise_signal(signal.SIGINT)
            forever()
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    stop = Stop(time.monotonic() + 0.05)
    stop.run(work)
    assert stop.reason == ("interrupt" if is_interrupt else "time")


def test_an_error_of_c_code_itself_is_raised():
    def work():
        raise SystemError("a defect")

    stop = Stop(time.monotonic() + 5)
    with pytest.raises(SystemError, match="a defect"):
        stop.run(work)
    assert stop.reason is None


def test_only_foreign_exceptions_that_a_destructor_swallows_are_reported(monkeypatch):
    class Slow:
        def __del__(self):
            sleep_beyond(deadline)

    class Broken:
        def __del__(self):
            raise ValueError

    def work():
        for kind in (Broken, Slow):
            value = kind()
            del value
        forever()

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_type))
    hook, deadline = sys.unraisablehook, time.monotonic() + ROOM_S
    stop = Stop(deadline)
    stop.run(work)
    assert (stop.reason, seen) == ("time", [ValueError])
    assert sys.unraisablehook is hook
