"""Problems of a run whose matrices consist of blocks: one sentence each."""

from collections.abc import Iterator

from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.config.run import RunConfig
from pipeloom.workload.model import ModelConfig, shape_of
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.optimizers import OPTIMIZERS

Problems = Iterator[str]
_LEAST_VOCABULARY = 2


def density_problems(config: RunConfig) -> Problems:
    """What kept blocks do not work with."""
    model, init = config.model, config.checkpoint.init
    if model.density is None:
        return
    if model.adapted is not None:
        yield "model.density has no effect on a model that classes of transformers compute (model.file); leave it out"
        return
    optimizer = config.optimizer.name
    refused = {
        f"model.experts {model.experts}, whose products have as many rows as tokens choose them": model.experts,
        f"model.share_layers {model.share_layers}, whose copies would have blocks of their own": model.share_layers,
        f"adapter.rank {config.adapter.rank}, whose pairs belong to dense matrices": config.adapter.rank,
        "training.compile, which has no operator for products of blocks": config.training.compile,
        f"training.matmul_dtype {config.training.matmul_dtype}": config.training.matmul_dtype,
        f"optimizer.name {optimizer}, which updates whole matrices": optimizer in OPTIMIZERS
        and OPTIMIZERS[optimizer].matrices is not None,
        f"model.family {model.family}, whose layers are its own": model.family in MODELS
        and MODELS[model.family].layer is not None,
        f"checkpoint.init {init}, whose matrices are dense": init is not None and is_hugging_face(init),
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"model.density does not work with {name}; leave one of them out"


def density_size_problems(config: RunConfig) -> Problems:
    """Blocks that the matrices of the model cannot have."""
    model = config.model
    if model.density is None or model.adapted is not None or not _has_sizes(model):
        return
    if not 0 < model.density < 1:
        # Its lower limit is that of its type.
        if model.density >= 1:
            yield f"model.density must be below 1, found {model.density:g}; leave it out for dense matrices"
        return
    for problem in shape_of(model.resolve(_LEAST_VOCABULARY)).block_problems:
        yield f"model.{problem}"


def _has_sizes(model: ModelConfig) -> bool:
    """Whether the sizes are of a model; others are reported elsewhere."""
    sizes = model.num_layers, model.hidden_size, model.num_heads, model.head_size or 1, model.num_kv_heads or 1
    more = model.ffn_size or 1, model.density_block or 1, model.vocab_size or 1
    return model.family in MODELS and min(*sizes, *more) >= 1
