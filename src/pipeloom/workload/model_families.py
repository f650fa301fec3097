"""Model families by name: the properties of their layers that predictions, checks and files use; without torch.

A model is an embedding, layers and a head. Layers are equal, except that some may have a window and rotary positions of
their own. Families differ in feed-forward block, norms, positions, biases, soft caps and windows; a family that differs
in more has its own layer class.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeloom.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Properties of a family's layers.

    Attributes:
        summary: one line for help texts.
        gates: matrices from the residual stream into the feed-forward block; there is one back.
        inner_kept: numbers that a layer keeps for its backward, for each inner element of the block.
        inner_moved: numbers that element-wise kernels of its forward read and write, for each inner element.
        is_rotary: whether positions are rotary; otherwise the embedding adds a learned vector.
        qkv_biases: whether the matrices of queries, keys and values have biases.
        output_bias: whether the matrix behind attention has a bias.
        mlp_biases: whether the matrices of the feed-forward block have biases.
        qk_norm: RMSNorm of queries and keys before the rotary positions: none, of each head, or of all heads together.
        norms_precede: whether a layer norms what attention and the feed-forward block read.
        norms_follow: whether it norms what they add to the residual stream.
        norms_have_biases: whether norms have, as LayerNorm; RMSNorm has none.
        zero_centered_norms: whether RMSNorm multiplies by 1 + weight.
        gate: activation of gated feed-forward blocks; "gelu" is its tanh form.
        scales_embedding: whether embeddings are multiplied by the root of the hidden size.
        attn_softcap, logit_softcap: default bounds of attention scores and of logits; 0 for none.
        full_every: where layers have windows, every layer of this number has none; 0 if all have one.
        rope_theta: default base of rotary positions.
        rope_local_theta: default base of layers with a window, which the rope scaling leaves alone; ``None`` if they
            have the positions of the others.
        default_ffn: hidden size -> default inner width.
        layer: imports torch and returns a subclass of ``pipeloom.model.transformer.Layer``; ``None`` for that class.
            The subclass must have the sizes above.
    """

    summary: str
    gates: int
    inner_kept: float
    inner_moved: float
    is_rotary: bool
    qkv_biases: bool
    output_bias: bool
    mlp_biases: bool
    norms_have_biases: bool
    default_ffn: Callable[[int], int]
    qk_norm: Literal["none", "head", "width"] = "none"
    norms_precede: bool = True
    norms_follow: bool = False
    zero_centered_norms: bool = False
    gate: Literal["silu", "gelu"] = "silu"
    scales_embedding: bool = False
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    full_every: int = 0
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None
    layer: Callable[[], Any] | None = None

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm, each as wide as the residual stream."""
        return 2 if self.norms_have_biases else 1

    @property
    def layer_norms(self) -> int:
        """Norms of the residual stream in a layer, before and behind its two blocks."""
        return 2 * (self.norms_precede + self.norms_follow)

    def full_layers(self, layers: int) -> tuple[int, ...]:
        """By default, the layers without a window, from 0."""
        return tuple(range(self.full_every - 1, layers, self.full_every)) if self.full_every else ()


MODELS: Registry[ModelFamily] = Registry("model family", "pipeloom.models", ModelFamily)
"""Every family of models by name."""
MODELS.add(
    "llama",
    ModelFamily(
        summary="RMSNorm, rotary positions, SwiGLU, grouped-query attention",
        gates=2,
        inner_kept=3,  # gate, up and product
        inner_moved=5,  # the activation reads one and writes one, the product reads two and writes one
        is_rotary=True,
        qkv_biases=False,
        output_bias=False,
        mlp_biases=False,
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
        gates=1,
        inner_kept=2,  # GELU's input and output
        inner_moved=2,
        is_rotary=False,
        qkv_biases=True,
        output_bias=True,
        mlp_biases=True,
        norms_have_biases=True,
        default_ffn=lambda hidden: 4 * hidden,
    ),
)
_LLAMA = MODELS["llama"]
MODELS.add("qwen2", replace(_LLAMA, summary="llama with biases of queries, keys and values", qkv_biases=True))
MODELS.add("qwen3", replace(_LLAMA, summary="llama with an RMSNorm of each head of queries and keys", qk_norm="head"))
MODELS.add(
    "olmo2",
    replace(
        _LLAMA,
        summary="llama with norms behind attention and SwiGLU, and RMSNorms of all queries and all keys",
        qk_norm="width",
        norms_precede=False,
        norms_follow=True,
    ),
)
_GEMMA = replace(
    _LLAMA,
    norms_follow=True,
    zero_centered_norms=True,
    gate="gelu",
    scales_embedding=True,
)
MODELS.add(
    "gemma2",
    replace(
        _GEMMA,
        summary="GELU gates, four norms, scaled embeddings, soft caps, windows in every second layer",
        attn_softcap=50.0,
        logit_softcap=30.0,
        full_every=2,
    ),
)
MODELS.add(
    "gemma3",
    replace(
        _GEMMA,
        summary="gemma2 with norms of queries and keys instead of soft caps, windows in five of six layers",
        qk_norm="head",
        full_every=6,
        rope_theta=1e6,
        rope_local_theta=10000.0,
    ),
)
