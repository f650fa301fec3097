"""What every test gets."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("explore", deadline=None)  # a loop may be compiled in the middle of a test
settings.register_profile("pipeloom", settings.get_profile("explore"), derandomize=True)
settings.load_profile("pipeloom")  # the same examples everywhere; others: pytest --hypothesis-profile explore
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("COLUMNS", "LINES"):  # a terminal's size changes the lines that a test compares
    os.environ.pop(_name, None)
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:  # as below nohup, or behind an & of a script; runs inherit it
        signal.signal(_number, _handler)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``: tests marked ``long``, too."""
    parser.addoption("--all", action="store_true", help="also the tests marked long: more draws of the same checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long``, so that the tests of every commit stay within minutes."""
    if config.getoption("--all"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Leave the tests' own objects out of collections, in the processes that fork from this one, too.

    Collect less often: with Python's threshold of 700 objects it takes a tenth of the time of all tests.
    """
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start their own processes, whatever started pytest."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def loses_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of signals that raise: a destructor or a callback of the collector loses the first exception.

    The work raises it again. pytest would report the first one, or fail if the second one is raised in that report.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
