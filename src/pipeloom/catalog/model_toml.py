"""Models in the catalog's format: TOML with the sizes, and with what attention and positions do if it is no default."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeloom.catalog.bases import read_based
from pipeloom.catalog.block_keys import read_blocks
from pipeloom.catalog.expert_keys import read_experts
from pipeloom.catalog.reading import Reader
from pipeloom.catalog.training_recipes import TrainingRecipe, read_recipe
from pipeloom.workload.model import MOST_LAYERS, ModelShape, head_problems
from pipeloom.workload.model_families import MODELS, ModelFamily

_TURNS = ("rope_slow_turns", "rope_fast_turns")
_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": _TURNS,
    "yarn": (*_TURNS, "rope_attention_factor"),
}
"""Kind of ``rope_scaling`` -> optional keys of it."""
_ROPE_KEYS = ("rope_scaling", "rope_factor", "rope_original_len", *_SCALINGS["yarn"])
"""Keys of scaled positions."""


class TomlModel(NamedTuple):
    """The content of a file; names are those of ``ModelFile``."""

    shape: ModelShape
    norm_eps: float | None
    rope_theta: float | None
    settings: dict[str, Any]
    recipe: TrainingRecipe | None


def read_toml_model(name_or_path: str) -> TomlModel:
    """A model by name (``pipeloom/catalog/models``), or from a TOML file.

    A key is read only where it changes the function, such as ``full_attention_layers`` with a window; any other one is
    a problem.

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    table, source = read_based("models", name_or_path)
    reader = Reader(table, source)
    family = reader.text("family", among=MODELS)
    kind, layers = MODELS[family], reader.integer("layers", most=MOST_LAYERS)
    window, full_layers = _windows(reader, table, kind, layers)
    ffn = reader.integer("ffn")
    experts = read_experts(reader, ffn)
    shape = ModelShape(
        name=reader.text("name"),
        layers=layers,
        hidden=reader.integer("hidden"),
        heads=reader.integer("heads"),
        kv_heads=reader.integer("kv_heads", table.get("heads")),
        ffn=ffn if experts is None else experts.block_width(ffn),
        family=family,
        vocab=reader.integer("vocab"),
        tied=reader.flag("tied"),
        own_head_size=reader.integer("head_size") if "head_size" in table else None,
        window=window,
        full_layers=full_layers,
        attn_softcap=reader.number("attn_softcap", kind.attn_softcap),
        logit_softcap=reader.number("logit_softcap", kind.logit_softcap),
        experts=experts,
        blocks=read_blocks(reader),
    )
    if not reader.has_problems:
        sizes, names = (shape.hidden, shape.heads, shape.kv_heads), ("hidden", "heads", "kv_heads", "head_size")
        for problem in head_problems((*sizes, shape.own_head_size), is_rotary=kind.is_rotary, names=names):
            reader.complain(problem)
        for problem in shape.block_problems:
            reader.complain(problem)
        if shape.blocks is not None and experts is not None:
            reader.complain("density and experts do not work together; leave one of them out")
    scalar = "query_pre_attn_scalar"
    settings = {scalar: reader.positive(scalar)} if scalar in table else {}
    settings |= _positions(reader, table, kind)
    norm_eps = reader.positive("norm_eps") if "norm_eps" in table else None
    reader.needs("a family with rotary positions", "rope_theta")
    rope_theta = reader.positive("rope_theta") if "rope_theta" in table and kind.is_rotary else None
    recipe = read_recipe(reader.table("recipe")) if "recipe" in table else None
    reader.check({"source"})
    return TomlModel(shape, norm_eps, rope_theta, settings, recipe)


def _windows(
    reader: Reader, table: Mapping[str, Any], kind: ModelFamily, layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have none."""
    if "window" not in table:
        reader.needs("window", "full_attention_layers")
        return None, ()
    window = reader.integer("window")
    if "full_attention_layers" not in table:
        return window, kind.full_layers(layers)
    full = reader.indices("full_attention_layers", layers)
    if len(full) == layers:
        reader.complain("window has no effect where full_attention_layers names every layer; leave both out")
    return window, full


def _positions(reader: Reader, table: Mapping[str, Any], kind: ModelFamily) -> dict[str, Any]:
    """The settings of rotary positions other than their base."""
    if not kind.is_rotary:
        reader.needs("a family with rotary positions", *_ROPE_KEYS, "rope_local_theta")
        return {}
    settings: dict[str, Any] = {}
    reader.needs("window" if kind.rope_local_theta is not None else "family gemma3", "rope_local_theta")
    if kind.rope_local_theta is not None and "window" in table and "rope_local_theta" in table:
        settings["rope_local_theta"] = reader.positive("rope_local_theta")
    if "rope_scaling" not in table:
        reader.needs("rope_scaling", *_ROPE_KEYS)
        return settings
    scaling = reader.text("rope_scaling", among=_SCALINGS)
    reader.needs("rope_scaling llama3 or yarn", "rope_original_len", *_TURNS)
    reader.needs("rope_scaling yarn", "rope_attention_factor")
    settings |= {"rope_scaling": scaling, "rope_factor": reader.number("rope_factor", least=1.0)}
    if scaling != "linear":
        settings["rope_original_len"] = reader.integer("rope_original_len")
    settings |= {name: reader.positive(name) for name in _SCALINGS[scaling] if name in table}
    slow, fast = (settings.get(name) for name in _TURNS)
    if slow is not None and fast is not None and slow >= fast:
        reader.complain(f"rope_slow_turns must be below rope_fast_turns, found {slow:g} and {fast:g}")
    return settings
