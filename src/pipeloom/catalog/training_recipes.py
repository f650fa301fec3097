"""Training recipes of models: the table ``[recipe]`` of a model file, with its source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeloom.catalog.reading import Reader


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How a model was trained, as far as its source has it.

    Attributes:
        source: of all numbers.
        optimizer: name of a setting of ``[optimizer]`` -> value; always with ``lr``.
        steps: optimizer steps; ``None`` if unknown, or if ``tokens`` gives it.
        tokens: of the training run; ``None`` if ``steps`` gives it, or if unknown.
        batch_tokens: tokens of a global batch, for which the learning rate was chosen; ``None`` if unknown.
        differs: what was done and no setting expresses, a sentence each.
    """

    source: str
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    tokens: float | None = None
    batch_tokens: float | None = None
    differs: tuple[str, ...] = ()

    def steps_of(self, batch_tokens: int) -> int | None:
        """Steps of a run with batches of so many tokens; ``None`` if the recipe has neither steps nor tokens."""
        return self.steps if self.tokens is None else max(1, round(self.tokens / batch_tokens))


def read_recipe(reader: Reader) -> TrainingRecipe:
    """The recipe of a table; problems are added to those of the reader.

    The update rule is AdamW, and the learning rate has a linear warm-up and a cosine decay. No other ones are
    supported, so a recipe with others is refused.
    """
    known = reader.names()
    reader.text("optimizer", "adamw", among=("adamw",))
    reader.text("lr_schedule", "cosine", among=("cosine",))
    others: dict[str, Callable[[str], Any]] = {
        "eps": reader.positive,
        "clip_grad_norm": reader.positive,
        "weight_decay": reader.number,
        "lr_warmup_steps": reader.integer,
        "lr_min_fraction": partial(reader.fraction, is_zero_allowed=True),
        "betas": reader.pair,
    }
    found = {"lr": reader.positive("lr")} | {name: read(name) for name, read in others.items() if name in known}
    if {"steps", "tokens"} <= set(known):
        reader.complain("steps and tokens cannot both be there; expected one")
    return TrainingRecipe(
        source=reader.text("source"),
        optimizer=found,
        steps=reader.integer("steps") if "steps" in known else None,
        tokens=reader.positive("tokens") if "tokens" in known else None,
        batch_tokens=reader.positive("batch_tokens") if "batch_tokens" in known else None,
        differs=reader.texts("differs"),
    )
