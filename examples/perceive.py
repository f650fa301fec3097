"""A frozen language model that answers a question about images, over two pipeline ranks: eP-ALM (arXiv 2303.11403).

An image is one vector of features, as an image encoder returns it. One linear layer maps it to the width of the model;
the result, and a trained soft token, take two places of the sequence that no token sees before a certain stage. Only
these two are trained: the model keeps every bit, and the stages before that one run no backward.

    python examples/perceive.py        # trains a small model, then the projection, and prints accuracies

It shows how to bring inputs for each micro-batch to a stage in the middle: a ``SideInputs`` goes to ``Executor.run`` on
every rank, and the module of a stage gets the inputs of its micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, rms_norm

from pipeloom import Schedule, export_weights, load_run, lower, make_schedule, passes, train
from pipeloom.config import ModelConfig
from pipeloom.config.file import read_run_file
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.stage import Portion, Stage, StepDocuments
from pipeloom.model import Documents, Transformer, stage_pieces
from pipeloom.runs.run_folder import CONFIG, WEIGHTS

ATTRIBUTES = {"color": "rgby", "shape": "cstd", "place": "nwlm"}
"""Of an image; each value is one letter."""
QUESTION = "?color="
SOFT, IMAGE, SLOTS = 0, 1, 2
"""Places of the sequence: of the soft token, of the image, and their number."""
SEQ = SLOTS + len(QUESTION)
FEATURES = 32
RANKS, LOOPS, MICROBATCHES, MICROBATCH = 2, 2, 4, 8
PARTITION = (2, 2, 2, 2)
"""Pieces of each stage: embedding and a layer, two layers, two layers, a layer and the head."""
ENTRY = 1
"""The stage at which images enter."""
MODEL: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 64,
    "num_heads": 4,
    # The layer below ``ENTRY`` sees one token, so that each letter is still at its place where images enter.
    "window": 1,
    "full_attention_layers": [1, 2, 3, 4, 5],
}
MODEL_STEPS, STEPS = 1000, 1500
"""Of the language model, and of the projection."""


class Images(NamedTuple):
    """Images of a step.

    Attributes:
        features: ``[images, FEATURES]``.
        answers: the byte of each one's color.
    """

    features: Tensor
    answers: Tensor


class Encoder:
    """Features of images: a fixed random network of their attributes, and noise, in place of a trained encoder."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (sum(map(len, ATTRIBUTES.values())), 64, FEATURES)
        self._matrices = [
            torch.randn(rows, columns, generator=generator) / rows**0.5 for rows, columns in pairwise(sizes)
        ]

    def images(self, number: int, seed: int) -> Images:
        """Random images, equal for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randint(len(values), (number,), generator=generator) for values in ATTRIBUTES.values()]
        shown = torch.cat(
            [one_hot(one, len(values)) for one, values in zip(drawn, ATTRIBUTES.values(), strict=True)], 1
        )
        features = shown.float()
        for matrix in self._matrices:
            features = (2 * features @ matrix).tanh()
        noise = 0.1 * torch.randn(features.shape, generator=generator)
        letters = torch.tensor([ord(letter) for letter in ATTRIBUTES["color"]])
        return Images(features + noise, letters[drawn[0]])


class Seen(Documents):
    """What a micro-batch's tokens see before images enter, and its images; see ``Documents``."""

    def __init__(self, features: Tensor) -> None:
        # Each slot is a document of its own, and so is the text: tokens see neither slot.
        firsts = torch.arange(SEQ).clamp(max=SLOTS)
        super().__init__(firsts.expand(len(features), SEQ))
        self.features = features


class SideInputs(StepDocuments):
    """The images of a step by micro-batch, for the stages of every rank."""

    def __init__(self, features: Sequence[Tensor]) -> None:
        super().__init__([])
        self._seen = [Seen(one) for one in features]

    def of(self, part: Portion) -> Seen:
        """Those of a micro-batch."""
        return self._seen[part.microbatch]


class Perceiver(nn.Module):
    """A frozen stage; at ``ENTRY`` with the trained projection and soft token.

    Args:
        stage: of the language model.
        index: of the stage.
    """

    def __init__(self, stage: Transformer, index: int) -> None:
        super().__init__()
        self.stage = stage.requires_grad_(requires_grad=False)
        self.sees_images = index >= ENTRY
        self.projection, self.soft = None, None
        if index == ENTRY:
            width = stage.config.hidden_size
            generator = torch.Generator().manual_seed(0)
            self.projection = nn.Linear(FEATURES, width)
            self.projection.weight.data.normal_(0.0, 0.05, generator=generator)
            self.projection.bias.data.zero_()
            self.soft = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        """Tokens or the residual stream, to the residual stream or logits."""
        assert isinstance(documents, Seen)
        if self.projection is not None:
            assert self.soft is not None
            text = x[:, SLOTS:]
            image = self.projection(documents.features)
            # As large as the tokens beside it: where it grows, the norms of layers above make its gradient small.
            image = rms_norm(image, image.shape[-1:]) * text.square().mean().sqrt()
            x = torch.cat([torch.stack([self.soft.expand(len(x), -1), image], 1), text], 1)
        return self.stage(x, documents=None if self.sees_images else documents)


@dataclass(frozen=True)
class Task:
    """What ranks train.

    Attributes:
        model: of the language model, resolved.
        weights: of the language model by name.
        steps: to train; 0 to compare gradients only.
        lr: of AdamW; falls to zero.
        seed: of the images.
        dtype: of everything.
    """

    model: ModelConfig
    weights: dict[str, Tensor]
    steps: int
    lr: float = 1e-2
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def stage(self, index: int) -> Perceiver:
        """A stage with its weights."""
        part = Transformer(self.model, SEQ, stage_pieces(PARTITION)[index])
        part.load_state_dict({name: self.weights[name] for name, _ in part.named_parameters()})
        return Perceiver(part, index).to(self.dtype)

    def batch(self, step: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Tokens, features and answers of each micro-batch."""
        found = Encoder(0).images(MICROBATCHES * MICROBATCH, 1_000_003 * self.seed + step)
        features, answers = (list(one.chunk(MICROBATCHES)) for one in found)
        return [tokens_of(MICROBATCH)] * MICROBATCHES, [one.to(self.dtype) for one in features], answers


def tokens_of(number: int) -> Tensor:
    """The question, behind two places for what is no token."""
    return torch.tensor([[0] * SLOTS + list(QUESTION.encode())]).repeat(number, 1)


def loss_of(logits: Tensor, microbatch: int, *, answers: Sequence[Tensor]) -> Tensor:
    """A micro-batch's share of the loss of the answers."""
    return cross_entropy(logits[:, -1], answers[microbatch], reduction="sum") / (MICROBATCHES * MICROBATCH)


def schedule_of() -> Schedule:
    """Breadth-first, without backwards before images enter."""
    compute = make_schedule("breadth-first", pp=RANKS, loops=LOOPS, num_microbatches=MICROBATCHES)
    return lower(passes.freeze(compute, ENTRY))


def train_rank(task: Task, rendezvous: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """Train on one rank; returns what it trained, the losses, and stages that ran a backward, as plain lists."""
    world = join_forked(rendezvous, rank, num_ranks, "cpu", 60)
    schedule = schedule_of()
    between = TensorSpec((MICROBATCH, SEQ, task.model.hidden_size), task.dtype)
    logits = TensorSpec((MICROBATCH, SEQ, task.model.vocab_size or 0), task.dtype)
    outputs = (*[between] * (schedule.num_stages - 1), logits)
    own = {index: task.stage(index) for index in schedule.placement.stages_of(rank)}
    stages = {
        index: Stage(module, index, outputs[index], needs_input_gradient=index > ENTRY) for index, module in own.items()
    }
    transport = Transport(rank, edges_of(schedule, outputs), world.device, timedelta(seconds=60))
    executor = Executor(schedule, rank, [Compute(stages), Messages(outputs)], transport=transport, clock=Clock())
    trained = {name: one for module in own.values() for name, one in module.named_parameters() if one.requires_grad}
    adamw = torch.optim.AdamW(trained.values(), lr=task.lr, weight_decay=0.0) if trained else None
    losses, result = list[float](), None
    for step in range(max(1, task.steps)):
        tokens, features, answers = task.batch(step)
        result = executor.run(
            tokens if 0 in own else [],
            partial(loss_of, answers=answers) if schedule.num_stages - 1 in own else None,
            documents=SideInputs(features),
        )
        losses.append(float(sum(result.outputs.values())))
        if adamw is not None and task.steps:
            adamw.param_groups[0]["lr"] = task.lr * (1 - step / task.steps)
            adamw.step()
            adamw.zero_grad()
    assert result is not None
    backwards = {span.action.stage for span in result.trace.spans if span.action.kind.value == "B"}
    frozen = all(
        torch.equal(one, task.weights[name].to(task.dtype))
        for module in own.values()
        for name, one in module.stage.named_parameters()
    )
    transport.close()
    world.leave()
    return {
        "trained": {name: one.detach().tolist() for name, one in trained.items()},
        "gradients": {name: one.grad.tolist() for name, one in trained.items() if one.grad is not None},
        "losses": losses,
        "backwards": sorted(backwards),
        "frozen": frozen,
    }


def train_projection(task: Task) -> list[dict[str, Any]]:
    """What each rank returns."""
    return run_workers(partial(train_rank, task), RANKS)


def accuracy(task: Task, trained: dict[str, Any], *, number: int = 1000, withheld: bool = False) -> float:
    """Share of new images whose color is the most probable next byte; in one process.

    Args:
        task: has the model.
        trained: projection and soft token.
        number: of images.
        withheld: whether the features are zeros.
    """
    stages = [task.stage(index) for index in range(len(PARTITION))]
    stages[ENTRY].load_state_dict({name: torch.tensor(one) for name, one in trained.items()}, strict=False)
    images = Encoder(0).images(number, 2_000_000_011 + task.seed)
    seen = Seen(images.features.to(task.dtype) * (0.0 if withheld else 1.0))
    x = tokens_of(number)
    with torch.no_grad():
        for stage in stages:
            x = stage(x, documents=seen)
    return float((x[:, -1].argmax(-1) == images.answers).float().mean())


def write_text(file: Path, seed: int, lines: int = 40_000) -> None:
    """Lines with the attributes of an image as letters, in any order, and a question about one with its answer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    found: list[str] = []
    for _ in range(lines):
        values = {name: letters[draw(len(letters))] for name, letters in ATTRIBUTES.items()}
        order = torch.randperm(len(values), generator=generator).tolist()
        letters = list(values.values())
        name = list(values)[draw(len(values))]
        found.append(f"{''.join(letters[place] for place in order)}?{name}={values[name]}\n")
    file.write_text("".join(found))


def train_language_model(folder: Path, seed: int, steps: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Train the model that is frozen afterwards, over the same stages; its configuration and weights."""
    from safetensors.torch import load_file

    write_text(folder / "text.txt", seed)
    run = train(
        load_run(
            model=MODEL,
            data={"path": str(folder / "text.txt"), "seq_len": 64, "cache": str(folder / "cache")},
            layout={"pp": RANKS, "loops": LOOPS, "num_microbatches": MICROBATCHES, "microbatch_size": 4},
            optimizer={"lr": 5e-3, "lr_warmup_steps": 50},
            training={"steps": steps, "seed": seed, "sample_tokens": 0, "predict": False, "validation_batches": 4},
            output={"folder": str(folder / "run")},
            checkpoint={"final": "checkpoint"},
        ),
        quiet=True,
    )
    export_weights(run.folder, folder / "weights")
    config, _ = read_run_file(run.folder / CONFIG)
    return config.model, load_file(folder / "weights" / WEIGHTS)


def perceive(seed: int, *, model_steps: int, steps: int) -> dict[str, Any]:
    """Train both; figures: accuracies, the share that is trained, stages with backwards, whether frozen bits stayed."""
    with TemporaryDirectory() as folder:
        model, weights = train_language_model(Path(folder), seed, model_steps)
    task = Task(model, weights, steps, seed=seed)
    ranks = train_projection(task)
    trained = {name: one for rank in ranks for name, one in rank["trained"].items()}
    number = sum(torch.tensor(one).numel() for one in trained.values())
    return {
        "seed": seed,
        "trained": number,
        "share": number / (number + sum(one.numel() for one in weights.values())),
        "untrained": accuracy(task, {}),
        "accuracy": accuracy(task, trained),
        "withheld": accuracy(task, trained, withheld=True),
        "frozen": all(rank["frozen"] for rank in ranks),
        "backwards": sorted({stage for rank in ranks for stage in rank["backwards"]}),
    }


if __name__ == "__main__":
    for name, value in perceive(0, model_steps=MODEL_STEPS, steps=STEPS).items():
        print(f"{name:<10} {value}")
