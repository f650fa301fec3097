"""The model that is trained: as a run file sets it, and its sizes as costs and memory are counted with them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pipeloom.workload.limits import Common, Count, Limits, Names, Positive
from pipeloom.workload.model_families import MODELS, ModelFamily, family_of

MOST_LAYERS = 100_000
"""Most layers of a model: every command makes lists with an element for each."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. The catalog or a file may give its sizes, norm_eps and rope_theta."""

    preset: Common[Annotated[str, Names("models")] | None] = None
    """Model of the catalog, which gives all sizes. None: the sizes below."""
    file: Common[Path | None] = None
    """Model file: .toml or a Hugging Face config.json. That may be of llama, mistral or gpt2. The file gives all sizes.
    None: the sizes below."""
    family: Annotated[str, Names("model families")] = "llama"
    """Architecture. llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention. gpt2: LayerNorm, learned
    positions, GELU. docs/extending.md describes how to add one."""
    num_layers: Common[Annotated[int, Limits(least=1, most=MOST_LAYERS)]] = 8
    """Transformer layers."""
    hidden_size: Common[Count] = 192
    """Hidden size."""
    num_heads: Count = 6
    """Attention heads, a divisor of hidden_size."""
    num_kv_heads: Count | None = None
    """Key and value heads of grouped-query attention. Each is shared by num_heads / num_kv_heads query heads. None:
    num_heads."""
    ffn_size: Count | None = None
    """Feed-forward hidden size. None: 4 x hidden_size for gpt2; for llama 8/3 of it, rounded up to a multiple of 32."""
    vocab_size: Annotated[int, Limits(least=2)] | None = None
    """Vocabulary size. None: that of the tokenizer."""
    norm_eps: Positive | None = None
    """Epsilon of norms. None: 1e-5; no default for a model from preset or file."""
    rope_theta: Positive | None = None
    """Base of the rotary position frequencies; llama only. None: 10000; no default for a model from preset or file."""
    tied: bool = False
    """Embedding and head share one matrix."""

    @property
    def known_norm_eps(self) -> float:
        """With its default."""
        return 1e-5 if self.norm_eps is None else self.norm_eps

    @property
    def known_rope_theta(self) -> float:
        """With its default."""
        return 10000.0 if self.rope_theta is None else self.rope_theta

    def resolve(self, vocab_size: int) -> "ModelConfig":
        """The same model with every derived size filled in.

        Args:
            vocab_size: tokens of the tokenizer.
        """
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            ffn_size=self.ffn_size or MODELS[self.family].default_ffn(self.hidden_size),
            vocab_size=self.vocab_size or vocab_size,
            norm_eps=self.known_norm_eps,
            rope_theta=self.known_rope_theta,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer language model.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        heads: attention heads; their total width is ``hidden``.
        kv_heads: key and value heads; fewer than ``heads`` is grouped-query attention.
        ffn: inner width of the feed-forward block.
        mlp: the feed-forward block of its family (``ModelFamily.mlp``).
        vocab: rows of the embedding; 0 for layers alone, without embedding and head.
        tied: whether the embedding and the head are one matrix.
        name: for messages.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    mlp: str
    vocab: int
    tied: bool
    name: str = ""

    @property
    def family(self) -> ModelFamily:
        """What its layers are."""
        return MODELS[family_of(self.mlp)]

    @property
    def kv_width(self) -> int:
        """Total width of the keys; the values have the same."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices: four of attention, those into the feed-forward block and one back."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (self.family.gates + 1) * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; of the head as well, where it has its own."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters without norms and biases, which are below 0.1 %."""
        return self.layers * self.layer_matrix_parameters + (1 if self.tied else 2) * self.embedding_parameters


def shape_of(model: ModelConfig) -> ModelShape:
    """The cost model's view of a model as it is trained.

    Args:
        model: resolved.
    """
    assert model.num_kv_heads is not None
    assert model.ffn_size is not None
    assert model.vocab_size is not None
    return ModelShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_size,
        mlp=MODELS[model.family].mlp,
        vocab=model.vocab_size,
        tied=model.tied,
        name=model.preset or (str(model.file) if model.file else model.family),
    )


def model_of(shape: ModelShape, model: ModelConfig) -> ModelConfig:
    """A model's settings with the sizes of a shape; the inverse of ``shape_of``."""
    return replace(
        model,
        family=family_of(shape.mlp),
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
        vocab_size=shape.vocab,
        tied=shape.tied,
    )


def head_problems(
    hidden: int, heads: int, kv_heads: int | None, *, is_rotary: bool, names: tuple[str, str, str]
) -> list[str]:
    """What is wrong with the heads, one sentence each.

    Args:
        hidden: width of the residual stream.
        heads: query heads; below 1 nothing is found, as that is a problem of its own.
        kv_heads: key and value heads; ``None`` for as many as query heads.
        is_rotary: whether heads are turned by pairs of dims.
        names: of the three, in messages.
    """
    width, query, key_value = names
    if heads < 1:
        return []
    problems: list[str] = []
    if hidden % heads:
        problems.append(f"{query} must divide {width}, found {heads} and {hidden}")
    elif is_rotary and (hidden // heads) % 2:
        problems.append(f"rotary positions need an even {width} / {query}, found {hidden} / {heads}")
    if kv_heads is not None and kv_heads > 0 and heads % kv_heads:
        problems.append(f"{key_value} must divide {query}, found {kv_heads} and {heads}")
    return problems
