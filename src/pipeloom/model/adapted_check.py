"""Whether the pieces of a model of transformers compute what the whole model computes, on a small one of its kind."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipeloom.catalog.adapted import adapted_config
from pipeloom.errors import UserError, type_and_text
from pipeloom.model.adapted import AdaptedStage
from pipeloom.model.adapted_outline import num_parameters, outline_of, small_model

_TOLERANCE = 1e-9
"""Largest difference between logits of a model and of its pieces in float64, relative to the largest logit."""
_TOKENS = 7


@lru_cache(maxsize=16)
def check_adapted(text: str) -> str | None:
    """Why a model cannot be trained in pieces, with the name of its type; ``None`` if it can.

    A small model of the same configuration runs in float64, whole and in pieces.

    Args:
        text: its ``config.json``.
    """
    what = f"the model type {adapted_config(text).model_type} of transformers"
    try:
        num_parameters(text)  # that there is such a model, and not only a small one
        if outline_of(text).tied != bool(getattr(adapted_config(text), "tie_word_embeddings", False)):
            return f"{what} does not tie its weights as tie_word_embeddings of its config.json"
        small, model = small_model(text)
        return _difference(small, model, what) or _values(small, what)
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"{what} does not run in pieces: {type_and_text(error)}"


def _difference(text: str, model: Any, what: str) -> str | None:
    config, outline = model.config, outline_of(text)
    tokens = torch.arange(2 * _TOKENS).view(2, _TOKENS) % config.get_text_config().vocab_size
    with torch.no_grad():
        expected, again = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
        if not torch.equal(expected, again):
            return f"{what} draws random numbers in its forward; set its dropout to 0 in config.json"
        other = tokens.clone()
        other[:, -1] += 1
        if not _close(model(input_ids=other, use_cache=False).logits[:, :-1], expected[:, :-1]):
            return f"{what} is no decoder: its logits depend on later tokens"
        x = tokens
        for piece in range(config.get_text_config().num_hidden_layers + 2):
            x = _filled(AdaptedStage(text, outline, range(piece, piece + 1), "cpu", torch.float64), model)(x)
    if not _close(x, expected):
        most = float((x - expected).abs().max())
        return f"the pieces of {what} do not compute its logits: they differ by {most:.1e}"
    return None


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _values(text: str, what: str) -> str | None:
    """Whether a weight has no first value."""
    stage = AdaptedStage(text, outline_of(text), range(10**6), "cpu", torch.float32)
    stage.draw(0)
    without = [name for name, one in stage.model.named_parameters() if one.isnan().any()]
    return f"{what} has no rule for the first values of {', '.join(without)}" if without else None


def _filled(stage: AdaptedStage, model: Any) -> AdaptedStage:
    """A stage with the weights of a model."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in stage.model.named_parameters():
        parameter.copy_(whole[name])
    if stage.borrows:
        stage.borrow(model.get_input_embeddings().weight.detach())
    return stage
