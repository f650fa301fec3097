"""Files of models: TOML of the catalog, and Hugging Face's ``config.json``.

A ``config.json`` is read only if the model here computes the same function; otherwise all differences are reported.
``model_type`` selects an architecture (``catalog.architectures``). Each key is used, must have a certain value, or has
no effect on the function. Any other key is a problem, so that no setting is silently ignored.
"""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeloom.catalog.architectures import ARCHITECTURES, ELSEWHERE, Architecture
from pipeloom.catalog.reading import Reader, find_name, is_positive, read_toml
from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text
from pipeloom.workload.model import MOST_LAYERS, ModelConfig, ModelShape, head_problems, model_of
from pipeloom.workload.model_families import MODELS

CONFIG_JSON = "config.json"
"""File of a Hugging Face folder that describes the model."""
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
_WIDTH = 100
"""Most characters of a value in a message."""


@dataclass(frozen=True)
class ModelFile:
    """The content of a model file.

    Attributes:
        shape: the sizes.
        norm_eps, rope_theta: as in ``ModelConfig``; ``None`` if the file has none.
        rope_scaling: settings of ``ModelConfig`` by name; empty if the format of the file has none.
        model_type: key of ``ARCHITECTURES``; ``None`` for a file of the catalog's format.
    """

    shape: ModelShape
    norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None

    def over(self, model: ModelConfig) -> ModelConfig:
        """The settings of a model, overridden by those of the file."""
        return replace(
            model_of(self.shape, model),
            norm_eps=model.norm_eps if self.norm_eps is None else self.norm_eps,
            rope_theta=model.rope_theta if self.rope_theta is None else self.rope_theta,
            **self.rope_scaling,
        )


def load_model(name_or_path: str, seq_len: int | None = None) -> ModelShape:
    """The sizes of ``read_model``."""
    return read_model(name_or_path, seq_len).shape


def read_model(name_or_path: str, seq_len: int | None = None) -> ModelFile:
    """A model by name (``pipeloom/catalog/models``), from a TOML file, or from a Hugging Face ``config.json``.

    Args:
        name_or_path: its name, its file, or a folder with a ``config.json``.
        seq_len: tokens of a sequence, compared with attention windows and tables of positions; ``None`` for no check.

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    path = Path(name_or_path)
    # A name of the catalog first: a folder of that name may be in the working directory by chance.
    if find_name("models", name_or_path) is None and _is_folder(path):
        return _read_config_json(path / CONFIG_JSON, seq_len)
    if path.suffix == ".json":
        return _read_config_json(path, seq_len)
    table, source = read_toml("models", name_or_path)
    reader = Reader(table, source)
    shape = ModelShape(
        name=reader.text("name"),
        layers=reader.integer("layers", most=MOST_LAYERS),
        hidden=reader.integer("hidden"),
        heads=reader.integer("heads"),
        kv_heads=reader.integer("kv_heads", table.get("heads")),
        ffn=reader.integer("ffn"),
        family=reader.text("family", among=tuple(MODELS)),
        vocab=reader.integer("vocab"),
        tied=reader.flag("tied"),
        own_head_size=reader.integer("head_size") if "head_size" in table else None,
    )
    if not reader.has_problems:
        sizes, names = (shape.hidden, shape.heads, shape.kv_heads), ("hidden", "heads", "kv_heads", "head_size")
        for problem in head_problems((*sizes, shape.own_head_size), is_rotary=shape.kind.is_rotary, names=names):
            reader.complain(problem)
    norm_eps = reader.positive("norm_eps") if "norm_eps" in table else None
    rope_theta = reader.positive("rope_theta") if "rope_theta" in table and shape.kind.is_rotary else None
    reader.check({"source"})
    return ModelFile(shape, norm_eps, rope_theta)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _read_config_json(path: Path, seq_len: int | None) -> ModelFile:
    """``read_model`` of a ``config.json``."""
    text = read_text(path)
    try:
        table = parse_json(text)
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(table, dict):
        raise UserError(f"cannot read {path}: expected an object, found {type(table).__name__}")
    return _parse(table, str(path), seq_len)


def _parse(table: dict[str, Any], source: str, seq_len: int | None) -> ModelFile:
    found, reader = table.get("model_type"), Reader(table, source)
    name = found if isinstance(found, str) else ""
    len(MODELS)  # imports plug-ins, which add the architectures of their families
    if name not in ARCHITECTURES:
        shown = _shown(found) if "model_type" in table else "none"
        why = f": {ELSEWHERE[name]}, which is not supported" if name in ELSEWHERE else ""
        reader.complain(f"model_type must be one of {', '.join(ARCHITECTURES)}, found {shown}{why}")
        # Raises an error: without an architecture no other key has a meaning.
        reader.check(set(table))
    file = _ConfigJson(table, reader, ARCHITECTURES[name], name)
    model = _model(file, seq_len)
    _check_fixed(file)
    _check_keys(file)
    reader.check(set(table))
    return model


def config_json(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """The keys and values of a ``config.json`` of a model, as a Hugging Face library reads them.

    Args:
        model: resolved.
        seq_len: tokens of a sequence.

    Raises:
        UserError: no supported architecture computes the same function.
    """
    for name, known in ARCHITECTURES.items():
        table = _table(model, seq_len, name, known)
        try:
            is_same = _parse(table, name, seq_len).over(model) == model
        except UserError:
            continue
        if is_same:
            return table
    raise UserError(
        f"no architecture of Hugging Face that is supported here computes this model of the family {model.family}: "
        f"{', '.join(ARCHITECTURES)}"
    )


def _table(model: ModelConfig, seq_len: int, name: str, known: Architecture) -> dict[str, Any]:
    """A model as ``config.json`` of an architecture, which may be unable to express it."""
    table: dict[str, Any] = {
        "architectures": [known.classes[0]],
        "model_type": name,
        known.layers: model.num_layers,
        known.hidden: model.hidden_size,
        known.heads: model.num_heads,
        known.ffn: model.ffn_size,
        known.eps: model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
    }
    table |= {key: fixed.values[0] for key, fixed in known.fixed.items() if fixed.default not in fixed.values}
    if not known.model_family.is_rotary:
        return {**table, "n_positions": seq_len}
    table |= {"num_key_value_heads": model.num_kv_heads, "rope_theta": model.rope_theta}
    table |= {"max_position_embeddings": seq_len}
    if known.head_size is not None or model.head_size is not None:
        table["head_dim"] = model.known_head_size
    if (scaling := model.scaling) is not None:
        keys: dict[str, Any] = {"factor": scaling.factor}
        if scaling.kind != "linear":
            keys |= {"original_max_position_embeddings": scaling.original_len}
            keys |= {key: getattr(scaling, name) for key, name in _TURNS[scaling.kind].items()}
        if scaling.kind == "yarn":
            keys["attention_factor"] = scaling.attention_factor
        table["rope_scaling"] = {"rope_type": scaling.kind, **keys}
    return table if known.window is None else {**table, "sliding_window": None}


@dataclass(frozen=True)
class _ConfigJson:
    """A ``config.json`` while it is read.

    Attributes:
        table: its keys and values.
        reader: reads values and collects problems.
        known: its architecture.
        name: its ``model_type``.
    """

    table: dict[str, Any]
    reader: Reader
    known: Architecture
    name: str

    def must_be(self, key: str, wanted: str, default: Any = None) -> None:
        """Add a problem: the required and the actual value of a key, or its default if it is missing."""
        found = _shown(self.table[key]) if key in self.table else f"none, which means {_shown(default)}"
        self.reader.complain(f"{key} must be {wanted}, found {found}")


def _model(file: _ConfigJson, seq_len: int | None) -> ModelFile:
    known, reader = file.known, file.reader
    is_rotary = known.model_family.is_rotary
    layers = reader.integer(known.layers, most=MOST_LAYERS)
    hidden, heads = reader.integer(known.hidden), reader.integer(known.heads)
    # GPT-2 files may omit n_inner, for 4 x n_embd.
    has_ffn = is_rotary or file.table.get(known.ffn) is not None
    ffn = reader.integer(known.ffn) if has_ffn else 4 * hidden
    # Without the key, some have as many as heads, others a fixed number, for which the reader requires the key.
    has_groups = is_rotary and (file.table.get("num_key_value_heads") is not None or not known.groups_follow)
    kv_heads = reader.integer("num_key_value_heads") if has_groups else heads
    has_size = is_rotary and (file.table.get("head_dim") is not None or known.head_size is not None)
    own_size = reader.integer("head_dim", known.head_size) if has_size else None
    if not reader.has_problems:
        names = (known.hidden, known.heads, "num_key_value_heads", "head_dim" if is_rotary else "")
        for problem in head_problems((hidden, heads, kv_heads, own_size), is_rotary=is_rotary, names=names):
            reader.complain(problem)
        if is_rotary:
            _check_windows(file, layers, seq_len)
    # Learned positions: a shorter table lacks rows, and a longer one has rows that are never trained.
    rows = seq_len if is_rotary else reader.integer("n_positions", 1024)
    if seq_len is not None and rows != seq_len:
        wanted = f"{seq_len}, the tokens of a sequence, as the table of positions has a row for each here"
        file.must_be("n_positions", wanted, 1024)
    shape = ModelShape(
        name=file.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        family=known.family,
        vocab=reader.integer("vocab_size"),
        tied=reader.flag("tie_word_embeddings", default=known.tied),
        own_head_size=own_size,
    )
    eps = reader.positive(known.eps, known.default_eps)
    if not is_rotary:
        return ModelFile(shape, eps, model_type=file.name)
    rope = _rope(file)
    return ModelFile(shape, eps, _rope_theta(file, rope), _rope_scaling(file, rope), file.name)


def _check_windows(file: _ConfigJson, layers: int, seq_len: int | None) -> None:
    """Attention here has no window, so a window of the file must be as wide as the sequences."""
    kinds = file.table.get("layer_types")
    is_full = isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)
    if kinds is not None and not is_full:
        file.must_be("layer_types", f"null, or full_attention for each of {layers} layers")
    if "sliding_window" not in file.known.used:
        return
    window = file.table.get("sliding_window", file.known.window)
    if window is None:
        return
    if file.known.window is None:
        file.must_be("sliding_window", f"null, as {file.name} has no windows")
    elif isinstance(window, bool) or not isinstance(window, int) or window < 1:
        file.must_be("sliding_window", "null or a whole number of at least 1")
    elif seq_len is not None and window < seq_len:
        wanted = f"null or at least {seq_len}, the tokens of a sequence, as attention has no window here"
        file.must_be("sliding_window", wanted, file.known.window)


def _rope(file: _ConfigJson) -> dict[str, Any]:
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


def _rope_theta(file: _ConfigJson, rope: Mapping[str, Any]) -> float:
    """The base of rotary positions, which transformers 5 writes into ``rope_parameters``."""
    found: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = file.table.get(key)
        if rope and isinstance(value, dict) and value.get("rope_theta") is not None:
            found[key] = _number(file, key, value, "rope_theta")
            if math.isnan(found[key]):
                return found[key]
    if "rope_theta" in file.table or not found:
        found["rope_theta"] = file.reader.positive("rope_theta", 10000.0)
    if len(set(found.values())) > 1:
        both = " and ".join(f"{value:g} in {key}" for key, value in found.items())
        file.reader.complain(f"rope_theta must be one number, found {both}")
    return next(iter(found.values()))


def _rope_scaling(file: _ConfigJson, rope: Mapping[str, Any]) -> dict[str, Any]:
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


def _number(file: _ConfigJson, key: str, table: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number of a table inside the file."""
    value = table.get(name, default)
    if is_positive(value):
        return float(value)
    file.must_be(key, f"a table whose {name} is a number above 0")
    return math.nan


def _check_fixed(file: _ConfigJson) -> None:
    for key, fixed in file.known.fixed.items():
        value = file.table.get(key, fixed.default)
        # In Python 0 == False, but transformers writes booleans as true and false.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in fixed.values):
            file.must_be(key, f"{_shown(fixed.values[0])}, {fixed.why}", fixed.default)
    classes, found = file.known.classes, file.table.get("architectures")
    if found is not None and (not isinstance(found, list) or not found or any(one not in classes for one in found)):
        file.must_be("architectures", f"{_shown(list(classes))}, as models here end with a head over the vocabulary")


def _check_keys(file: _ConfigJson) -> None:
    for key, value in file.table.items():
        if key not in file.known.keys:
            shown = key if key.isprintable() else _shown(key)
            file.reader.complain(
                f"{shown} is not a supported key of {file.name}, found {_shown(value)}; remove it if the model is the "
                "same without it"
            )


def _shown(value: Any) -> str:
    """A value as JSON, shortened; in ASCII, so without control characters."""
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
