"""Where models of transformers have their pieces: found in a forward of a small model of the same configuration."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pipeloom.catalog.adapted import adapted_config, own_logger, small_texts
from pipeloom.errors import UserError, type_and_text

_MOST_PARAMETERS = 5_000_000
"""Of a small model."""


@dataclass(frozen=True)
class Outline:
    """Where a model has its pieces.

    Attributes:
        layers: path of the list of layers.
        before, behind: paths of modules with parameters that a forward calls before and behind the layers.
        num_outputs: length of the tuple that a layer returns; 0 for a tensor.
        tied: whether embedding and head are one matrix.
    """

    layers: str
    before: tuple[str, ...]
    behind: tuple[str, ...]
    num_outputs: int
    tied: bool


@lru_cache(maxsize=4)
def small_model(text: str) -> tuple[str, Any]:
    """The configuration of a small model of the same kind, and that model, in float64 with random weights.

    Raises:
        UserError: there is none; has the name of its type.
    """
    reasons: list[str] = []
    for small in small_texts(text):
        try:
            with torch.device("meta"):
                size = whole_model(adapted_config(small)).num_parameters()
            if size > _MOST_PARAMETERS:
                reasons.append(f"it has {size:,} parameters")
                continue
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                model = whole_model(adapted_config(small), torch.float64).double()
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        except Exception as error:
            reasons.append(type_and_text(error))
        else:
            return small, model
    kind = adapted_config(text).model_type
    raise UserError(
        f"the model type {kind} of transformers cannot be checked, as no small model has its configuration: "
        f"{reasons[-1]}"
    )


@lru_cache(maxsize=16)
def outline_of(text: str) -> Outline:
    """The pieces of a model, found in a forward of a small one of the same configuration.

    Raises:
        UserError: it has no such pieces; has the name of its type.
    """
    model = small_model(text)[1]
    kind, num_layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise UserError(f"the model type {kind} of transformers has no list of {num_layers} layers")
    path, layers = lists[0]
    inner = {id(one) for one in layers.modules()}
    outer = {
        name: module
        for name, module in model.named_modules()
        if id(module) not in inner and next(module.parameters(recurse=False), None) is not None
    }
    order, returned = _called(model, outer, layers)
    first, last = order.index("first"), order.index("last")
    before, behind = (tuple(one for one in part if one in outer) for part in (order[:first], order[last:]))
    if missing := sorted(outer.keys() - {*before, *behind}):
        raise UserError(f"the model type {kind} of transformers has parameters beside its pieces: {', '.join(missing)}")
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    return Outline(path, before, behind, len(returned[0]) if isinstance(returned[0], tuple) else 0, tied)


def _called(model: Any, outer: dict[str, nn.Module], layers: nn.ModuleList) -> tuple[list[str], list[Any]]:
    """The order in which a forward calls modules, and what layers return."""
    order: list[str] = []
    returned: list[Any] = []
    hooks = [
        *(one.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, one in outer.items()),
        layers[0].register_forward_pre_hook(lambda *_: order.append("first")),
        layers[-1].register_forward_hook(lambda *_: order.append("last")),
        layers[0].register_forward_hook(lambda *called: returned.append(called[-1])),
    ]
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    for hook in hooks:
        hook.remove()
    return order, returned


@lru_cache(maxsize=16)
def num_parameters(text: str) -> int:
    """Parameters of a model; a tied matrix counts once."""
    with torch.device("meta"):
        return whole_model(adapted_config(text)).num_parameters()


def whole_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of a configuration of transformers, with its initial weights in float32, for computing in ``dtype``."""
    from transformers import AutoModelForCausalLM

    # PyTorch has no grouped products in float64, with which transformers computes the experts of a layer at once.
    kernels = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    with own_logger():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **kernels)
