"""Kernels: loops over arrays of actions that run as plain Python, or compiled where that pays.

A kernel is a plain function over arrays in ``pipeloom.schedule.kernels``. Loading the compiler takes about a second,
longer than a small schedule takes in all. So kernels run as Python until this process has passed ``PATIENCE`` actions
through them, and are compiled by numba, with its cache on disk, from then on. Without numba they always run as Python.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from pipeloom.system.stopping import shielded
from pipeloom.terminal.guard import print_beside

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 400_000
"""Number of actions from which the compiler pays: about a second of plain Python."""
_seen = 0
_is_lean = False


def kernel(function: Callable[P, R], num_actions: int) -> Callable[P, R]:
    """The function, compiled if that pays.

    Args:
        function: of a module of kernels.
        num_actions: that it is about to run over.
    """
    global _seen  # noqa: PLW0603  how much a process has done is a fact about the process
    # Over all calls: a search makes thousands of small schedules.
    _seen += num_actions
    return compiled(function) if _seen > PATIENCE else function


def expect_much() -> None:
    """For a process that answers many requests: compile kernels at their first call."""
    global _seen  # noqa: PLW0603  how much a process does is a fact about the process
    _seen = PATIENCE


def start_lean() -> None:
    """Settings for commands: numba starts without scipy, and a message is printed when it has to compile.

    numba imports scipy for linear algebra in kernels, which takes a third of its start; these kernels have none.
    """
    global _is_lean  # noqa: PLW0603  how the compiler starts is a fact about the process
    _is_lean = True


@cache
def is_available() -> bool:
    """Whether there is a compiler."""
    return importlib.util.find_spec("numba") is not None


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled, if there is a compiler."""
    if not is_available():
        return function
    module = importlib.import_module(function.__module__)
    with shielded():  # half of an imported compiler is none
        return _compile_all(module)[function.__name__]


@cache
def _compile_all(module: ModuleType) -> dict[str, Any]:
    """The module's names with every function of its own compiled, so that they call each other compiled."""
    import numba
    from numba.core.registry import cpu_target

    if _is_lean:
        with _hidden("scipy.linalg"):
            importlib.import_module("numba.np.arraymath")
    # The first compiled call would import the rest, outside of the shield.
    cpu_target.target_context.refresh()  # type: ignore[missing-attribute]
    # The compiler keeps what it compiled until the module's own file changes. Constants that come from another module
    # are compiled in, so they are part of the name under which it is kept.
    constants = sorted((name, value) for name, value in vars(module).items() if name.isupper())
    stamp = hashlib.sha256(repr(constants).encode()).hexdigest()[:8]
    names, folder = dict(vars(module)), Path()
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            copy = FunctionType(value.__code__, names, name, value.__defaults__)
            # numba names the files of its cache by the qualified name, so that other constants find other files.
            copy.__module__, copy.__qualname__ = value.__module__, f"{name}_{stamp}"
            names[name] = _uninterrupted(numba.njit(cache=True)(copy))
            folder = Path(names[name].stats.cache_path)
    if _is_lean and not any(folder.glob(f"{module.__name__.rpartition('.')[2]}.*_{stamp}-*.nbi")):
        print_beside(f"Compiling {module.__name__} (once on this machine) ...")
    return names


def _uninterrupted(dispatcher: Any) -> Any:
    """The dispatcher, which no ``Stop`` interrupts while it compiles.

    LLVM calls back for what it compiled, where an exception of a signal is lost and the object with it.
    """
    compile_now = dispatcher.compile

    def compile_all(*arguments: Any) -> Any:
        with shielded():
            return compile_now(*arguments)

    dispatcher.compile = compile_all
    return dispatcher


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Context in which a module cannot be imported."""
    found = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    yield
    if found is None:
        del sys.modules[name]
    else:
        sys.modules[name] = found
