"""Weighted sums of models, and routers of a preference, which define how much of each a block has (PWEMoE,
2406.09770).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text

FILE = "routers.json"
"""Of a checkpoint that was merged by routers."""
_STD = 0.01
"""Standard deviation of initial weights, as in the authors' code."""
_GATES = ("first", "first_bias", "second", "second_bias")


Routed = Literal["feed-forward", "all"]
"""What has routers: the feed-forward block of each layer, or also its attention, the embedding and the head."""


def routed_blocks(routed: Routed, num_layers: int) -> tuple[str, ...]:
    """The blocks with a router, by how the names of their parameters begin.

    Examples:
        >>> routed_blocks("feed-forward", 2)
        ('layers.0.feed_forward.', 'layers.1.feed_forward.')
    """
    if routed == "feed-forward":
        return tuple(f"layers.{layer}.feed_forward." for layer in range(num_layers))
    # Without a point, so that their norms belong to them.
    of_layers = (f"layers.{layer}.{block}" for layer in range(num_layers) for block in ("attention", "feed_forward"))
    return ("embedding.", *of_layers, "head.")


def block_of(name: str, blocks: Sequence[str]) -> str | None:
    """The block that a parameter belongs to; ``None`` for one that has no router."""
    return next((block for block in blocks if name.startswith(block)), None)


def merged(base: Tensor, models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The base plus weighted differences from it, computed in float64, in the type of the base.

    Examples:
        >>> merged(torch.tensor([1.0]), [torch.tensor([3.0]), torch.tensor([0.0])], [0.5, 1.0])
        tensor([1.])
    """
    wide = base.double()
    total = wide.clone()
    for model, weight in zip(models, weights, strict=True):
        total += weight * (model.double() - wide)
    return total.to(base.dtype)


@dataclass(frozen=True, eq=False)
class Routers:
    """A router of the preference for each of some blocks: two linear layers with a ReLU between.

    A preference has a number for each of T models; they add up to 1. A router returns how much of each model's
    difference from the base its block has.

    Attributes:
        blocks: L of them, as ``routed_blocks`` returns them.
        outside: how much all other parameters have, whatever the preference; T numbers.
        gates: weights and biases: ``[L, 2 T, T]``, ``[L, 2 T]``, ``[L, T, 2 T]``, ``[L, T]``; float64.
        trained_for: digests of the base and of the models.
        interpolates: whether a block has the preference plus what the layers return, which counts less the more the
            preference is for one model; otherwise what the layers return.
    """

    blocks: tuple[str, ...]
    outside: tuple[float, ...]
    gates: tuple[Tensor, ...]
    trained_for: tuple[str, ...] = ()
    interpolates: bool = False

    @classmethod
    def first(cls, blocks: Sequence[str], outside: Sequence[float], seed: int, *, interpolates: bool) -> "Routers":
        """Untrained ones.

        Args:
            blocks: with a router.
            outside: weights of all other parameters.
            seed: of random numbers.
            interpolates: whether they begin with about the preference itself, and have exactly that for one model
                alone; or, as in the authors' code, with about ``outside`` for every preference.
        """
        models, count = len(outside), len(blocks)
        generator = torch.Generator().manual_seed(seed)
        shapes = (count, 2 * models, models), (count, models, 2 * models)
        first, second = (
            torch.empty(shape, dtype=torch.float64).normal_(0.0, _STD, generator=generator) for shape in shapes
        )
        biases = torch.zeros(count, 2 * models, dtype=torch.float64), torch.zeros(count, models, dtype=torch.float64)
        if interpolates:
            first /= _STD  # inner units of about 1, so that the outer layer learns from the first step
        else:
            biases[1].add_(torch.tensor(outside, dtype=torch.float64))
        return cls(tuple(blocks), tuple(outside), (first, biases[0], second, biases[1]), interpolates=interpolates)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(one.numel() for one in self.gates)

    def weights(self, preference: Sequence[float]) -> Tensor:
        """What each block has of each model, ``[L, T]``; with gradients if the gates require them."""
        first, first_bias, second, second_bias = self.gates
        given = torch.tensor(preference, dtype=torch.float64)
        inner = (first @ given + first_bias).relu()
        returned = (second @ inner.unsqueeze(-1)).squeeze(-1) + second_bias
        # Nobody prefers one model alone to get another one: there the factor is 0.
        return given + (1 - given.square().sum()) * returned if self.interpolates else returned

    def by_block(self, preference: Sequence[float]) -> dict[str | None, list[float]]:
        """The weights of each block, and under ``None`` those of all other parameters."""
        with torch.no_grad():
            found = self.weights(preference).tolist()
        return {None: list(self.outside), **dict(zip(self.blocks, found, strict=True))}

    def text(self) -> str:
        """As the text of a file."""
        gates = {name: gate.detach().tolist() for name, gate in zip(_GATES, self.gates, strict=True)}
        about = {"blocks": self.blocks, "outside": self.outside, "trained_for": self.trained_for}
        return json.dumps({**about, "interpolates": self.interpolates, **gates}, indent=1) + "\n"


def read_routers(file: Path) -> Routers:
    """Routers from their file.

    Raises:
        UserError: it cannot be read, or has something else.
    """
    text = read_text(file)
    try:
        return parse_routers(text)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise UserError(f"expected the routers of a merge, found something else in {file}") from None


def parse_routers(text: str) -> Routers:
    """Routers from ``Routers.text``; an exception of any kind for another text."""
    tree: Any = parse_json(text)
    blocks, outside, digests = (tuple(tree[name]) for name in ("blocks", "outside", "trained_for"))
    gates = tuple(torch.tensor(tree[name], dtype=torch.float64) for name in _GATES)
    found = Routers(blocks, tuple(map(float, outside)), gates, digests, interpolates=tree["interpolates"] is True)
    found.weights([0.0] * len(outside)).view(len(blocks), len(outside))
    return found
