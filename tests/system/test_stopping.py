"""Work ends at its time limit or at Ctrl-C, wherever it is, and what is shielded is not cut in two."""

import signal
import threading
import time

import pytest

from pipeloom.system.stopping import Stop, shielded


def forever(begun=None):
    if begun is not None:
        begun.append(time.monotonic())
    while True:
        sum(range(1000))


def test_work_without_a_look_at_the_clock_ends_when_its_time_is_up():
    stop, begin = Stop(time.monotonic() + 0.05), time.monotonic()
    stop.run(forever)
    assert stop.reason == "time"
    assert 0.05 <= time.monotonic() - begin < 1


def test_a_time_that_is_over_already_ends_the_work_at_once():
    stop = Stop(time.monotonic() - 1)
    stop.run(forever)
    assert stop.reason == "time"


def test_ctrl_c_ends_the_work_and_is_the_terminals_again_behind_it():
    stop = Stop(None)
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    stop.run(forever)
    assert stop.reason == "interrupt"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the destructor, on purpose
@pytest.mark.parametrize("is_interrupt", [True, False])
def test_an_exception_that_a_destructor_swallows_is_raised_again(is_interrupt):
    class Slow:
        def __del__(self):
            if is_interrupt:
                signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)

    def work():
        value = Slow()
        del value
        swallowed.append(True)
        forever()

    swallowed, stop = [], Stop(None if is_interrupt else time.monotonic() + 0.02)
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
            time.sleep(0.15)
            done.append("whole")
        done.append("too much")

    stop = Stop(time.monotonic() + 0.02)
    stop.run(work)
    assert (done, stop.reason) == (["whole"], "time")


def test_a_timer_that_there_was_goes_on():
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        Stop(time.monotonic() + 60).run(lambda: time.sleep(0.01))
        assert 99 < signal.getitimer(signal.ITIMER_REAL)[0] < 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_in_another_thread_nothing_is_raised():
    done = []
    stop = Stop(time.monotonic() + 0.01)
    thread = threading.Thread(target=lambda: stop.run(lambda: done.append(time.sleep(0.05))))
    thread.start()
    thread.join()
    assert (len(done), stop.reason) == (1, None)
