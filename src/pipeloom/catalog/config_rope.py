"""Rotary positions in a ``config.json``, read and written.

Transformers 4 has the keys ``rope_theta`` and ``rope_scaling``, 5 the key ``rope_parameters``. Architectures whose
layers with a window have positions of their own add ``rope_local_base_freq``, or a table for each kind of layer.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pipeloom.catalog.config_json import ConfigJson
from pipeloom.catalog.reading import is_positive
from pipeloom.workload.model import ModelConfig

_TURNS: Mapping[str, Mapping[str, str]] = {
    "llama3": {"low_freq_factor": "slow_turns", "high_freq_factor": "fast_turns"},
    "yarn": {"beta_slow": "slow_turns", "beta_fast": "fast_turns"},
}
"""Keys of rotary positions -> attributes of ``RopeScaling``."""
_YARN_TURNS = {"beta_slow": 1.0, "beta_fast": 32.0}
_ROPE_KEYS: Mapping[str, Set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", *_TURNS["llama3"]},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", *_TURNS["yarn"]},
}
"""Supported ``rope_type`` -> the keys that it has."""
_SCALING = (
    *("rope_scaling", "rope_factor", "rope_original_len", "rope_slow_turns", "rope_fast_turns"),
    "rope_attention_factor",
)


def rope_settings(file: ConfigJson) -> dict[str, Any]:
    """Settings of ``ModelConfig`` about rotary positions, all of them."""
    if file.known.model_family.rope_local_theta is None:
        rope = _rope(file)
        return {"rope_theta": _rope_theta(file, rope), **_rope_scaling(file, rope)}
    file, local = _of_full_layers(file)
    rope = _rope(file)
    return {"rope_theta": _rope_theta(file, rope), **_rope_scaling(file, rope), "rope_local_theta": local}


def rope_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a model's rotary positions, those of transformers 4, which 5 reads, too."""
    table: dict[str, Any] = {"rope_theta": model.rope_theta}
    if (local := model.known_rope_local_theta) is not None:
        table["rope_local_base_freq"] = local
    if (scaling := model.scaling) is not None:
        keys: dict[str, Any] = {"factor": scaling.factor}
        if scaling.kind != "linear":
            keys |= {"original_max_position_embeddings": scaling.original_len}
            keys |= {key: getattr(scaling, name) for key, name in _TURNS[scaling.kind].items()}
        if scaling.kind == "yarn":
            keys["attention_factor"] = scaling.attention_factor
        table["rope_scaling"] = {"rope_type": scaling.kind, **keys}
    return table


def _of_full_layers(file: ConfigJson) -> tuple[ConfigJson, float]:
    """The file as one of equal layers without windows, and the base of layers with a window."""
    key, tables = "rope_parameters", file.table.get("rope_parameters")
    base = file.reader.positive("rope_local_base_freq", file.known.model_family.rope_local_theta)
    if tables is None:
        return file, base
    kinds = {"full_attention", "sliding_attention"}
    if (
        not isinstance(tables, dict)
        or set(tables) != kinds
        or not all(isinstance(one, dict) for one in tables.values())
    ):
        file.must_be(key, "null or a table with a table full_attention and a table sliding_attention")
        return replace(file, table={name: one for name, one in file.table.items() if name != key}), base
    local = {name: one for name, one in tables["sliding_attention"].items() if one is not None}
    own = _number(file, key, local, "rope_theta", base)
    if set(local) - {"rope_type", "rope_theta"} or local.get("rope_type", "default") != "default":
        file.must_be(key, "a table whose sliding_attention has plain positions, of rope_type default")
    elif "rope_local_base_freq" in file.table and own != base:
        file.must_be(key, f"a table whose sliding_attention has the rope_theta {base:g} of rope_local_base_freq")
    return replace(file, table={**file.table, key: tables["full_attention"]}), own


def _rope(file: ConfigJson) -> dict[str, Any]:
    """The table of rotary positions, which transformers 4 calls ``rope_scaling`` and 5 ``rope_parameters``."""
    found = {key: file.table[key] for key in ("rope_scaling", "rope_parameters") if file.table.get(key) is not None}
    for key, value in found.items():
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            file.must_be(key, f"null or of rope_type {', '.join(_ROPE_KEYS)}, with the same settings in all layers")
            return {}
        table = {name: one for name, one in value.items() if one is not None and name != "type"}
        found[key] = {**table, "rope_type": kind}
        others = ", ".join(sorted(set(table) - _ROPE_KEYS[kind] - {"rope_type", "rope_theta", "partial_rotary_factor"}))
        if others or table.get("partial_rotary_factor", 1) != 1:
            wanted = "whole heads turned" if not others else f"no {others}, which rope_type {kind} does not have here"
            file.must_be(key, f"a table with {wanted}")
            return {}
    tables = list(found.values())
    if (
        len(tables) == 2
        and tables[0] != tables[1]
        and "default" not in (tables[0]["rope_type"], tables[1]["rope_type"])
    ):
        file.reader.complain("rope_scaling and rope_parameters must be equal where a file has both")
    # A scaled table describes the model, also beside a plain one that has the base only.
    return max(tables, key=lambda table: table["rope_type"] != "default", default={})


def _rope_theta(file: ConfigJson, rope: Mapping[str, Any]) -> float:
    """The base of rotary positions, which transformers 5 writes into ``rope_parameters``."""
    found: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = file.table.get(key)
        if rope and isinstance(value, dict) and value.get("rope_theta") is not None:
            found[key] = _number(file, key, value, "rope_theta")
            if math.isnan(found[key]):
                return found[key]
    if "rope_theta" in file.table or not found:
        found["rope_theta"] = file.reader.positive("rope_theta", file.known.model_family.rope_theta)
    if len(set(found.values())) > 1:
        both = " and ".join(f"{value:g} in {key}" for key, value in found.items())
        file.reader.complain(f"rope_theta must be one number, found {both}")
    return next(iter(found.values()))


def _rope_scaling(file: ConfigJson, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``ModelConfig``, all of them."""
    kind = rope.get("rope_type", "default")
    found: dict[str, Any] = dict.fromkeys(_SCALING)
    if kind == "default":
        return found
    key = "rope_scaling" if file.table.get("rope_scaling") is not None else "rope_parameters"
    found |= {"rope_scaling": kind, "rope_factor": _number(file, key, rope, "factor")}
    if kind == "linear":
        return found
    whole = "original_max_position_embeddings"
    length = rope.get(whole, file.table.get("max_position_embeddings"))
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        file.must_be(key, f"a table whose {whole} (else max_position_embeddings) is a whole number of at least 1")
        return found
    # llama3 has no defaults, YaRN those of its paper.
    turns = {
        f"rope_{name}": _number(file, key, rope, theirs, _YARN_TURNS.get(theirs))
        for theirs, name in _TURNS[kind].items()
    }
    if turns["rope_slow_turns"] >= turns["rope_fast_turns"]:
        slow, fast = (theirs for theirs in _TURNS[kind])
        file.must_be(key, f"a table whose {slow} is below its {fast}")
    if kind == "yarn" and "attention_factor" in rope:
        turns["rope_attention_factor"] = _number(file, key, rope, "attention_factor")
    return found | {"rope_original_len": length} | turns


def _number(file: ConfigJson, key: str, table: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number of a table inside the file."""
    value = table.get(name, default)
    if is_positive(value):
        return float(value)
    file.must_be(key, f"a table whose {name} is a number above 0")
    return math.nan
