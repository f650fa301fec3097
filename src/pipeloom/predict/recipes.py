"""The training recipe of a model's file in the configuration of a run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from pipeloom.catalog import read_model
from pipeloom.catalog.training_recipes import TrainingRecipe
from pipeloom.config import RunConfig
from pipeloom.errors import UserError

_Config = TypeVar("_Config", bound=RunConfig)


def _recipe_of(config: RunConfig) -> TrainingRecipe | None:
    """The recipe in the file of a run's model; ``None`` without one."""
    model = config.model
    if (model.preset is None) == (model.file is None):
        return None
    try:
        return read_model(model.preset or str(model.file), config.data.seq_len, adapts=True).recipe
    except UserError:  # the problems of a file are reported where its sizes are read
        return None


def with_recipe(config: _Config) -> _Config:
    """The configuration with the recipe of its model, for the settings that are unset.

    A run that sets ``optimizer.lr``, or an update rule other than AdamW, has a recipe of its own and stays as it is.
    """
    recipe, own = _recipe_of(config), config.optimizer
    if recipe is None or own.lr is not None or own.name != "adamw":
        return config
    unset: dict[str, Any] = {name: value for name, value in recipe.optimizer.items() if getattr(own, name) is None}
    if own.clip == "none":
        unset.pop("clip_grad_norm", None)
    steps = recipe.steps_of(_batch_tokens(config)) if config.training.steps is None else config.training.steps
    return replace(config, optimizer=replace(own, **unset), training=replace(config.training, steps=steps))


def recipe_notes(config: RunConfig) -> tuple[str, ...]:
    """Sentences on the recipe that a configuration has from its model's file: source, what it changes or leaves out.

    Args:
        config: with the recipe, or without, in which case there are no sentences.
    """
    recipe, own = _recipe_of(config), config.optimizer
    if recipe is None or any(getattr(own, name) != value for name, value in recipe.optimizer.items()):
        return ()
    return tuple(_notes(recipe, config))


def _notes(recipe: TrainingRecipe, config: RunConfig) -> Iterator[str]:
    names = ", ".join(f"optimizer.{name}" for name in recipe.optimizer)
    steps = recipe.steps_of(_batch_tokens(config))
    is_steps = steps is not None and steps == config.training.steps
    yield f"{names}{' and training.steps' if is_steps else ''}: from {recipe.source}."
    if is_steps and recipe.tokens is not None:
        yield f"training.steps {steps}: {recipe.tokens / 1e9:,.6g} billion tokens in batches of this run."
    batch = _batch_tokens(config)
    if recipe.batch_tokens is not None and not 0.8 <= batch / recipe.batch_tokens <= 1.25:
        yield (
            f"optimizer.lr was chosen for batches of {recipe.batch_tokens / 1e6:.4g} million tokens; this run has "
            f"{batch:,}, and keeps the rate."
        )
    yield from recipe.differs


def _batch_tokens(config: RunConfig) -> int:
    return config.layout.batch_size * config.data.seq_len
