"""Merges models that were trained from one base, by weighted sums of their differences from it.

Task arithmetic (arXiv 2212.04089) has the same weights for all parameters. The weight-ensembling mixture (PWEMoE,
arXiv 2406.09770) has routers that return those of a feed-forward block for a preference among the models.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.checkpoint.checkpoint_folder import (
    INFO,
    ORIGIN,
    TOKENIZER,
    find_checkpoint,
    find_weights,
    is_hugging_face,
    measure,
)
from pipeloom.config import CheckpointConfig, OutputConfig
from pipeloom.data.tokenizer import same_tokens
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.describe import load_or_note
from pipeloom.terminal.words import count, quoted
from pipeloom.training.checkpoints.contents import MODEL
from pipeloom.training.checkpoints.differences import differences
from pipeloom.training.conversions.converted import (
    Source,
    existing,
    parameters_of,
    read_folder,
    read_run,
    write_converted,
)
from pipeloom.training.conversions.router_training import refuse_routers, train_routers
from pipeloom.training.conversions.routers import FILE, Routed, block_of, merged, read_routers
from pipeloom.training.pretrained import origin_of, stored_tensors
from pipeloom.workload.model import other_settings

WeightsOf = Callable[[str], Sequence[float]]
"""Parameter -> how much it has of each model's difference from the base."""
ROUTER_STEPS, ROUTER_LR = 400, 0.01
_LARGEST_ERROR = 1e-6
"""Of the sum of a preference, which people round."""
_ADAPTERS = "it has adapters; give the folder that `pipeloom export {} FOLDER --format hf --merge` writes"


_SMALLER = "use smaller --weights, and models of finite weights"


class Sources(NamedTuple):
    """What is merged: the base, and models that were trained from it."""

    base: Source
    models: tuple[Source, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each of them, the base first."""
        return tuple(_digest(one.checkpoint) for one in (self.base, *self.models))


def merge(run: Path, folder: Path, models: Sequence[Path], weights: Sequence[float] | None = None) -> Path:
    """Write a run folder with the base plus weighted differences of models from it: task arithmetic.

    Args:
        run: the base: a run folder, for its newest checkpoint, a checkpoint of one, or a Hugging Face folder, for which
            the settings of the first run among the models apply.
        folder: a new folder; its run file starts from these weights, without optimizer state.
        models: trained from the base; as ``run``.
        weights: of each model's difference; ``None`` for equal ones that add up to 1.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: everything that is wrong: models that cannot be read, are unlike the base or start elsewhere, a
            folder that exists, weights that are not finite or too many or few; ``UserError`` for parameters that are
            NaN or infinite.
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
        models: runs that were trained from the base.
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
        refuse_routers(sources.base, sources.models)
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
    if not all(map(math.isfinite, numbers)):
        found.append(f"--{what} must have finite numbers, found {_shown(numbers)}")
    return found


def _preference_problems(preference: Sequence[float], models: Sequence[Path]) -> list[str]:
    found = _number_problems("preference", preference, models)
    if not all(map(math.isfinite, preference)):
        return found
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
    problems, paths = [*dict.fromkeys(problems), *existing(folder)], [run, *models]
    found = {one: _read_or_note(_read_run, one, problems) for one in paths if not is_hugging_face(one)}
    # A folder of Hugging Face has no layout and no text: those of the first run apply, if there is one.
    first = next((one for one in found.values() if one is not None), None)
    config = None if first is None else first.config
    for one in paths:
        if one not in found:
            found[one] = source = _read_or_note(partial(read_folder, config=config), one, problems)
            config = source.config if config is None and source is not None else config
    base, *others = (found[one] for one in paths)
    if base is not None:
        base = base._replace(texts=base.texts or (first or base).texts)
        for one, each in zip(models, others, strict=True):
            problems += [] if each is None else _unlike(base, each, one)
        problems += [f"{run}: {_ADAPTERS.format(quoted(run))}"] if base.info.adapter is not None else []
        problems += [] if first or base.texts else [f"{run}: it has no {TOKENIZER}; put the one of the models there"]
    if problems or base is None:
        raise ConfigError(problems, "the merge")
    # The tokenizer of the settings, since files of the same tokens may differ.
    texts = (first or base).texts or base.texts
    return Sources(base._replace(texts=texts), tuple(one for one in others if one is not None))


def _read_run(path: Path) -> Source:
    return read_run(find_weights(path))


def _read_or_note(read: Callable[[Path], Source], path: Path, problems: list[str]) -> Source | None:
    return load_or_note(lambda name: read(Path(name)), str(path), problems)


def _unlike(base: Source, model: Source, run: Path) -> list[str]:
    """What a model differs in from those that its base can be merged with."""
    found = other_settings(base.config.model, model.info.model, "there it is")
    if model.info.adapter is not None:
        found.append(_ADAPTERS.format(quoted(run)))
    elif base.info.adapter is None and not found:
        found += differences(*(parameters_of(one).shapes for one in (base, model)))
    if base.texts and model.texts and not same_tokens(base.texts, model.texts):
        found.append("it has another tokenizer than the base")
    found += [f"it was trained from {start}, not from {base.checkpoint}" for start in _other_starts(base, model)]
    return [f"{run}: {problem}" for problem in found]


def _other_starts(base: Source, model: Source) -> list[str]:
    """What a run started from, if that is seen to be something else than the base."""
    settings = model.config.checkpoint
    if is_hugging_face(model.checkpoint):
        return []
    if settings.start is None and is_hugging_face(base.checkpoint):
        return ["random weights"]
    start = settings.init
    return [] if start is None or _is_base(start, base.checkpoint, model.checkpoint) else [str(start)]


def _is_base(start: Path, base: Path, model: Path) -> bool:
    """Whether what a run started from is the base, or cannot be seen any more."""
    try:
        start = find_weights(start)
        if start.samefile(base) or start.samefile(model):  # a conversion starts from what it wrote
            return True
        return is_hugging_face(start) == is_hugging_face(base) and _digest(start) == _digest(base)
    except UserError:  # moved or removed
        return True


def _digest(source: Path) -> str:
    """Of a checkpoint's description, which has the hashes of its files; of the files of weights of another folder."""
    if is_hugging_face(source):
        files = measure(sorted({one.file for one in stored_tensors(source).values()}))
        return hashlib.sha256("".join(one.sha256 for one in files.values()).encode()).hexdigest()
    return hashlib.sha256((source / INFO).read_bytes()).hexdigest()


def _write(folder: Path, sources: Sources, weights_of: WeightsOf, texts: Mapping[str, str]) -> Path:
    base = sources.base
    config = replace(base.config, checkpoint=CheckpointConfig(init=folder.absolute()), output=OutputConfig())
    info = replace(base.info, cause="end", base=None)
    origin = origin_of(base.checkpoint, base.texts)
    texts = {**base.texts, **({} if origin is None else {ORIGIN: origin}), **texts}
    return write_converted(folder, info, config, _tensors(sources, weights_of), texts)


def _tensors(sources: Sources, weights_of: WeightsOf) -> dict[str, Tensor]:
    """The merged parameters by the keys of a checkpoint; of the models one parameter at a time is in memory."""
    base, *models = (parameters_of(one) for one in (sources.base, *sources.models))
    found: dict[str, Tensor] = {}
    for name in base.shapes:
        # What a narrow base would round away, a model may have learned.
        dtype = reduce(torch.promote_types, (one.dtypes[name] for one in (base, *models)))
        found[MODEL + name] = merged(base.whole(name).to(dtype), [one.whole(name) for one in models], weights_of(name))
    if wrong := [name.removeprefix(MODEL) for name, one in found.items() if not one.isfinite().all()]:
        raise UserError(
            f"the merge makes {count(len(wrong), 'parameter')} NaN or infinite, such as {wrong[0]}; {_SMALLER}"
        )
    return found
