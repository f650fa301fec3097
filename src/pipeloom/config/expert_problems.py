"""Problems of a run whose model has experts: one sentence each."""

from collections.abc import Iterator

from pipeloom.config.run import RunConfig
from pipeloom.errors import ConfigError, UserError
from pipeloom.schedule import Schedule, read_schedule
from pipeloom.schedule.whole_batch import WHOLE_BATCH, interleaved_stage
from pipeloom.workload.adapter import OF_ATTENTION
from pipeloom.workload.model_families import MODELS

Problems = Iterator[str]


def expert_problems(config: RunConfig) -> Problems:
    """What experts do not work with."""
    model = config.model
    if model.experts is None or model.experts < 2:
        return
    if model.adapted is not None:
        yield "model.experts has no effect on a model that classes of transformers compute (model.file); leave it out"
        return
    if dtype := config.training.matmul_dtype:
        yield f"model.experts does not work with training.matmul_dtype {dtype}; leave one of them out"


def expert_adapter_problems(config: RunConfig) -> Problems:
    """Adapters of a model with experts: its attention may have some, and routers and experts are frozen."""
    model, own = config.model, config.adapter
    if own.rank is None or model.experts is None or model.experts < 2:
        return
    if wrong := [one for one in own.targets or () if one not in OF_ATTENTION]:
        yield (
            f"adapter.targets must be matrices of attention ({' '.join(OF_ATTENTION)}) in a model with experts, whose "
            f"products have as many rows as tokens choose them, found {' '.join(wrong)}"
        )
    if model.known_balance == "bias":
        yield "model.balance bias moves routers, which adapter.rank freezes; use none, or a loss: batch or microbatch"


def expert_size_problems(config: RunConfig) -> Problems:
    """Sizes of experts that do not fit the model."""
    model = config.model
    if model.experts is None or model.family not in MODELS:
        return
    taken, every = model.experts_per_token or 2, model.expert_every or 1
    if taken > model.experts:
        yield f"model.experts_per_token must be at most model.experts {model.experts}, found {taken}"
    if every > model.num_layers:
        yield f"model.expert_every must be at most model.num_layers {model.num_layers}, found {every}"
    if every == 1 and model.expert_ffn is not None and model.ffn_size not in (None, model.expert_ffn):
        only = f"model.expert_ffn {model.expert_ffn}, which every layer has"
        yield f"model.ffn_size {model.ffn_size} has no effect with {only}; leave model.ffn_size out"
    if MODELS[model.family].gates < 2:
        yield f"model.experts needs gated feed-forward blocks, found model.family {model.family}; use llama"


def balance_problems(config: RunConfig) -> Problems:
    """A balance loss of the whole batch with a schedule that goes back before all forwards have ended."""
    if not config.model.needs_whole_batch or config.choice().problems():
        return
    schedule = _order(config)
    found = None if schedule is None else interleaved_stage(schedule)
    if found is not None:
        yield WHOLE_BATCH.format(found)


def _order(config: RunConfig) -> Schedule | None:
    """The order of a run's actions; ``None`` if it cannot be made, which is reported elsewhere."""
    file = config.schedule.file
    try:
        return config.choice().make() if file is None else read_schedule(file).schedule
    except (UserError, ConfigError):
        return None
