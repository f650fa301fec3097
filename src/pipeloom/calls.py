"""Checks of calls of the Python interface: all problems of the arguments in one error, from the signature alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, getdoc, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeloom.errors import CallError
from pipeloom.terminal.words import close_names, count, unknown_name
from pipeloom.workload.limits import limits_of

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")
_Test = Callable[[Any], bool]


def checked(what: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that first compares its arguments with its signature, types and limits included.

    Raises:
        CallError: with all problems of the arguments.
    """

    @wraps(what)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        _check(what, args, kwargs, what.__qualname__)
        return what(*args, **kwargs)

    return call


def checked_class(what: type[_Class]) -> type[_Class]:
    """A class whose values are made by a checked call.

    Raises:
        CallError: with all problems of the arguments.
    """
    make = what.__init__

    @wraps(make)
    def init(self: _Class, *args: Any, **kwargs: Any) -> None:
        _check(make, (self, *args), kwargs, what.__name__)
        make(self, *args, **kwargs)

    # An assignment to a method is an error of types.
    type.__setattr__(what, "__init__", init)
    return what


def _check(what: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    parameters, hints = _parameters(what)
    args = args[_num_own(what) :]
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    problems = list[str]()
    if not _has_right_names(what, len(args), tuple(kwargs)):
        problems += _name_problems(parameters, hints, args, kwargs)
    for key in parameters:
        if key in given and not _test(hints[key])(given[key]):
            problems += value_problems(key, hints[key], given[key], what)
    if problems:
        raise CallError(problems, f"the call of {name}()")


@cache
def _parameters(what: Callable[..., Any]) -> tuple[dict[str, Parameter], dict[str, Any]]:
    """Parameters that a call names, and their types with what is written into them."""
    parameters = list(signature(what).parameters.items())[_num_own(what) :]
    return dict(parameters), get_type_hints(what, include_extras=True)


@cache
def _has_right_names(what: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> bool:
    """Whether a call names what there is, and all that has no default; the same for calls with other values."""
    values = dict.fromkeys(names)
    return not any(_name_problems(*_parameters(what), [None] * num_args, values))


@cache
def _num_own(what: Callable[..., Any]) -> int:
    """1 for a method, whose object or class no call names; else 0."""
    return int(next(iter(signature(what).parameters), "") in {"self", "cls"})


def _name_problems(
    parameters: Mapping[str, Parameter], hints: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    by_place = [name for name, one in parameters.items() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    single = [name for name, one in parameters.items() if one.kind is not Parameter.VAR_KEYWORD]
    placed = single[: len(args)]
    if len(args) > len(by_place):
        late = list(zip(single, args, strict=False))[len(by_place) :]
        rest = ", ".join(f"{name}={value!r:.40}" for name, value in late)
        wanted = f"at most {count(len(by_place), 'argument')} without a name, found {len(args)}"
        yield f"expected {wanted}{f'; write {rest}' if rest else ''}"
    yield from (
        f"the argument '{name}' is given twice, by its place and by its name" for name in placed if name in kwargs
    )
    left = [name for name in single if name not in placed and name not in kwargs]
    missing = [name for name in left if parameters[name].default is Parameter.empty]
    for name in kwargs:
        # What a function takes by any name, it checks itself; but a misspelled argument is also missing.
        if name not in single and (len(single) == len(parameters) or close_names(name, missing)):
            yield unknown_name("argument", name, single, left or None)  # what is given already is not suggested
    yield from (f"the argument '{name}' is missing; it must be {_words(hints[name])}" for name in missing)


def value_problems(name: str, hint: Any, value: Any, what: Callable[..., Any] | None = None) -> Iterator[str]:
    """The problem of a value, by its type or by its limits.

    Args:
        name: of the value, begins the sentence.
        hint: its type.
        value: to check.
        what: takes the value; its docstring explains an argument of a class.
    """
    if not _has_type(hint)(value):
        # A number needs no explanation; a class of pipeloom has to come from somewhere.
        has_class = any(isinstance(one, type) and one not in _WORDS for one in _alternatives(hint))
        yield f"{name} must be {_words(hint)}, found {value!r:.60}{_meaning(name, what) if has_class else ''}"
    else:
        # Once each: the limits of both numbers of a pair may be the same.
        limits = dict.fromkeys(limits_of(hint))
        found = ((where, one.refusal(number)) for where, number in _numbers(name, value) for one in limits)
        yield from (f"{where} {refusal}" for where, refusal in found if refusal is not None)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers of a value with their names: itself, or those inside a container, such as ``peaks['bf16']``."""
    if isinstance(value, Mapping):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        inner = enumerate(value)
    else:
        # A setting that is not given is `None`.
        yield from () if value is None else ((name, value),)
        return
    for key, item in inner:
        yield from _numbers(f"{name}[{key!r}]", item)


def _meaning(name: str, what: Callable[..., Any] | None) -> str:
    """The line of the docstring about an argument."""
    lines = (getdoc(what) or "").split("\nArgs:\n")[-1].splitlines()
    start = f"    {name}: "
    return next((f" ({line.strip().replace('``', '')})" for line in lines if line.startswith(start)), "")


def _alternatives(hint: Any) -> list[Any]:
    """The types of a union, without what is written into them."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in {Union, UnionType}:
        return [one for inner in get_args(hint) for one in _alternatives(inner)]
    return [hint]


# Made once for each type: the planner makes costs of stages for every layout that it simulates.
@cache
def _test(hint: Any) -> _Test:
    """Whether a value has a type and is within its limits."""
    limits, test = limits_of(hint), _has_type(hint)
    if not limits:
        return test
    return lambda value: (
        test(value) and all(one.refusal(number) is None for _, number in _numbers("", value) for one in limits)
    )


@cache
def _has_type(hint: Any) -> _Test:
    tests = [_test_of(one) for one in _alternatives(hint)]
    return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)


_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
"""Numbers of other libraries, such as NumPy's, are registered with these classes."""


def _test_of(hint: Any) -> _Test:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _NUMBERS:
        number = _NUMBERS[hint]
        # For Python a bool is a number; in a call it is a mistake.
        return lambda value: type(value) is hint or (isinstance(value, number) and not isinstance(value, bool))
    if origin is Literal:
        return lambda value: isinstance(value, str | int) and value in inner
    if isinstance(origin, type):
        return _test_inside(origin, inner)
    if getattr(hint, "_is_protocol", False):
        members = [name for name in (*hint.__annotations__, *vars(hint)) if not name.startswith("_")]
        # Which members a call needs depends on its other arguments: costs of a step without swaps need no `move_s`.
        return lambda value: any(hasattr(value, name) for name in members)
    return lambda value: hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _test_inside(origin: type, inner: tuple[Any, ...]) -> _Test:
    """Whether a value is a container of values of one type."""
    if issubclass(origin, Mapping):
        test = _has_type(inner[1])
        return lambda value: isinstance(value, origin) and all(map(test, value.values()))
    if origin is tuple and inner[1:] != (...,):
        tests = [_has_type(one) for one in inner]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(item) for test, item in zip(tests, value, strict=True))
        )
    if not issubclass(origin, Sequence):
        return lambda value: isinstance(value, origin)
    test, plain = _has_type(inner[0]), frozenset(_alternatives(inner[0])) & {int, float}
    # A text is a sequence of texts, and never meant as one.
    return lambda value: (
        isinstance(value, origin)
        and not isinstance(value, str)
        and (plain.issuperset(map(type, value)) or all(map(test, value)))
    )


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    NoneType: "None",
}


def _words(hint: Any) -> str:
    """What a value must be, all alternatives."""
    return " or ".join(_word(one) for one in _alternatives(hint))


def _word(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if isinstance(origin, type):
        kind, value = origin.__name__.lower(), inner[1 if issubclass(origin, Mapping) else 0]
        return f"a {kind}" if value is Any else f"a {kind} with each value {_words(value)}"
    name = getattr(hint, "__name__", str(hint))
    return _WORDS.get(hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
