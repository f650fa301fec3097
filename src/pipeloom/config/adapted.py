"""Settings that a model of transformers without a family here does not support."""

from collections.abc import Iterator

from pipeloom.config.run import RunConfig
from pipeloom.families import FAMILIES

NO_CACHE = (
    "generate caches keys and values, which it cannot do in layers of transformers; export the run with --format hf, "
    "and generate with transformers"
)


def adapted_problems(config: RunConfig) -> Iterator[str]:
    """One sentence for each setting that does not work with ``model.adapted``."""
    layout, schedule, training, data = config.layout, config.schedule, config.training, config.data
    if config.model.adapted is None:
        return
    if config.model.file is None:
        yield "model.adapted is set by model.file; leave it out"
    family = FAMILIES.get(schedule.family)
    refused = {
        f"layout.tp {layout.tp}": layout.tp > 1,
        f"layout.token_slices {layout.token_slices}": layout.token_slices not in (None, 1),
        "layout.recompute selective": "selective" in (layout.recompute, *(layout.recompute_layers or ())),
        f"schedule.family {schedule.family}": family is not None and family.splits_backward,
        "schedule.balance": schedule.balance,
        "schedule.offload": schedule.offload,
        "schedule.device_budget": schedule.device_budget is not None,
        "schedule.file": schedule.file is not None,
        "training.compile": training.compile,
        f"training.freeze_layers {training.freeze_layers}": training.freeze_layers is not None,
        "data.attention document": data.by_document,
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"{name} does not work with a model that classes of transformers compute (model.file); leave it out"
