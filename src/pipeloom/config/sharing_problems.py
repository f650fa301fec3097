"""Problems of a run whose layers share their weights: one sentence each."""

from collections.abc import Iterator

from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.config.layout_problems import refused_over_stages
from pipeloom.config.run import RunConfig

Problems = Iterator[str]


def sharing_problems(config: RunConfig) -> Problems:
    """What shared layers do not work with."""
    model, number = config.model, config.model.share_layers
    if number is None:
        return
    if model.adapted is not None:
        what = "a model that classes of transformers compute (model.file)"
        yield f"model.share_layers has no effect on {what}; leave it out"
        return
    if number != "all" and (number < 2 or number >= model.num_layers or model.num_layers % number):
        yield (
            f"model.share_layers must be all, or a number from 2 on that divides model.num_layers {model.num_layers} "
            f"and is below it, found {number}"
        )
        return
    yield from _unlike_problems(config)
    init = config.checkpoint.init
    refused = {
        "model.experts, whose loads are those of a layer": model.experts is not None,
        "adapter.rank, whose pairs belong to one layer": config.adapter.rank is not None,
        "training.freeze_layers, which freezes single layers": config.training.freeze_layers is not None,
        "restart.layout plan, whose search prices own layers": config.restart.layout == "plan",
        "checkpoint.init of a Hugging Face folder, whose layers differ": init is not None and is_hugging_face(init),
    }
    if config.layout.num_stages > 1:
        refused |= refused_over_stages(config)
    for name, is_on in refused.items():
        if is_on:
            yield f"model.share_layers does not work with {name}; leave one of them out"


def _unlike_problems(config: RunConfig) -> Problems:
    """Layers that share their weights, but not what they see or recompute."""
    model, sharing, by_layer = config.model, config.model.sharing, config.layout.recompute_layers
    assert sharing is not None
    for group in sharing.alike:
        if len({model.window_of(layer) for layer in group}) > 1:
            yield (
                f"model.share_layers {model.share_layers} gives layers {group[0]} to {group[-1]} one set of weights, "
                "and model.window only some of them a window; leave one of them out"
            )
            break
    if by_layer is None or len(by_layer) != model.num_layers:
        return
    for group in sharing.alike:
        if len({by_layer[layer] for layer in group}) > 1:
            yield (
                f"layout.recompute_layers must be the same for layers {group[0]} to {group[-1]}, which share their "
                f"weights (model.share_layers {model.share_layers})"
            )
            break
