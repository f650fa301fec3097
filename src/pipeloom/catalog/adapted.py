"""Folders of Hugging Face whose ``model_type`` has no family here: transformers' own classes compute them.

The ``config.json`` is kept as text; its sizes are those that transformers reads. No file of a folder is executed.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

_EXTRA = "pip install 'pipeloom[hf]'"
_LAYERS = 4
"""Layers of a small model."""
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    "head_dim": 8,
    "rotary_dim": 4,
    "vocab_size": 99,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
"""Keys of ``config.json`` -> their values in a small model."""
_OF_NO_EFFECT = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Keys that programs change when they save a model again, and that leave its logits as they were."""
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def is_adapted(name: object) -> bool:
    """Whether the installed transformers has a language model of this ``model_type``."""
    if not isinstance(name, str) or find_spec("transformers") is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def hint(name: object) -> str:
    """What would let a ``model_type`` without a family train; empty if nothing would, or transformers is installed."""
    is_name = isinstance(name, str) and name.isidentifier()
    return f"; decoders of transformers train with {_EXTRA}" if is_name and find_spec("transformers") is None else ""


def adapted_text(table: dict[str, Any]) -> str:
    """A ``config.json`` in one line."""
    return json.dumps(table, sort_keys=True)


def is_same_model(one: str, other: str) -> bool:
    """Whether two texts of ``config.json`` describe the same model, whoever wrote them."""
    if one == other:
        return True
    try:
        tables = [adapted_config(text).to_dict() for text in (one, other)]
    except Exception:  # a text of another kind, which whoever reads it next refuses
        return False
    return all(tables[0].get(key) == tables[1].get(key) for key in {*tables[0], *tables[1]} - _OF_NO_EFFECT)


def adapted_problems(table: dict[str, Any], seq_len: int | None) -> Iterator[str]:
    """What a ``config.json`` has that cannot be trained, one sentence each."""
    for key in ("auto_map", "quantization_config"):
        if key in table:
            why = "code of a folder is never executed" if key == "auto_map" else "quantized weights are not trained"
            yield f"{key} must be missing, as {why}"
    if "auto_map" in table:
        return
    try:
        config = adapted_config(adapted_text(table))
        text = config.get_text_config()
        sizes = text.num_hidden_layers, text.hidden_size, text.vocab_size
    except Exception as error:
        yield f"transformers cannot read it: {error}"
        return
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        yield f"num_hidden_layers, hidden_size and vocab_size must be whole numbers above 0, found {sizes}"
    if config.is_encoder_decoder:
        yield "is_encoder_decoder must be false, as stages are those of a decoder"
    if getattr(text, "output_router_logits", False):
        yield "output_router_logits must be false, as the loss has no term for a router"
    whole = {**text.to_dict(), **{key: getattr(text, key) for key in text.attribute_map}}
    drops = sorted(key for key, one in whole.items() if "drop" in key and isinstance(one, float | int) and one > 0)
    drops = [key for key in drops if not key.startswith(("summary_", "classifier_"))]
    if drops:
        found = ", ".join(f"{key} {whole[key]}" for key in drops)
        yield f"{', '.join(drops)} must be 0, as nothing is dropped here, found {found}"
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and seq_len is not None and seq_len > most:
        yield f"max_position_embeddings must be at least {seq_len}, the tokens of a sequence, found {most}"


@lru_cache(maxsize=64)
def adapted_config(text: str) -> Any:
    """The configuration of transformers; shared, so it must not be changed."""
    from transformers import CONFIG_MAPPING

    # Without the type of the files: stages set that of the run.
    table = {key: one for key, one in json.loads(text).items() if key not in ("dtype", "torch_dtype")}
    with own_logger():
        return CONFIG_MAPPING[table["model_type"]].from_dict(table)


def small_texts(text: str) -> Iterator[str]:
    """Configurations of small models of the same kind: with fewer layers, then narrower, too."""
    table, config = json.loads(text), adapted_config(text)
    whole = config.to_dict()
    depth = config.num_hidden_layers
    keys = {*whole, *config.attribute_map}
    few = {key: _LAYERS for key in _DEPTHS if key in whole and depth > _LAYERS}
    if depth > _LAYERS:
        few |= {key: one[:_LAYERS] for key, one in whole.items() if isinstance(one, list) and len(one) == depth}
    yield adapted_text({**table, **few})
    narrow = {key: one for key, one in _WIDTHS.items() if key in keys and key not in config.attribute_map}
    narrow = {key: one for key, one in narrow.items() if whole.get(key) is not None}
    yield adapted_text({**table, **few, **narrow})


@contextmanager
def own_logger() -> Iterator[None]:
    """Without warnings of transformers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
