"""Sliding windows in a ``config.json``, read and written.

The rules of transformers for layers with a window (``Architecture.windowed``):

    none     no layer has one
    all      every layer, if there is a ``sliding_window``
    upper    with ``use_sliding_window``, layers from ``max_window_layers`` on, or those of ``layer_types``
    pattern  all but each ``sliding_window_pattern``-th, or those of ``layer_types``
"""

from typing import Any

from pipeloom.catalog.config_json import ConfigJson
from pipeloom.workload.model import ModelConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WIDTH_OF = "a whole number of at least 1"


def windows(file: ConfigJson, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window of layers that have one, and the layers that have none.

    Args:
        file: read so far without problems.
        layers: of the model.
    """
    rule, kinds = file.known.windowed, file.table.get("layer_types")
    if rule in ("none", "all") or (rule == "upper" and not _uses_windows(file)):
        return _of_equal_layers(file, layers)
    if kinds is None:
        full = _upper(file, layers) if rule == "upper" else _pattern(file, layers)
    elif isinstance(kinds, list) and len(kinds) == layers and all(kind in (_FULL, _SLIDING) for kind in kinds):
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    else:
        file.must_be("layer_types", f"null, or {_FULL} or {_SLIDING} for each of {layers} layers")
        return None, ()
    if len(full) == layers:
        return None, ()
    window = file.table.get("sliding_window", file.known.window)
    if not _is_count(window):
        file.must_be("sliding_window", f"{_WIDTH_OF}, as some layers have a window", file.known.window)
        return None, ()
    return window, full


def window_keys(model: ModelConfig, rule: str) -> dict[str, Any]:
    """The keys of a model's windows, for an architecture with a rule."""
    if rule == "none":
        return {}
    table: dict[str, Any] = {"sliding_window": model.window}
    if rule == "all" or (rule == "upper" and model.window is None):
        return table if rule == "all" else {}
    kinds = [_FULL if model.window_of(layer) is None else _SLIDING for layer in range(model.num_layers)]
    return {**table, **({"use_sliding_window": True} if rule == "upper" else {}), "layer_types": kinds}


def _of_equal_layers(file: ConfigJson, layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = file.table.get("sliding_window", file.known.window) if file.known.windowed == "all" else None
    if window is not None and not _is_count(window):
        file.must_be("sliding_window", f"null or {_WIDTH_OF}", file.known.window)
        return None, ()
    if "sliding_window" in file.known.used and file.known.windowed == "none" and file.table.get("sliding_window"):
        file.must_be("sliding_window", f"null, as {file.name} has no windows")
    kind, kinds = _FULL if window is None else _SLIDING, file.table.get("layer_types")
    is_alike = isinstance(kinds, list) and len(kinds) == layers and all(one == kind for one in kinds)
    if kinds is not None and not is_alike:
        file.must_be("layer_types", f"null, or {kind} for each of {layers} layers")
    return window, ()


def _uses_windows(file: ConfigJson) -> bool:
    uses = file.table.get("use_sliding_window", False)
    if not isinstance(uses, bool) and uses is not None:
        file.must_be("use_sliding_window", "true or false", default=False)
    return uses is True and file.table.get("sliding_window", file.known.window) is not None


def _upper(file: ConfigJson, layers: int) -> tuple[int, ...]:
    first = file.table.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        file.must_be("max_window_layers", "a whole number of at least 0", 28)
        return ()
    return tuple(range(min(first, layers)))


def _pattern(file: ConfigJson, layers: int) -> tuple[int, ...]:
    every = file.known.model_family.full_every
    if "sliding_window_pattern" in file.known.used:
        every = file.table.get("sliding_window_pattern", every)
    if not _is_count(every):
        file.must_be("sliding_window_pattern", _WIDTH_OF, file.known.model_family.full_every)
        return ()
    return tuple(range(every - 1, layers, every))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
