"""The model that is trained: as a run file sets it, and its sizes as costs and memory are counted with them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeloom.errors import UserError
from pipeloom.workload.limits import Common, Count, Limits, Names, Positive
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.model_shape import Blocks, Experts, ModelShape
from pipeloom.workload.sharing import Sharing

NO_FORMULAS = (
    "predictions have no formulas for models that classes of transformers compute; train, evaluate, verify and export "
    "take them"
)
_NO_SIZES = ("preset", "file", "balance", "balance_weight", "balance_rate", "expert_capacity")
"""Settings of a model that are none of its sizes."""
OF_ADAPTED = frozenset(("preset", "file", "adapted", "num_layers", "hidden_size", "vocab_size", "tied"))
"""Settings with an effect on a model that classes of transformers compute."""
Balance = Literal["batch", "microbatch", "bias", "none"]
"""What keeps the loads of experts equal."""
BLOCK = 64
"""Default size of a block. Products of larger ones are faster; smaller ones divide more widths."""
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
    gemma3_text, gpt2, mixtral or qwen3_moe; for training, also of other types of transformers. The file gives all
    sizes. None: the sizes below."""
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
    share_layers: int | Literal["all"] | None = None
    """Layers share their weights (M6-10T's first phase). all: one set for all layers. A number: so many sets, each of
    as many consecutive layers; it divides num_layers. `pipeloom convert delink` gives each layer its own. None: each
    has its own."""
    experts: Annotated[int, Limits(least=2)] | None = None
    """Experts of a layer: feed-forward blocks, of which a router gives each token some. None: one block for all."""
    experts_per_token: Count | None = None
    """Experts that each token takes; their weights add up to 1. None: 2."""
    expert_every: Count | None = None
    """Every layer of this number has experts, and the others one feed-forward block. None: every layer."""
    expert_ffn: Count | None = None
    """Hidden size of an expert. None: ffn_size."""
    shared_experts: Count | None = None
    """Experts that every token takes as well, with weight 1: one block of their joint size. None: none."""
    expert_capacity: Positive | None = None
    """Most tokens of an expert in a training step's micro-batch on one rank, as a multiple of the mean number: those
    behind them in the micro-batch go without this expert. Evaluation and generation drop nothing. None: no token is
    dropped."""
    balance: Balance | None = None
    """What keeps the loads of experts equal. batch: a loss with the loads of the whole batch, for schedules in which
    all forwards of a stage precede its first backward. microbatch: a loss with those of each micro-batch. bias: a bias
    of each expert in the choice, not in the weights, which moves after every step. none: nothing. None: batch."""
    balance_weight: Annotated[float, Limits(least=0)] | None = None
    """Factor of the balance loss of each layer with experts. None: 0.01."""
    balance_rate: Positive | None = None
    """With balance bias: by how much the bias of an expert moves after a step. None: 0.001."""
    density: Annotated[float, Limits(above=0)] | None = None
    """Kept part of each matrix of attention and feed-forward blocks, below 1: the weight is its kept blocks, and all
    else of the matrix is zero. Each row of blocks keeps the same number of them. None: matrices are dense."""
    density_block: Count | None = None
    """Rows and columns of a block; divides the inputs and outputs of every matrix. None: 64."""
    density_seed: Annotated[int, Limits(least=0)] | None = None
    """From it and from the name of a matrix follows which of its blocks are kept. None: 0."""
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

    @property
    def sharing(self) -> Sharing | None:
        """Which layers share their weights; ``None`` if each has its own."""
        if self.share_layers is None:
            return None
        return Sharing(self.num_layers, 1 if self.share_layers == "all" else self.share_layers)

    @property
    def expert_layout(self) -> "Experts | None":
        """The experts of the model, with their defaults; ``None`` for none."""
        if self.experts is None:
            return None
        assert self.ffn_size is not None, "the model configuration is not resolved"
        return Experts(
            count=self.experts,
            per_token=self.experts_per_token or 2,
            ffn=self.expert_ffn or self.ffn_size,
            every=self.expert_every or 1,
            shared=self.shared_experts or 0,
            capacity=self.expert_capacity,
        )

    @property
    def usual_values(self) -> dict[str, Any]:
        """What unset settings of a model with all sizes stand for: name -> value, of those that have an effect."""
        if self.adapted is not None:
            return {}
        found: dict[str, Any] = {"head_size": self.known_head_size, "query_pre_attn_scalar": self.known_head_size}
        found |= {"attn_softcap": self.known_attn_softcap, "logit_softcap": self.known_logit_softcap}
        if self.window is not None:
            found["full_attention_layers"] = self.known_full_attention_layers
            found["rope_local_theta"] = self.known_rope_local_theta
        if (scaling := self.scaling) is not None:
            names = {"slow_turns", "fast_turns"} if scaling.kind != "linear" else set()
            names |= {"attention_factor"} if scaling.kind == "yarn" else set()
            found |= {f"rope_{name}": getattr(scaling, name) for name in names}
        if (experts := self.expert_layout) is not None:
            found |= {"experts_per_token": experts.per_token, "expert_every": experts.every, "expert_ffn": experts.ffn}
        return found

    @property
    def blocks(self) -> "Blocks | None":
        """The blocks of which matrices of layers consist, with their default size; ``None`` for dense matrices."""
        return None if self.density is None else Blocks(density=self.density, size=self.density_block or BLOCK)

    @property
    def dense(self) -> "ModelConfig":
        """The same model with dense matrices."""
        return replace(self, density=None, density_block=None, density_seed=None)

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a balance loss has the loads of experts in the whole batch, before the first backward of a stage."""
        return self.experts is not None and self.known_balance == "batch"

    @property
    def known_balance(self) -> Balance:
        """With its default."""
        return self.balance or "batch"

    @property
    def known_balance_weight(self) -> float:
        """With its default (arXiv 2101.03961, section 2.2)."""
        return 0.01 if self.balance_weight is None else self.balance_weight

    def has_window(self, seq: int) -> bool:
        """Whether a layer does not see all earlier tokens of sequences of so many tokens."""
        return self.window is not None and self.window < seq

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
        experts, ffn = self.expert_layout, self.ffn_size
        if experts is not None and ffn is not None:
            ffn = experts.block_width(ffn)
        return replace(
            self,
            **self._turns_and_factor,
            window=window,
            full_attention_layers=None if is_usual else tuple(sorted(layers)),
            rope_local_theta=self.rope_local_theta if has_base else None,
            query_pre_attn_scalar=None if is_plain else self.query_pre_attn_scalar,
            attn_softcap=None if self.attn_softcap == family.attn_softcap else self.attn_softcap,
            logit_softcap=None if self.logit_softcap == family.logit_softcap else self.logit_softcap,
            experts_per_token=None if self.experts_per_token == 2 else self.experts_per_token,
            expert_every=None if self.expert_every == 1 else self.expert_every,
            ffn_size=ffn,
            expert_ffn=None if self.expert_ffn == ffn else self.expert_ffn,
            density_block=None if self.density_block == BLOCK else self.density_block,
            density_seed=self.density_seed or None,
        )


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
        experts=model.expert_layout,
        sharing=model.sharing,
        blocks=model.blocks,
    )


def model_of(shape: ModelShape, model: ModelConfig) -> ModelConfig:
    """A model's settings with the sizes of a shape; the inverse of ``shape_of``.

    A shape of dense matrices leaves the model its density, and one without a capacity its own.
    """
    experts, share_layers, blocks = shape.experts, model.share_layers, shape.blocks or model.blocks
    if shape.sharing is not None:
        share_layers = "all" if shape.sharing.num_distinct == 1 else shape.sharing.num_distinct
    return replace(
        model,
        share_layers=share_layers,
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
        experts=None if experts is None else experts.count,
        experts_per_token=None if experts is None else experts.per_token,
        expert_every=None if experts is None else experts.every,
        expert_ffn=None if experts is None else experts.ffn,
        shared_experts=None if experts is None else experts.shared or None,
        expert_capacity=model.expert_capacity if experts is None else experts.capacity or model.expert_capacity,
        density=None if blocks is None else blocks.density,
        density_block=model.density_block if blocks is None else blocks.size,
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
    """The model's sizes, without the preset or file that they were read from, and without what it is trained for."""
    return {name: value for name, value in asdict(model).items() if name not in _NO_SIZES}
