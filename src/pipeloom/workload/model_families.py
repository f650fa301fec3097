"""Model families by name: the properties of their layers that predictions, checks and files use; without torch.

A model is an embedding, equal layers and a head. Families differ in feed-forward block, norms, positions and biases; a
family that differs in more has its own layer class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeloom.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Properties of a family's layers.

    Attributes:
        summary: one line for help texts.
        mlp: name of its feed-forward block in data files, unique among families.
        gates: matrices from the residual stream into the feed-forward block; there is one back.
        inner_kept: numbers that a layer keeps for its backward, for each inner element of the block.
        inner_moved: numbers that element-wise kernels of its forward read and write, for each inner element.
        is_rotary: whether positions are rotary; otherwise the embedding adds a learned vector.
        has_biases: whether matrices have biases.
        norms_have_biases: whether norms have, as LayerNorm; RMSNorm has none.
        default_ffn: hidden size -> default inner width.
        layer: imports torch and returns a subclass of ``pipeloom.model.transformer.Layer``; ``None`` for that class.
            The subclass must have the sizes above.
    """

    summary: str
    mlp: str
    gates: int
    inner_kept: float
    inner_moved: float
    is_rotary: bool
    has_biases: bool
    norms_have_biases: bool
    default_ffn: Callable[[int], int]
    layer: Callable[[], Any] | None = None

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm, each as wide as the residual stream."""
        return 2 if self.norms_have_biases else 1


MODELS: Registry[ModelFamily] = Registry("model family", "pipeloom.models", ModelFamily)
"""Every family of models by name."""
MODELS.add(
    "llama",
    ModelFamily(
        summary="RMSNorm, rotary positions, SwiGLU, grouped-query attention",
        mlp="swiglu",
        gates=2,
        inner_kept=4,  # gate, up, activated gate and product
        inner_moved=5,  # the activation reads one and writes one, the product reads two and writes one
        is_rotary=True,
        has_biases=False,
        norms_have_biases=False,
        # SwiGLU has three matrices where GELU has two: 8/3 H gives as many parameters as 4 H (arXiv 2002.05202).
        # Multiples of 32 keep the sizes of matrix products even.
        default_ffn=lambda hidden: -(-8 * hidden // (3 * 32)) * 32,
    ),
)
MODELS.add(
    "gpt2",
    ModelFamily(
        summary="LayerNorm, learned positions, GELU",
        mlp="gelu",
        gates=1,
        inner_kept=2,  # GELU's input and output
        inner_moved=2,
        is_rotary=False,
        has_biases=True,
        norms_have_biases=True,
        default_ffn=lambda hidden: 4 * hidden,
    ),
)


def mlp_names() -> tuple[str, ...]:
    """Names of feed-forward blocks in data files."""
    return tuple(sorted(family.mlp for family in MODELS.values()))


@cache  # searches price many thousands of layouts of one model
def family_of(mlp: str) -> str:
    """The family with a feed-forward block, one of ``mlp_names``."""
    return next(name for name, family in MODELS.items() if family.mlp == mlp)
