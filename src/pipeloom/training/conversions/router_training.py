"""Trains routers of a preference through the stages of a pipeline (PWEMoE, arXiv 2406.09770).

The merged weights of a block are linear in what its router returns. So the gradient of that is the inner product of the
block's gradient, which an ordinary step computes, with each model's difference from the base: stages, schedule and
communication are those of any run, and a rank needs nothing of the blocks of others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.config import CheckpointConfig, OutputConfig, RunConfig, decided_problems
from pipeloom.data.text import load_data
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import ConfigError, RunError
from pipeloom.execute.parts.data_parallel import Segment
from pipeloom.execute.processes.world import World, is_first
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.predict.describe import completed
from pipeloom.training.adapted import with_adapted_check
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.conversions.converted import Source
from pipeloom.training.conversions.routers import Routed, Routers, block_of, merged, parse_routers, routed_blocks
from pipeloom.training.memory_check import check_memory
from pipeloom.training.optimizers.optimizer import set_rate
from pipeloom.training.optimizers.updates_within import KeptGradients
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.pretrained import read_weights
from pipeloom.training.session import Texts, check_processes, run_on_all_ranks

_LAST_RATE = 0.1
"""Of the learning rate, in the last step of a cosine; as in the authors' code."""


def refuse_routers(base: Source, models: Sequence[Source]) -> None:
    """Refuse runs whose weights or gradients are not all on their ranks after a step, or whose blocks are none.

    And models without a run, since it has their text.

    Raises:
        ConfigError: all reasons.
    """
    config = base.config
    reasons = {
        "model.experts": config.model.experts is not None,
        "model.share_layers": config.model.sharing is not None,
        "model.file of a model of transformers": config.model.adapted is not None,
        "schedule.device_budget": config.schedule.device_budget is not None,
        "layout.average_every": config.layout.average_every is not None,
    }
    problems = [f"routers cannot be trained with {name}" for name, is_set in reasons.items() if is_set]
    problems += [
        f"routers are trained on the text of each model's run, {one.checkpoint} has none; use --method arithmetic"
        for one in models
        if is_hugging_face(one.checkpoint)
    ]
    if problems:
        raise ConfigError(problems, "--method pwe")


def train_routers(
    base: Source,
    models: Sequence[Source],
    outside: Sequence[float],
    *,
    routed: Routed,
    interpolates: bool,
    steps: int,
    lr: float,
) -> Routers | None:
    """Train routers in the processes of the base's run.

    In each step a preference is drawn, uniform over all, and each model's text has a batch; the loss is the sum of the
    texts' losses weighted by the preference.

    Args:
        base: whose layout, schedule and batch apply.
        models: trained from it; the text of each one's run counts for it.
        outside: what parameters without a router have of each model.
        routed: what has a router.
        interpolates: whether blocks begin with the preference, or with ``outside``.
        steps: of Adam.
        lr: of Adam; falls to a tenth.

    Returns:
        The routers; under a launcher, ``None`` on ranks other than 0.

    Raises:
        UserError: a text cannot be read, or the host lacks memory; ``ConfigError`` for settings of the base's run.
        RunError: a loss is not finite, or a process failed.
    """
    config = replace(
        base.config,
        checkpoint=CheckpointConfig(),
        output=OutputConfig(),
        training=replace(base.config.training, freeze_layers=None),
    )
    config, problems = completed(config, with_adapted_check(decided_problems))
    if problems:
        raise ConfigError(problems, "the run of the base")
    check_processes(config)
    check_memory(config)
    load = partial(_load, base.texts, tuple(one.config for one in models))
    if is_first():
        load(config)  # tokenized once, before the processes start
    blocks = routed_blocks(routed, config.model.num_layers)
    first = Routers.first(blocks, outside, config.training.seed, interpolates=interpolates)
    job = partial(_train, sources=(base, *models), first=first.text(), steps=steps, lr=lr)
    text = run_on_all_ranks(config, job, load=load)
    return None if text is None else parse_routers(text)


def _load(tokenizer: dict[str, str], runs: Sequence[RunConfig], config: RunConfig) -> Texts:
    """The text of each run, in windows of the base's run."""
    of_base = {"seq_len": config.data.seq_len, "pack": config.data.pack, "attention": config.data.attention}
    texts = [load_data(replace(run.data, **of_base), config.training.seed, tokenizer or None) for run in runs]
    return Texts(texts[0].tokenizer, tuple(texts))


class _Part(NamedTuple):
    """Elements of a rank's weights that belong to a router, or to none."""

    block: str | None
    own: Tensor
    weights: StageWeights
    place: slice
    of_base: Tensor
    of_models: tuple[Tensor, ...]
    counts: bool

    @property
    def gradient(self) -> Tensor:
        """Of the last step."""
        return self.weights.gradient[self.place]


class Mixed:
    """The stages of a rank, whose weights are mixed from those of a base and of models. Construction is collective.

    Args:
        config: resolved.
        world: all ranks.
        pipeline: of this rank.
        sources: the base, then the models.
        tokenizer: of all.
        blocks: with weights of their own.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        pipeline: Pipeline,
        sources: Sequence[Source],
        *,
        tokenizer: Tokenizer,
        blocks: Sequence[str],
    ) -> None:
        self._pipeline = pipeline
        self._segments = pipeline.data_parallel.segments()
        self._is_first_tensor = config.layout.coordinates(world.rank).tensor == 0
        reader = Checkpoints(config, world, pipeline, None, sources[0].checkpoint, tokenizer=tokenizer)
        read: list[list[Tensor]] = []
        for one in sources:
            read_weights(reader, one.checkpoint, config)
            read.append([own.clone() for _, _, own in self._own()])
        self._blocks = tuple(blocks)
        self._parts = list(self._cut(read))

    def _own(self) -> Iterator[tuple[Segment, int, Tensor]]:
        """What this rank updates, and the index of its first element in the flat buffer."""
        for segment in self._segments:
            for part in segment.weights.parts:
                yield segment, part.begin, part.parameter.detach().flatten()

    def _cut(self, read: Sequence[Sequence[Tensor]]) -> Iterator[_Part]:
        for number, ((weights, groups), begin, own) in enumerate(self._own()):
            base, *models = (one[number] for one in read)
            replicated = {place.name for place in weights.order.places if place.is_replicated}
            for found in weights.order.overlaps(begin, begin + own.numel()):
                place = slice(found.begin - begin, found.end - begin)
                in_gradient = slice(found.begin - weights.begin, found.end - weights.begin)
                # Over all ranks every element counts once.
                counts = groups.copies.index == 0 and (self._is_first_tensor or found.name not in replicated)
                of_models, block = tuple(model[place] for model in models), block_of(found.name, self._blocks)
                yield _Part(block, own[place], weights, in_gradient, base[place], of_models, counts)

    def mix(self, by_block: dict[str | None, list[float]]) -> None:
        """Compute with what blocks have of each model, and under ``None`` all other parameters."""
        with torch.no_grad():
            for part in self._parts:
                part.own.copy_(merged(part.of_base, part.of_models, by_block[part.block]))
        self._pipeline.data_parallel.refresh()

    def slopes(self) -> Tensor:
        """This rank's share of the derivatives of the last step's loss by what blocks have of models, ``[L, T]``."""
        places = {block: place for place, block in enumerate(self._blocks)}
        found = torch.zeros(len(places), len(self._parts[0].of_models), dtype=torch.float64)
        for part in self._parts:
            if part.counts and part.block is not None:
                gradient, base = part.gradient.double(), part.of_base.double()
                found[places[part.block]] += torch.stack(
                    [torch.dot(gradient, one.double() - base) for one in part.of_models]
                ).cpu()
        return found


def _train(
    config: RunConfig,
    world: World,
    texts: Texts,
    *,
    sources: Sequence[Source],
    first: str,
    steps: int,
    lr: float,
) -> str | None:
    """The work of a rank; on rank 0 the routers as text, since tensors of a process that has ended are lost."""
    pipeline = Pipeline(config, world)
    pipeline.updates.does = KeptGradients(pipeline.data_parallel)
    routers, number = parse_routers(first), len(sources) - 1
    mixed = Mixed(config, world, pipeline, sources, tokenizer=texts.tokenizer, blocks=routers.blocks)
    gates = [gate.requires_grad_() for gate in routers.gates]
    adam = torch.optim.Adam(gates, lr=lr)
    for step, preference in enumerate(_preferences(steps, number, config.training.seed)):
        set_rate(adam, lr * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2))
        mixed.mix(routers.by_block(preference))
        slopes, loss = torch.zeros(len(routers.blocks), number, dtype=torch.float64), 0.0
        for weight, text in zip(preference, texts.texts, strict=True):
            result = pipeline.train_step(pipeline.batch(text.train.batch(step, config.layout.batch_size)))
            slopes += weight * mixed.slopes()
            loss += weight * pipeline.counted_loss(result)
        *summed, total = world.sum([*slopes.flatten().tolist(), loss])
        if not all(map(math.isfinite, (*summed, total))):
            raise RunError(f"the loss of step {step + 1} of the routers is {total}; try a lower --router-lr")
        adam.zero_grad()
        # Every rank has all routers, and makes the same step.
        routers.weights(preference).backward(torch.tensor(summed, dtype=torch.float64).view(slopes.shape))
        adam.step()
    pipeline.close()
    return routers.text() if world.rank == 0 else None


def _preferences(steps: int, models: int, seed: int) -> Iterator[list[float]]:
    """Preferences that are uniform over all (a Dirichlet distribution of ones); equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        # Gaps of exponential variables have this distribution, divided by their sum.
        drawn = torch.empty(models, dtype=torch.float64).exponential_(generator=generator)
        yield (drawn / drawn.sum()).tolist()
