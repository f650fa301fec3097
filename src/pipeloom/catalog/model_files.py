"""Files of models: TOML of the catalog, and Hugging Face's ``config.json``.

A ``config.json`` is read only if the model here computes the same function; otherwise all differences are reported.
``model_type`` selects an architecture (``catalog.architectures``). Each key is used, must have a certain value, or has
no effect on the function. Any other key is a problem, so that no setting is silently ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeloom.catalog.architectures import ARCHITECTURES, ELSEWHERE, Architecture
from pipeloom.catalog.reading import Reader, is_positive, read_toml
from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text
from pipeloom.workload.model import MOST_LAYERS, ModelConfig, ModelShape, head_problems, model_of
from pipeloom.workload.model_families import MODELS, mlp_names

_WIDTH = 100
"""Most characters of a value in a message."""


@dataclass(frozen=True)
class ModelFile:
    """The content of a model file.

    Attributes:
        shape: the sizes.
        norm_eps, rope_theta: as in ``ModelConfig``; ``None`` if the file has none.
    """

    shape: ModelShape
    norm_eps: float | None = None
    rope_theta: float | None = None

    def over(self, model: ModelConfig) -> ModelConfig:
        """The settings of a model, overridden by those of the file."""
        return replace(
            model_of(self.shape, model),
            norm_eps=model.norm_eps if self.norm_eps is None else self.norm_eps,
            rope_theta=model.rope_theta if self.rope_theta is None else self.rope_theta,
        )


def load_model(name_or_path: str, seq_len: int | None = None) -> ModelShape:
    """The sizes of ``read_model``."""
    return read_model(name_or_path, seq_len).shape


def read_model(name_or_path: str, seq_len: int | None = None) -> ModelFile:
    """A model by name (``pipeloom/catalog/models``), from a TOML file, or from a Hugging Face ``config.json``.

    Args:
        name_or_path: its name or its file.
        seq_len: tokens of a sequence, compared with attention windows and tables of positions; ``None`` for no check.

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    if Path(name_or_path).suffix == ".json":
        return _read_config_json(Path(name_or_path), seq_len)
    table, source = read_toml("models", name_or_path)
    reader = Reader(table, source)
    mlp = reader.text("mlp", among=mlp_names())
    shape = ModelShape(
        name=reader.text("name"),
        layers=reader.integer("layers", most=MOST_LAYERS),
        hidden=reader.integer("hidden"),
        heads=reader.integer("heads"),
        kv_heads=reader.integer("kv_heads", table.get("heads")),
        ffn=reader.integer("ffn"),
        mlp=mlp,
        vocab=reader.integer("vocab"),
        tied=reader.flag("tied"),
    )
    if not reader.has_problems:
        heads = (shape.hidden, shape.heads, shape.kv_heads)
        for problem in head_problems(*heads, is_rotary=shape.family.is_rotary, names=("hidden", "heads", "kv_heads")):
            reader.complain(problem)
    norm_eps = reader.positive("norm_eps") if "norm_eps" in table else None
    rope_theta = reader.positive("rope_theta") if "rope_theta" in table and shape.family.is_rotary else None
    reader.check({"source"})
    return ModelFile(shape, norm_eps, rope_theta)


def _read_config_json(path: Path, seq_len: int | None) -> ModelFile:
    """``read_model`` of a ``config.json``."""
    text = read_text(path)
    try:
        table = parse_json(text)
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(table, dict):
        raise UserError(f"cannot read {path}: expected an object, found {type(table).__name__}")
    found, reader = table.get("model_type"), Reader(table, str(path))
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
    # Without the key, Llama has as many as heads, Mistral a fixed number, for which the reader requires the key.
    has_groups = is_rotary and (file.table.get("num_key_value_heads") is not None or known.window is not None)
    kv_heads = reader.integer("num_key_value_heads") if has_groups else heads
    if not reader.has_problems:
        _check_heads(file, hidden, heads, kv_heads)
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
        mlp=known.model_family.mlp,
        vocab=reader.integer("vocab_size"),
        tied=reader.flag("tie_word_embeddings", default=known.tied),
    )
    return ModelFile(shape, reader.positive(known.eps, known.default_eps), _rope_theta(file) if is_rotary else None)


def _check_heads(file: _ConfigJson, hidden: int, heads: int, kv_heads: int) -> None:
    names = (file.known.hidden, file.known.heads, "num_key_value_heads")
    for problem in head_problems(hidden, heads, kv_heads, is_rotary=file.known.model_family.is_rotary, names=names):
        file.reader.complain(problem)
    has_own = "head_dim" in file.known.used and file.table.get("head_dim") not in (None, hidden // heads)
    if has_own and hidden % heads == 0:
        file.must_be("head_dim", f"{hidden // heads}, {file.known.hidden} / {file.known.heads}")


def _check_windows(file: _ConfigJson, layers: int, seq_len: int | None) -> None:
    """Attention here has no window, so a window of the file must be as wide as the sequences."""
    kinds = file.table.get("layer_types")
    is_full = isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)
    if kinds is not None and not is_full:
        file.must_be("layer_types", f"null, or full_attention for each of {layers} layers")
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


def _rope_theta(file: _ConfigJson) -> float:
    """The base of rotary positions, which transformers 5 writes into ``rope_parameters``."""
    found: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = file.table.get(key)
        if value is None:
            continue
        if not isinstance(value, dict) or not _is_plain(value):
            file.must_be(key, "null or of rope_type default, as rotary positions are not scaled here")
        elif "rope_theta" in value:
            found[key] = float(value["rope_theta"])
    if "rope_theta" in file.table or not found:
        found["rope_theta"] = file.reader.positive("rope_theta", 10000.0)
    if len(set(found.values())) > 1:
        both = " and ".join(f"{value:g} in {key}" for key, value in found.items())
        file.reader.complain(f"rope_theta must be one number, found {both}")
    return next(iter(found.values()))


def _is_plain(rope: Mapping[str, Any]) -> bool:
    others = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    is_default = all(rope.get(key, "default") == "default" for key in ("rope_type", "type"))
    is_whole = rope.get("partial_rotary_factor", 1) == 1
    return is_default and is_whole and not others and is_positive(rope.get("rope_theta", 1))


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
