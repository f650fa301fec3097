"""Hyperparameters without a default for a model from elsewhere, and their values in the demo.

A run that sets the sizes of its model is the demo, or a variation of it. A model of ``model.preset`` or ``model.file``
has a training recipe of its own, which its file has (``pipeloom.predict.recipes``) or the user must provide: it gets no
defaults for these settings.
"""

from dataclasses import replace
from typing import TypeVar

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, is_hugging_face
from pipeloom.config.paths import unwritable_paths
from pipeloom.config.problems import find_problems
from pipeloom.config.run import RunConfig, value_of
from pipeloom.workload.model_families import MODELS

HYPERPARAMETERS = {
    "model.norm_eps": "added to the variance in normalization, as the model was designed",
    "model.rope_theta": "base of the rotary position frequencies, as the model was designed",
    "data.path": "a file of text or of records, or a folder of them",
    "data.tokenizer": "a tokenizer.json or a folder with one, bytes, or bpe with a data.bpe_vocab_size",
    "optimizer.lr": "peak learning rate",
    "optimizer.lr_warmup_steps": "steps over which the learning rate rises from 0",
    "training.steps": "optimizer steps",
}
"""Settings that a model from elsewhere needs for training -> description. ``None`` is unset."""

_USUAL = ("clip_grad_norm", "lr_min_fraction")
"""Settings that, like those of the update rule, differ little between published recipes: unset ones have defaults, and
``usual_values`` lists them."""


def unset(config: RunConfig) -> dict[str, str]:
    """Settings that the user must set before the run can train: name -> description. Empty for the demo."""
    if not _is_from_elsewhere(config):
        return {}
    is_own, is_rotary = config.model.adapted is None, MODELS[config.model.family].is_rotary
    return {
        name: what
        for name, what in HYPERPARAMETERS.items()
        if value_of(config, name) is None
        and (is_own or not name.startswith("model."))
        and (is_rotary or name != "model.rope_theta")
        and (config.data.sources is None or name != "data.path")
    }


_Config = TypeVar("_Config", bound=RunConfig)


def with_pretrained(config: _Config) -> _Config:
    """The run with the model and the tokenizer of the Hugging Face folder that its weights come from.

    A model or a tokenizer that the run names itself stays. Single settings of the model do not name another one: they
    are compared with the folder's.
    """
    init = config.checkpoint.init
    if init is None or not is_hugging_face(init):
        return config
    model, data = config.model, config.data
    if model.preset is None and model.file is None:
        model = replace(model, file=init)
    if data.tokenizer is None and (init / TOKENIZER).is_file():
        data = replace(data, tokenizer=init)
    return replace(config, model=model, data=data)


def training_problems(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    """Problems of a run that is trained on this machine, one sentence each."""
    # A model file may set some of the hyperparameters.
    recipe = hyperparameter_problems(config) if is_model_known else []
    paths = [
        f"the paths of a run must be UTF-8, so that its run file can contain them, found {path}; rename it"
        for path in unwritable_paths(config)
    ]
    return [*find_problems(config, is_model_known=is_model_known), *recipe, *paths]


def hyperparameter_problems(config: RunConfig) -> list[str]:
    """One sentence with all missing hyperparameters; empty if none are missing."""
    missing = unset(config)
    if not missing:
        return []
    source = f"model.preset {config.model.preset}" if config.model.preset else f"model.file {config.model.file}"
    wanted = "\n".join(f"      {name:<26}{what}" for name, what in missing.items())
    return [f"{source} has no training recipe for all of these; set, in the run file or as flags:\n{wanted}"]


def usual_values(config: RunConfig) -> str | None:
    """A sentence with the optimizer's settings that are defaults, not the model's recipe; ``None`` for no such."""
    own = config.optimizer
    kept = {name: value for name, value in own.rule.settings.items() if name not in own.given}
    taken = [name for name in _USUAL if name != "lr_min_fraction" or own.lr_decay_style != "constant"]
    kept |= {name: getattr(own, f"known_{name}") for name in taken if getattr(own, name) is None}
    if not kept or not _is_from_elsewhere(config):
        return None
    texts = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in kept.items()}
    values = ", ".join(f"optimizer.{name} {text}" for name, text in texts.items())
    return f"{values}: usual values, which are not from a recipe of this model."


def with_demo_hyperparameters(config: RunConfig) -> RunConfig:
    """The run with the demo's values for all unset hyperparameters except ``data.path``."""
    model, data, optimizer, training = config.model, config.data, config.optimizer, config.training
    return replace(
        config,
        model=model
        if model.adapted is not None
        else replace(model, norm_eps=model.known_norm_eps, rope_theta=model.known_rope_theta),
        data=replace(data, tokenizer=data.known_tokenizer),
        optimizer=replace(optimizer, lr=optimizer.known_lr, lr_warmup_steps=optimizer.known_lr_warmup_steps),
        training=replace(training, steps=training.known_steps),
    )


def _is_from_elsewhere(config: RunConfig) -> bool:
    return config.model.preset is not None or config.model.file is not None
