"""The model that is trained: as a run file sets it, and its sizes as costs and memory are counted with them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeloom.errors import UserError
from pipeloom.workload.limits import Common, Count, Limits, Names, Positive
from pipeloom.workload.model_families import MODELS, ModelFamily

NO_FORMULAS = (
    "predictions have no formulas for models that classes of transformers compute; train, evaluate, verify and export "
    "take them"
)
MOST_LAYERS = 100_000
"""Most layers of a model: every command makes lists with an element for each."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary positions for longer sequences than a model was first trained on; formulas in ``pipeloom.model.rotary``.

    Attributes:
        kind: "linear" divides all frequencies by the factor; "llama3" and "yarn" those of pairs of dims that turn
            rarely within the original length.
        factor: how much longer sequences are.
        original_len: tokens of the first trained sequences.
        slow_turns, fast_turns: turns of a pair within the original length, up to which its frequency is divided, and
            from which it is unchanged.
        attention_factor: of cosines and sines, so that products of queries and keys have its square.
    """

    kind: str
    factor: float
    original_len: int
    slow_turns: float
    fast_turns: float
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. The catalog or a file may give its sizes, norm_eps and rotary positions."""

    preset: Common[Annotated[str, Names("models")] | None] = None
    """Model of the catalog, which gives all sizes. None: the sizes below."""
    file: Common[Path | None] = None
    """Model file: .toml or a Hugging Face config.json. That may be of llama, mistral, qwen2, qwen3, olmo2, gemma2,
    gemma3_text or gpt2. The file gives all sizes. None: the sizes below."""
    family: Annotated[str, Names("model families")] = "llama"
    """Architecture. llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention. qwen2, qwen3: llama with biases
    or norms of queries and keys. olmo2: llama with such norms, and norms behind the blocks. gemma2: GELU gates, norms
    before and behind the blocks, scaled embeddings, soft caps. gemma3: norms of queries and keys instead of soft caps,
    rotary positions of its own for layers with a window. gpt2: LayerNorm, learned positions, GELU.
    docs/extending.md: how to add one."""
    num_layers: Common[Annotated[int, Limits(least=1, most=MOST_LAYERS)]] = 8
    """Transformer layers."""
    hidden_size: Common[Count] = 192
    """Hidden size."""
    num_heads: Count = 6
    """Attention heads; without head_size a divisor of hidden_size."""
    head_size: Count | None = None
    """Width of one head; even with rotary positions. None: hidden_size / num_heads."""
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
    """Base of the rotary position frequencies; not for gpt2. None: 10000, for gemma3 1e6; no default for a model from
    preset or file."""
    rope_local_theta: Positive | None = None
    """Base of the rotary position frequencies of layers with a window, without rope_scaling; gemma3 only. None:
    10000."""
    rope_scaling: Literal["linear", "llama3", "yarn"] | None = None
    """Rotary positions for sequences rope_factor times as long as those of the first training. linear divides all
    frequencies. llama3 and yarn divide those of pairs of dims that turn rarely within rope_original_len."""
    rope_factor: Annotated[float, Limits(least=1)] | None = None
    """How much longer sequences are than rope_original_len; needed with rope_scaling."""
    rope_original_len: Count | None = None
    """Tokens of sequences in the first training; needed for rope_scaling llama3 and yarn."""
    rope_slow_turns: Positive | None = None
    """Turns of a pair within rope_original_len up to which its frequency is divided. None: 1."""
    rope_fast_turns: Positive | None = None
    """Turns of a pair within rope_original_len from which its frequency is unchanged. None: 4 for llama3, 32 for
    yarn."""
    rope_attention_factor: Positive | None = None
    """Factor of cosines and sines; yarn only. None: 0.1 ln(rope_factor) + 1."""
    window: Count | None = None
    """Tokens that a query of a layer with a sliding window sees, its own included. None: all earlier ones, in every
    layer."""
    full_attention_layers: tuple[int, ...] | None = None
    """Layers without a window, by number from 0; needs window. None: every second layer of gemma2, every sixth of
    gemma3, none of others."""
    query_pre_attn_scalar: Positive | None = None
    """Attention scores are divided by its root. None: head_size."""
    attn_softcap: Annotated[float, Limits(least=0)] | None = None
    """Bound c of attention scores, as c tanh(score / c); 0 for none. None: 50 for gemma2, 0 for others."""
    logit_softcap: Annotated[float, Limits(least=0)] | None = None
    """Bound of the logits, by the same formula; 0 for none. None: 30 for gemma2, 0 for others."""
    tied: bool = False
    """Embedding and head share one matrix."""
    adapted: str | None = None
    """The config.json of a model without a family here, as model.file has it. The classes of transformers then compute
    the model, and of the settings above num_layers, hidden_size, vocab_size and tied alone have an effect; needs
    pipeloom[hf]. None: the model is of a family."""

    @property
    def known_head_size(self) -> int:
        """With its default."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def known_norm_eps(self) -> float:
        """With its default."""
        return 1e-5 if self.norm_eps is None else self.norm_eps

    @property
    def known_rope_theta(self) -> float:
        """With its default."""
        return MODELS[self.family].rope_theta if self.rope_theta is None else self.rope_theta

    @property
    def known_rope_local_theta(self) -> float | None:
        """With its default; ``None`` if layers with a window have the positions of the others."""
        return self.rope_local_theta or MODELS[self.family].rope_local_theta

    @property
    def known_full_attention_layers(self) -> tuple[int, ...]:
        """With its default."""
        own = self.full_attention_layers
        return MODELS[self.family].full_layers(self.num_layers) if own is None else own

    @property
    def attention_scale(self) -> float | None:
        """Factor of attention scores; ``None`` for one over the root of the head's size."""
        return None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    @property
    def known_attn_softcap(self) -> float:
        """With its default; 0 for none."""
        return MODELS[self.family].attn_softcap if self.attn_softcap is None else self.attn_softcap

    @property
    def known_logit_softcap(self) -> float:
        """With its default; 0 for none."""
        return MODELS[self.family].logit_softcap if self.logit_softcap is None else self.logit_softcap

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; ``None`` for one that sees all earlier tokens."""
        return None if layer in self.known_full_attention_layers else self.window

    @property
    def scaling(self) -> RopeScaling | None:
        """The scaling of rotary positions, with its defaults; ``None`` for none."""
        if self.rope_scaling is None:
            return None
        assert self.rope_factor is not None, "a configuration with problems"
        # YaRN's temperature (arXiv 2309.00071, section 3.3).
        usual = 0.1 * math.log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0
        return RopeScaling(
            kind=self.rope_scaling,
            factor=self.rope_factor,
            original_len=self.rope_original_len or 0,
            slow_turns=self.rope_slow_turns or 1.0,
            fast_turns=self.rope_fast_turns or (32.0 if self.rope_scaling == "yarn" else 4.0),
            attention_factor=self.rope_attention_factor or usual,
        )

    @property
    def _turns_and_factor(self) -> dict[str, float | None]:
        """The optional settings of scaled rotary positions; ``None`` for defaults."""
        own = {name: getattr(self, f"rope_{name}") for name in ("slow_turns", "fast_turns", "attention_factor")}
        usual = None if self.rope_factor is None else replace(self, **{f"rope_{name}": None for name in own}).scaling
        return {
            f"rope_{name}": None if usual is not None and value == getattr(usual, name) else value
            for name, value in own.items()
        }

    def resolve(self, vocab_size: int) -> "ModelConfig":
        """The same model with every derived size filled in.

        Args:
            vocab_size: tokens of the tokenizer.
        """
        if self.adapted is not None:
            return self
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_size=None if self.known_head_size * self.num_heads == self.hidden_size else self.head_size,
            ffn_size=self.ffn_size or MODELS[self.family].default_ffn(self.hidden_size),
            vocab_size=self.vocab_size or vocab_size,
            norm_eps=self.known_norm_eps,
            rope_theta=self.known_rope_theta,
        ).canonical

    @property
    def canonical(self) -> "ModelConfig":
        """The same model, without values of attention and positions that are defaults: equal models compare equal."""
        family, layers, window = MODELS[self.family], set(self.known_full_attention_layers), self.window
        if layers.issuperset(range(self.num_layers)):
            window = None
        is_usual = window is None or layers == set(family.full_layers(self.num_layers))
        has_base = window is not None and self.rope_local_theta != family.rope_local_theta
        is_plain = self.query_pre_attn_scalar == self.known_head_size
        return replace(
            self,
            **self._turns_and_factor,
            window=window,
            full_attention_layers=None if is_usual else tuple(sorted(layers)),
            rope_local_theta=self.rope_local_theta if has_base else None,
            query_pre_attn_scalar=None if is_plain else self.query_pre_attn_scalar,
            attn_softcap=None if self.attn_softcap == family.attn_softcap else self.attn_softcap,
            logit_softcap=None if self.logit_softcap == family.logit_softcap else self.logit_softcap,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer language model.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: key and value heads; fewer than ``heads`` is grouped-query attention.
        ffn: inner width of the feed-forward block.
        family: key of ``MODELS``.
        vocab: rows of the embedding; 0 for layers alone, without embedding and head.
        tied: whether the embedding and the head are one matrix.
        own_head_size: width of one head; ``None`` for ``hidden / heads``.
        name: for messages.
        window: keys that a query of a layer with a window sees; ``None`` if no layer has one.
        full_layers: layers without a window, from 0; empty without windows.
        attn_softcap, logit_softcap: bounds of attention scores and logits; 0 for none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    family: str
    vocab: int
    tied: bool
    own_head_size: int | None = None
    name: str = ""
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        """Remove a head size that is the default, so that equal shapes compare equal."""
        if self.own_head_size is not None and self.own_head_size * self.heads == self.hidden:
            object.__setattr__(self, "own_head_size", None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; ``None`` for one that sees all earlier tokens."""
        full = frozenset(self.full_layers)
        return tuple(None if layer in full else self.window for layer in range(self.layers))

    def has_fused_attention(self, window: int | None, num_keys: int) -> bool:
        """Whether a layer with a window computes plain attention with so many keys, for which there are fused kernels.

        Others have kernels that take soft caps, and windows that are narrower than the keys.
        """
        return not self.attn_softcap and (window is None or window >= num_keys)

    def with_window(self, window: int | None) -> "ModelShape":
        """The shape with this window in all layers, or with none."""
        is_same = window == self.window and not self.full_layers
        return self if is_same else replace(self, window=window, full_layers=())

    @property
    def kind(self) -> ModelFamily:
        """Properties of its layers."""
        return MODELS[self.family]

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.own_head_size or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Total width of the queries, and of attention's output before its projection."""
        return self.head_size * self.heads

    @property
    def kv_width(self) -> int:
        """Total width of the keys; the values have the same."""
        return self.head_size * self.kv_heads

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of one layer's norms of the heads of queries and keys."""
        return 2 * self.head_size if self.kind.qk_norm == "head" else 0

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices: four of attention, those into the feed-forward block and one back."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (self.kind.gates + 1) * self.hidden * self.ffn

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

    Raises:
        UserError: the layers are those of transformers, for which there are no formulas.
    """
    if model.adapted is not None:
        raise UserError(f"{model.file}: {NO_FORMULAS}")
    assert model.num_kv_heads is not None
    assert model.ffn_size is not None
    assert model.vocab_size is not None
    return ModelShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_size,
        family=model.family,
        vocab=model.vocab_size,
        tied=model.tied,
        own_head_size=model.head_size,
        name=model.preset or (str(model.file) if model.file else model.family),
        window=model.window,
        full_layers=() if model.window is None else model.known_full_attention_layers,
        attn_softcap=model.known_attn_softcap,
        logit_softcap=model.known_logit_softcap,
    )


def model_of(shape: ModelShape, model: ModelConfig) -> ModelConfig:
    """A model's settings with the sizes of a shape; the inverse of ``shape_of``."""
    return replace(
        model,
        family=shape.family,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        head_size=shape.own_head_size,
        num_kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
        vocab_size=shape.vocab,
        tied=shape.tied,
        window=shape.window,
        full_attention_layers=None if shape.window is None else shape.full_layers,
        attn_softcap=shape.attn_softcap,
        logit_softcap=shape.logit_softcap,
    ).canonical


def head_problems(
    sizes: tuple[int, int, int | None, int | None], *, is_rotary: bool, names: tuple[str, str, str, str]
) -> list[str]:
    """What is wrong with the heads, one sentence each.

    Args:
        sizes: width of the residual stream; query heads, where below 1 nothing is found, as that is a problem of its
            own; key and value heads, ``None`` for as many as query heads; width of one head, ``None`` for an equal
            share of the residual stream.
        is_rotary: whether heads are turned by pairs of dims.
        names: of the four, in messages; the last is empty where a head has no width of its own.
    """
    (hidden, heads, kv_heads, size), (width, query, key_value, own) = sizes, names
    if heads < 1:
        return []
    problems: list[str] = []
    if size is not None:
        if is_rotary and size % 2:
            problems.append(f"rotary positions need an even {own}, found {size}")
    elif hidden % heads:
        hint = f"; or set {own}" if own else ""
        problems.append(f"{query} must divide {width}, found {heads} and {hidden}{hint}")
    elif is_rotary and (hidden // heads) % 2:
        problems.append(f"rotary positions need an even {width} / {query}, found {hidden} / {heads}")
    if kv_heads is not None and kv_heads > 0 and heads % kv_heads:
        problems.append(f"{key_value} must divide {query}, found {kv_heads} and {heads}")
    return problems


def other_settings(model: ModelConfig, others: Mapping[str, Any], whose: str) -> list[str]:
    """Settings of a model that differ from others, a sentence each.

    Args:
        model: resolved.
        others: by name, as ``model_settings`` returns them.
        whose: precedes their value, such as ``the checkpoint has``.
    """
    own = model_settings(model)
    names = sorted(name for name in {*own, *others} if own.get(name) != others.get(name))
    return [f"model.{name} is {own.get(name)}, {whose} {others.get(name)}" for name in names]


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """The model's sizes, without the preset or file that they were read from."""
    return {name: value for name, value in asdict(model).items() if name not in ("preset", "file")}
