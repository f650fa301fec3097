"""Files of models: TOML of the catalog, and Hugging Face's ``config.json``.

A ``config.json`` is read only if the model here computes the same function; otherwise all differences are reported.
``model_type`` selects an architecture (``catalog.architectures``). Each key is used, must have a certain value, or has
no effect on the function. Any other key is a problem, so that no setting is silently ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeloom.catalog.adapted import adapted_config, adapted_problems, adapted_text, hint, is_adapted, is_same_model
from pipeloom.catalog.architectures import ARCHITECTURES, ELSEWHERE, Architecture
from pipeloom.catalog.config_json import ConfigJson, as_json
from pipeloom.catalog.config_rope import rope_keys, rope_settings
from pipeloom.catalog.config_windows import window_keys, windows
from pipeloom.catalog.model_toml import read_toml_model
from pipeloom.catalog.reading import Reader, find_name
from pipeloom.catalog.training_recipes import TrainingRecipe
from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text
from pipeloom.workload.model import MOST_LAYERS, ModelConfig, ModelShape, head_problems, model_of
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.model_shape import Experts

CONFIG_JSON = "config.json"
"""File of a Hugging Face folder that describes the model."""
POSITIONS = "max_position_embeddings"
"""Key of the tokens of a sequence; of no effect on the function, but where scaled positions follow it."""


@dataclass(frozen=True)
class ModelFile:
    """The content of a model file.

    Attributes:
        shape: the sizes.
        norm_eps, rope_theta: as in ``ModelConfig``; ``None`` if the file has none.
        settings: further settings of ``ModelConfig`` by name.
        model_type: key of ``ARCHITECTURES``; ``None`` for a file of the catalog's format.
        adapted: the settings of a model that classes of transformers compute, in place of all others.
        most_tokens: of a sequence, from the file; ``None`` if it has none.
        recipe: how the model was trained; ``None`` if the file does not contain it.
    """

    shape: ModelShape
    norm_eps: float | None = None
    rope_theta: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    adapted: ModelConfig | None = None
    most_tokens: int | None = None
    recipe: TrainingRecipe | None = None

    def over(self, model: ModelConfig) -> ModelConfig:
        """The settings of a model, overridden by those of the file."""
        own, theirs = self.adapted, model.adapted
        if own is not None and own.adapted is not None:
            text = theirs if theirs is not None and is_same_model(own.adapted, theirs) else own.adapted
            return replace(own, preset=model.preset, file=model.file, adapted=text)
        return replace(
            model_of(self.shape, model),
            norm_eps=model.norm_eps if self.norm_eps is None else self.norm_eps,
            rope_theta=model.rope_theta if self.rope_theta is None else self.rope_theta,
            **self.settings,
        ).canonical


def load_model(name_or_path: str, seq_len: int | None = None) -> ModelShape:
    """The sizes of ``read_model``."""
    return read_model(name_or_path, seq_len).shape


def read_model(name_or_path: str, seq_len: int | None = None, *, adapts: bool = False) -> ModelFile:
    """A model by name (``pipeloom/catalog/models``), from a TOML file, or from a Hugging Face ``config.json``.

    Args:
        name_or_path: its name, its file, or a folder with a ``config.json``.
        seq_len: tokens of a sequence, compared with tables of positions; ``None`` for no check.
        adapts: whether it may be a model of transformers without a family here.

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    path = Path(name_or_path)
    # A name of the catalog first: a folder of that name may be in the working directory by chance.
    if find_name("models", name_or_path) is None and _is_folder(path):
        return _read_config_json(path / CONFIG_JSON, seq_len, adapts=adapts)
    if path.suffix == ".json":
        return _read_config_json(path, seq_len, adapts=adapts)
    return ModelFile(**read_toml_model(name_or_path)._asdict())


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _read_config_json(path: Path, seq_len: int | None, *, adapts: bool) -> ModelFile:
    """``read_model`` of a ``config.json``."""
    text = read_text(path)
    try:
        table = parse_json(text)
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(table, dict):
        raise UserError(f"cannot read {path}: expected an object, found {type(table).__name__}")
    name = table.get("model_type")
    if adapts and not _has_architecture(name) and is_adapted(name):
        return _adapted(table, str(path), seq_len)
    return _parse(table, str(path), seq_len)


def _has_architecture(name: Any) -> bool:
    """Whether there is an architecture of a ``model_type``; plug-ins add those of their families of models."""
    if not isinstance(name, str):
        return False
    if not ARCHITECTURES.is_taken(name):
        len(MODELS)  # imports them
    return ARCHITECTURES.is_taken(name)


def _adapted(table: dict[str, Any], source: str, seq_len: int | None) -> ModelFile:
    """A model that classes of transformers compute."""
    reader = Reader(table, source)
    for problem in adapted_problems(table, seq_len):
        reader.complain(problem)
    reader.check(set(table))
    text = adapted_text(table)
    sizes = adapted_config(text).get_text_config()
    tied = bool(getattr(adapted_config(text), "tie_word_embeddings", False))
    model = ModelConfig(
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        tied=tied,
        adapted=text,
    )
    name = table["model_type"]
    shape = ModelShape(
        name=name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=1,
        kv_heads=1,
        ffn=1,
        family=model.family,
        vocab=sizes.vocab_size,
        tied=tied,
    )
    return ModelFile(shape, model_type=name, adapted=model, most_tokens=_most_tokens(getattr(sizes, POSITIONS, None)))


def _parse(table: dict[str, Any], source: str, seq_len: int | None) -> ModelFile:
    found, reader = table.get("model_type"), Reader(table, source)
    name = found if isinstance(found, str) else ""
    if not _has_architecture(name):
        shown = as_json(found) if "model_type" in table else "none"
        why = f": {ELSEWHERE[name]}, which is not supported" if name in ELSEWHERE else ""
        reader.complain(f"model_type must be one of {', '.join(ARCHITECTURES)}, found {shown}{why}{hint(found)}")
        # Raises an error: without an architecture no other key has a meaning.
        reader.check(set(table))
    file = ConfigJson(table, reader, ARCHITECTURES[name], name)
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
    if model.adapted is not None:
        found = parse_json(model.adapted)
        assert isinstance(found, dict)
        return found
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


def with_positions(table: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """A ``config.json`` whose ``max_position_embeddings`` are at least the tokens of a sequence.

    As it is where the scaling of rotary positions follows from the number: where the original length is not given, and
    with YaRN, whose factor transformers 4 computes from it.
    """
    found = table.get(POSITIONS)
    if table.get("model_type") not in ARCHITECTURES or not isinstance(found, int) or found >= seq_len:
        return table
    wider = {**table, POSITIONS: seq_len}
    own, other = (_parse(one, CONFIG_JSON, seq_len).over(ModelConfig()) for one in (table, wider))
    return table if own != other or own.rope_scaling == "yarn" else wider


def _table(model: ModelConfig, seq_len: int, name: str, known: Architecture) -> dict[str, Any]:
    """A model as ``config.json`` of an architecture, which may be unable to express it."""
    table: dict[str, Any] = {
        "architectures": [known.classes[0]],
        "model_type": name,
        known.layers: model.num_layers,
        known.hidden: model.hidden_size,
        known.heads: model.num_heads,
        known.ffn: model.ffn_size,
        **_expert_keys(model, known),
        known.eps: model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
    }
    table |= {key: fixed.values[0] for key, fixed in known.fixed.items() if fixed.default not in fixed.values}
    if not known.model_family.is_rotary:
        return {**table, "n_positions": seq_len}
    table |= {"num_key_value_heads": model.num_kv_heads, POSITIONS: seq_len}
    if known.head_size is not None or model.head_size is not None:
        table["head_dim"] = model.known_head_size
    return table | rope_keys(model) | window_keys(model, known.windowed) | _score_keys(model, known)


def _expert_keys(model: ModelConfig, known: Architecture) -> dict[str, Any]:
    """The keys of a model's experts that an architecture has."""
    experts, keys = model.expert_layout, known.experts
    if experts is None or keys is None:
        return {}
    table: dict[str, Any] = {keys.counts[0][0]: experts.count, "num_experts_per_tok": experts.per_token}
    if keys.ffn is not None:
        table[keys.ffn[0]] = experts.ffn
    if keys.every is not None:
        table[keys.every] = experts.every
    return table


def _experts(file: ConfigJson, ffn: int) -> Experts | None:
    """The experts of a file's model, whose feed-forward blocks are otherwise this wide."""
    keys, reader = file.known.experts, file.reader
    if keys is None:
        return None
    names, default = keys.counts
    given = [name for name in names if file.table.get(name) is not None]
    count = reader.integer(given[0] if given else names[0], default)
    if len({file.table[name] for name in given if isinstance(file.table[name], int)}) > 1:
        reader.complain(f"{' and '.join(given)} must be equal where a file has both")
    per_token = reader.integer("num_experts_per_tok", keys.per_token)
    if not reader.has_problems and per_token > count:
        reader.complain(f"num_experts_per_tok must be at most {given[0] if given else names[0]}, found {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        ffn=ffn if keys.ffn is None else reader.integer(*keys.ffn),
        every=1 if keys.every is None else reader.integer(keys.every, 1),
    )


def _score_keys(model: ModelConfig, known: Architecture) -> dict[str, Any]:
    """The keys of a model's scores and soft caps that an architecture has."""
    table: dict[str, Any] = {}
    if known.query_scalar is not None:
        scalar = model.query_pre_attn_scalar or float(model.known_head_size)
        table["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar
    if known.attn_softcap is not None:
        table["attn_logit_softcapping"] = model.known_attn_softcap or None
    if known.logit_softcap is not None:
        table["final_logit_softcapping"] = model.known_logit_softcap or None
    return table


def _model(file: ConfigJson, seq_len: int | None) -> ModelFile:
    known, reader = file.known, file.reader
    is_rotary = known.model_family.is_rotary
    layers = reader.integer(known.layers, most=MOST_LAYERS)
    hidden, heads = reader.integer(known.hidden), reader.integer(known.heads)
    # GPT-2 files may omit n_inner, for 4 x n_embd.
    has_ffn = is_rotary or file.table.get(known.ffn) is not None
    ffn = reader.integer(known.ffn) if has_ffn else 4 * hidden
    experts = _experts(file, ffn)
    # Without the key, some have as many as heads, others a fixed number, for which the reader requires the key.
    has_groups = is_rotary and (file.table.get("num_key_value_heads") is not None or not known.groups_follow)
    kv_heads = reader.integer("num_key_value_heads") if has_groups else heads
    has_size = is_rotary and (file.table.get("head_dim") is not None or known.head_size is not None)
    own_size = reader.integer("head_dim", known.head_size) if has_size else None
    if not reader.has_problems:
        names = (known.hidden, known.heads, "num_key_value_heads", "head_dim" if is_rotary else "")
        for problem in head_problems((hidden, heads, kv_heads, own_size), is_rotary=is_rotary, names=names):
            reader.complain(problem)
    window, full_layers = windows(file, layers) if is_rotary and not reader.has_problems else (None, ())
    scalar, attn_softcap, logit_softcap = _scores(file)
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
        ffn=ffn if experts is None else experts.block_width(ffn),
        family=known.family,
        vocab=reader.integer("vocab_size"),
        tied=reader.flag("tie_word_embeddings", default=known.tied),
        own_head_size=own_size,
        window=window,
        full_layers=full_layers,
        attn_softcap=attn_softcap,
        logit_softcap=logit_softcap,
        experts=experts,
    )
    eps = reader.positive(known.eps, known.default_eps)
    if not is_rotary:
        return ModelFile(shape, eps, model_type=file.name, most_tokens=rows)
    settings = rope_settings(file)
    theta, own = settings.pop("rope_theta"), settings | {"query_pre_attn_scalar": scalar}
    return ModelFile(shape, eps, theta, own, file.name, most_tokens=_most_tokens(file.table.get(POSITIONS)))


def _most_tokens(positions: object) -> int | None:
    """The tokens of a sequence by ``POSITIONS``, which has no effect on the function and so may have any type."""
    return positions if isinstance(positions, int) and positions > 0 else None


def _scores(file: ConfigJson) -> tuple[float | None, float, float]:
    """What scores are divided by the root of, if an architecture sets it, and the soft caps; 0 for none."""
    known, reader = file.known, file.reader
    scalar = None if known.query_scalar is None else float(reader.integer("query_pre_attn_scalar", known.query_scalar))
    caps: list[float] = []
    for key, default in (
        ("attn_logit_softcapping", known.attn_softcap),
        ("final_logit_softcapping", known.logit_softcap),
    ):
        is_set = default is not None and file.table.get(key, default or None) is not None
        caps.append(reader.positive(key, default) if is_set else 0.0)
    return scalar, caps[0], caps[1]


def _check_fixed(file: ConfigJson) -> None:
    for key, fixed in file.known.fixed.items():
        value = file.table.get(key, fixed.default)
        # In Python 0 == False, but transformers writes booleans as true and false.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in fixed.values):
            file.must_be(key, f"{as_json(fixed.values[0])}, {fixed.why}", fixed.default)
    classes, found = file.known.classes, file.table.get("architectures")
    if found is not None and (not isinstance(found, list) or not found or any(one not in classes for one in found)):
        file.must_be("architectures", f"{as_json(list(classes))}, as models here end with a head over the vocabulary")


def _check_keys(file: ConfigJson) -> None:
    for key, value in file.table.items():
        if key not in file.known.keys:
            shown = key if key.isprintable() else as_json(key)
            file.reader.complain(
                f"{shown} is not a supported key of {file.name}, found {as_json(value)}; remove it if the model is the "
                "same without it"
            )
