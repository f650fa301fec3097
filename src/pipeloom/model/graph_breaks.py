"""Functions that the compiler must not trace, without loading it: that takes as long as loading PyTorch."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


def graph_break(function: Callable[_Takes, _Gives]) -> Callable[_Takes, _Gives]:
    """``torch.compiler.disable``, applied where the compiler is loaded."""
    disabled: Callable[_Takes, _Gives] | None = None

    @wraps(function)
    def call(*args: _Takes.args, **settings: _Takes.kwargs) -> _Gives:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **settings)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **settings)

    # The mark by which a compiler that is loaded later does not trace into this function either.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    return call


def keep_compiler_unloaded() -> None:
    """Let operators on the meta device run without loading the compiler, for a process that compiles nothing.

    PyTorch computes shapes on the meta device by Python functions. Some of them have a wrapper that keeps the compiler
    from tracing them, and that loads it at the first call. The wrapper calls what it finds in an attribute of the
    function; this sets the function itself. Where PyTorch changes that, the compiler is loaded as before.
    """
    wrapper: Any = torch._disable_dynamo(keep_compiler_unloaded)  # noqa: SLF001  no public name has its code
    tables = getattr(import_module("torch._decomp"), "global_decomposition_table", {})
    waiting: list[Any] = [wrapper, *(function for table in tables.values() for function in table.values())]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        with suppress(ValueError):  # a cell that is still empty
            waiting += [cell.cell_contents for cell in function.__closure__ or ()]
        if function.__code__ is wrapper.__code__ and function.__closure__ is not None:
            wrapped = function.__closure__[function.__code__.co_freevars.index("fn")].cell_contents
            wrapped.__dynamo_disable = wrapped  # noqa: SLF001
