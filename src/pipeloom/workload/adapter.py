"""Low-rank adapters of frozen matrices (LoRA, arXiv 2106.09685): which matrices have one, and its sizes.

The output of a matrix ``W`` with an adapter is ``x W^T + (alpha / rank) x A^T B^T``; ``A`` is [rank, inputs], ``B``
[outputs, rank]. ``W`` and all other weights keep their values. Names and meanings are those of PEFT.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeloom.workload.model import ModelShape
from pipeloom.workload.model_families import ModelFamily

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
PATHS: dict[Target, str] = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "o": "attention.output",
    "gate": "feed_forward.gate",
    "up": "feed_forward.up",
    "down": "feed_forward.down",
}
"""Matrix of a layer -> its module in the layer."""
OF_ATTENTION: tuple[Target, ...] = ("q", "k", "v", "o")
_ROW_PARALLEL = ("o", "down")
"""Matrices whose inputs tensor-parallel ranks divide; they divide the outputs of the others."""
PAIR = "adapter"
"""Name of the module of an adapter, below that of its matrix."""
FIRST, SECOND = f".{PAIR}.lora_A.weight", f".{PAIR}.lora_B.weight"
"""Endings of the names of its parameters."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters of a model; everything else is frozen.

    Attributes:
        rank: of the added matrices.
        alpha: the added outputs are multiplied by ``alpha / rank``.
        targets: matrices of a layer that have one.
        first_layer: the layers before it have none.
        draws_second: whether the initial values of ``B`` are random; zeros leave the model's function unchanged.
    """

    rank: int
    alpha: float
    targets: tuple[Target, ...]
    first_layer: int = 0
    draws_second: bool = False

    @property
    def scale(self) -> float:
        """Factor of the added outputs."""
        return self.alpha / self.rank

    def widths(self, shape: ModelShape) -> list[tuple[int, int, bool]]:
        """For each target its inputs and outputs, and whether tensor-parallel ranks divide the inputs."""
        hidden, queries, keys, inner = shape.hidden, shape.query_width, shape.kv_width, shape.ffn
        sizes = {
            "q": (hidden, queries),
            "k": (hidden, keys),
            "v": (hidden, keys),
            "o": (queries, hidden),
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }
        return [(*sizes[target], target in _ROW_PARALLEL) for target in self.targets]

    def layer_parameters(self, shape: ModelShape, shares: int) -> tuple[int, int]:
        """Parameters of one layer's adapters on a rank of those that share it: split ones, at most, and replicated."""
        split = replicated = 0
        for inputs, outputs, divides_inputs in self.widths(shape):
            whole, cut = (outputs, inputs) if divides_inputs else (inputs, outputs)
            split += self.rank * -(-cut // shares)
            replicated += self.rank * whole
        return split, replicated

    def reads(self, *targets: Target) -> bool:
        """Whether one of these matrices has an adapter."""
        return any(target in self.targets for target in targets)


def known_targets(family: ModelFamily) -> tuple[Target, ...]:
    """The matrices of a family's layers."""
    return tuple(target for target in PATHS if target != "gate" or family.gates > 1)


def is_pair(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((FIRST, SECOND))


def without_pairs(names: Iterable[str]) -> list[str]:
    """The names of parameters that belong to no adapter."""
    return [name for name in names if not is_pair(name)]
