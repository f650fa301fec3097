"""How stored tensors differ from those that a run expects."""

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shapes of tensors by name; ``None`` for what is no tensor."""
_MOST_NAMED = 5
"""Maximum number of keys that a message lists for one kind of difference; another model has thousands."""


def differences(expected: Shapes, stored: Shapes) -> list[str]:
    """Describe how stored tensors differ from the expected ones; empty if they agree.

    Args:
        expected: by name.
        stored: by name.
    """
    shapes = [
        f"{key} {_as_shape(stored[key])} instead of {_as_shape(shape)}"
        for key, shape in expected.items()
        if key in stored and stored[key] != shape
    ]
    sorts = {
        "it lacks": sorted(expected.keys() - stored.keys()),
        "nothing here has the name of": sorted(stored.keys() - expected.keys()),
        "it has another shape for": shapes,
    }
    return [f"{sort} {listed(names)}" for sort, names in sorts.items() if names]


def _as_shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def listed(names: list[str]) -> str:
    """Names in a message; of many the first ones."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
