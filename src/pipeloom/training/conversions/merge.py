"""Merges models that were trained from one base, by weighted sums of their differences from it.

Task arithmetic (arXiv 2212.04089) has the same weights for all parameters. The weight-ensembling mixture (PWEMoE,
arXiv 2406.09770) has routers that return those of a feed-forward block for a preference among the models.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.checkpoint.checkpoint_folder import INFO, find_checkpoint, is_hugging_face
from pipeloom.config import CheckpointConfig, OutputConfig
from pipeloom.errors import ConfigError, UserError
from pipeloom.terminal.words import count
from pipeloom.training.checkpoints.contents import MODEL, stored_shapes
from pipeloom.training.checkpoints.differences import differences
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.converted import Source, read_run, read_source, write_converted
from pipeloom.training.conversions.export import load_stored, stored_parameters
from pipeloom.training.conversions.router_training import refuse_routers, train_routers
from pipeloom.training.conversions.routers import FILE, Routed, block_of, merged, read_routers
from pipeloom.workload.model import other_settings

WeightsOf = Callable[[str], Sequence[float]]
"""Parameter -> how much it has of each model's difference from the base."""
ROUTER_STEPS, ROUTER_LR = 400, 0.01
_LARGEST_ERROR = 1e-6
"""Of the sum of a preference, which people round."""


class Sources(NamedTuple):
    """What is merged: the base, and models that were trained from it."""

    base: Source
    models: tuple[Source, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each of them, the base first."""
        return tuple(_digest(one.checkpoint) for one in (self.base, *self.models))


def merge(run: Path, folder: Path, models: Sequence[Path], weights: Sequence[float] | None = None) -> Path:
    """Write a run folder with the base plus weighted differences of other runs from it: task arithmetic.

    Args:
        run: the base: a run folder, for its newest checkpoint, or a checkpoint of one.
        folder: a new folder; its run file starts from these weights, without optimizer state.
        models: trained from the base; as ``run``.
        weights: of each model's difference; ``None`` for equal ones that add up to 1.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: everything that is wrong: runs that cannot be read, are unlike the base or start elsewhere, a
            folder that exists, a wrong number of weights.
        RunError: the files cannot be written; nothing is left behind.
    """
    weights = _equal(models) if weights is None else weights
    sources = _read(run, folder, models, _number_problems("weights", weights, models))
    return _write(folder, sources, lambda _: weights, {})


def merge_preferred(
    run: Path,
    folder: Path,
    models: Sequence[Path],
    preference: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    routers: Path | None = None,
    routed: Routed = "feed-forward",
    steps: int = ROUTER_STEPS,
    lr: float = ROUTER_LR,
) -> Path:
    """Write a run folder with the model that routers make for a preference among runs with one base.

    Routers are trained first: each model counts for the text of its run, in the base's pipeline and processes. They are
    a file of the checkpoint, from which other preferences are made without training.

    Args:
        run: the base, as of ``merge``.
        folder: a new folder, as of ``merge``.
        models: trained from the base.
        preference: how much each model's text counts; adds up to 1.
        weights: of the parameters without a router, and of blocks with one before training; ``None``: equal ones that
            add up to 1, and blocks begin with the preference. Not with ``routers``.
        routers: a folder that was written by this function for the same runs; ``None``: train routers.
        routed: what has a router.
        steps: of the training; in each one every model's text has a batch.
        lr: of the training.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: as ``merge``, and a wrong preference; or routers cannot be trained for such a run.
        RunError: as ``merge``; or training failed.
    """
    own = _equal(models) if weights is None else weights
    problems = _preference_problems(preference, models) + _number_problems("weights", own, models)
    sources = _read(run, folder, models, problems)
    if routers is None:
        refuse_routers(sources.base)
        how: dict[str, Any] = {"routed": routed, "interpolates": weights is None, "steps": steps, "lr": lr}
        found = train_routers(sources.base, sources.models, own, **how)
        if found is None:  # another rank of a launcher
            return folder
        found = replace(found, trained_for=sources.digests)
    else:
        found = read_routers(find_checkpoint(routers) / FILE)
        if found.trained_for != sources.digests:
            raise UserError(f"the routers of {routers} were trained for other runs; give RUN and --models as then")
    by_block = found.by_block(preference)
    return _write(folder, sources, lambda name: by_block[block_of(name, found.blocks)], {FILE: found.text()})


def _equal(models: Sequence[Path]) -> list[float]:
    return [1 / max(1, len(models))] * len(models)


def _number_problems(what: str, numbers: Sequence[float], models: Sequence[Path]) -> list[str]:
    found = [] if models else ["--models is missing: runs that were trained from RUN"]
    if models and len(numbers) != len(models):
        found.append(f"--{what} takes a number for each of {count(len(models), 'model')}, found {len(numbers)}")
    return found


def _preference_problems(preference: Sequence[float], models: Sequence[Path]) -> list[str]:
    found = _number_problems("preference", preference, models)
    total = math.fsum(preference)
    if min(preference, default=0.0) < 0 or abs(total - 1) > _LARGEST_ERROR:
        found.append(f"--preference must have numbers of at least 0 that add up to 1, found {_shown(preference)}")
    return found


def _shown(numbers: Sequence[float]) -> str:
    return " ".join(f"{one:g}" for one in numbers)


def _read(run: Path, folder: Path, models: Sequence[Path], problems: list[str]) -> Sources:
    """The base and the models.

    Raises:
        ConfigError: all problems, with those given.
    """
    problems = list(dict.fromkeys(problems))
    base, others = None, list[Source]()
    try:
        base = read_source(run, folder)
    except UserError as error:
        problems.append(str(error))
    for one in models:
        try:
            others.append(read_run(one))
        except UserError as error:
            problems.append(str(error))
    if base is not None:
        problems += [found for one, each in zip(models, others, strict=False) for found in _unlike(base, each, one)]
        problems += [f"{run}: it has adapters; export it with --merge"] if base.info.adapter is not None else []
    if problems or base is None:
        raise ConfigError(problems, "the merge")
    return Sources(base, tuple(others))


def _unlike(base: Source, model: Source, run: Path) -> list[str]:
    """What a model differs in from those that its base can be merged with."""
    found = other_settings(base.config.model, model.info.model, "there it is")
    if model.info.adapter is not None:
        found.append("it has adapters; export it with --merge, and train from that folder")
    else:
        shapes = [_weights(stored_shapes(one.checkpoint)) for one in (base, model)]
        found += [] if found else differences(*shapes)
    if base.texts != model.texts:
        found.append("it has another tokenizer than the base")
    start = model.config.checkpoint.init
    if start is not None and _is_other(start, base.checkpoint):
        found.append(f"it was trained from {start}, not from {base.checkpoint}")
    return [f"{run}: {problem}" for problem in found]


def _weights(shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, tuple[int, ...] | None]:
    return {key: shape for key, shape in shapes.items() if key.startswith(MODEL)}


def _is_other(start: Path, checkpoint: Path) -> bool:
    """Whether a run started from something else than a checkpoint. False where that cannot be seen any more."""
    if is_hugging_face(start):
        return True
    try:
        return _digest(find_checkpoint(start)) != _digest(checkpoint)
    except UserError:  # moved or removed
        return False


def _digest(checkpoint: Path) -> str:
    """Of a checkpoint's description, which has the hashes of its files."""
    return hashlib.sha256((checkpoint / INFO).read_bytes()).hexdigest()


def _write(folder: Path, sources: Sources, weights_of: WeightsOf, texts: Mapping[str, str]) -> Path:
    base = sources.base
    config = replace(base.config, checkpoint=CheckpointConfig(init=folder.absolute()), output=OutputConfig())
    info = replace(base.info, cause="end", base=None)
    return write_converted(folder, info, config, _tensors(sources, weights_of), {**base.texts, **texts})


def _tensors(sources: Sources, weights_of: WeightsOf) -> dict[str, Tensor]:
    """The merged parameters by the keys of a checkpoint; of the models one parameter at a time is in memory."""
    every = [stored_parameters(CheckpointReader(one.checkpoint)) for one in (sources.base, *sources.models)]
    found: dict[str, Tensor] = {}
    for name, shape in every[0].shapes.items():
        read = [torch.empty(shape, dtype=one.dtypes[name]) for one in every]
        for stored, tensor in zip(every, read, strict=True):
            load_stored(stored, {name: tensor})
        found[MODEL + name] = merged(read[0], read[1:], weights_of(name))
    return found
