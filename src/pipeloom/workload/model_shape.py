"""Sizes of a model, with which costs and memory are counted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pipeloom.workload.model_families import MODELS, ModelFamily
from pipeloom.workload.sharing import Sharing


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model's layers: several feed-forward blocks in place of one.

    Attributes:
        count: experts of a layer.
        per_token: experts that a token takes.
        ffn: inner width of each.
        every: every layer of this number has experts, the last of each so many.
        shared: experts that every token takes, as one block of their joint width.
        capacity: most tokens of an expert in a micro-batch / their mean number; ``None``: no token is dropped.
    """

    count: int
    per_token: int
    ffn: int
    every: int = 1
    shared: int = 0
    capacity: float | None = None

    def most_tokens(self, tokens: float) -> int | None:
        """Most of so many tokens that an expert takes, as Megatron rounds them; ``None`` for no limit."""
        if self.capacity is None:
            return None
        return ceil(round(self.capacity * tokens * self.per_token / self.count, _DIGITS))

    def are_in(self, layer: int) -> bool:
        """Whether a layer, from 0, has experts."""
        return (layer + 1) % self.every == 0

    def block_width(self, ffn: int) -> int:
        """``ModelShape.ffn`` where the layers without experts are ``ffn`` wide; if all have some, that of an expert."""
        return self.ffn if self.every == 1 else ffn

    @property
    def inner(self) -> int:
        """Inner width of all of a layer's experts together."""
        return (self.count + self.shared) * self.ffn

    @property
    def active_inner(self) -> int:
        """Inner width of what one token takes."""
        return (self.per_token + self.shared) * self.ffn


_DIGITS = 9
"""Digits behind the point of a number of tokens: 1.1 x 10 is no whole number in floats."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The square blocks that the matrices of attention and feed-forward blocks consist of; elsewhere they are zero.

    Attributes:
        density: kept blocks of a matrix / all. Each row of blocks keeps the same number.
        size: rows and columns of a block.
    """

    density: float
    size: int

    def kept(self, inputs: int) -> int:
        """Kept blocks of each row of blocks of a matrix with so many inputs."""
        return round(self.density * inputs / self.size)

    def problem(self, inputs: int, outputs: int) -> str | None:
        """Why a matrix cannot have such blocks; ``None`` if it can."""
        if inputs % self.size or outputs % self.size:
            return f"blocks of {self.size} do not divide its {inputs} inputs and {outputs} outputs"
        exact, kept = self.density * inputs / self.size, self.kept(inputs)
        if kept < 1 or abs(exact - kept) > _WHOLE:
            return f"a row of its {inputs // self.size} blocks keeps {exact:.4g} of them, which must be a whole number"
        return None


_WHOLE = 1e-6
"""Largest distance of a number of kept blocks from a whole one: a density such as 1 / 3 is no float."""


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
        experts: of layers; ``None`` for one feed-forward block in each.
        sharing: which layers share their weights; ``None`` if each has its own.
        blocks: of which the matrices of layers consist; ``None`` for dense ones.
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
    experts: Experts | None = None
    sharing: Sharing | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        """Remove a head size that is the default, so that equal shapes compare equal."""
        if self.own_head_size is not None and self.own_head_size * self.heads == self.hidden:
            object.__setattr__(self, "own_head_size", None)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; ``None`` for one that sees all earlier tokens."""
        full = frozenset(self.full_layers)
        return tuple(None if layer in full else self.window for layer in range(self.layers))

    def has_fused_attention(self, window: int | None, num_keys: int) -> bool:
        """Whether a layer with a window computes plain attention with so many keys, for which there are fused kernels.

        Others have kernels that take soft caps, and windows that are narrower than the keys.
        """
        return not self.attn_softcap and (window is None or window >= num_keys)

    @cached_property
    def with_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(self.experts is not None and self.experts.are_in(layer) for layer in range(self.layers))

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same window, and all of them experts or none."""
        return not self.full_layers and (self.experts is None or self.experts.every == 1)

    def alike(self, window: int | None, *, experts: bool) -> "ModelShape":
        """The shape with this window, or none, in all layers, and with experts in all or in none."""
        kind = None
        if experts:
            assert self.experts is not None
            kind = self.experts if self.experts.every == 1 else replace(self.experts, every=1)
        is_same = window == self.window and not self.full_layers and kind is self.experts
        return self if is_same else replace(self, window=window, full_layers=(), experts=kind)

    @cached_property
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
    def density(self) -> float:
        """Part of the elements of a layer's matrices that are parameters."""
        return 1.0 if self.blocks is None else self.blocks.density

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's matrices, without those of experts, by their names in a layer."""
        attention = ("query", self.query_width), ("key", self.kv_width), ("value", self.kv_width)
        found = {f"attention.{name}": (self.hidden, outputs) for name, outputs in attention}
        found["attention.output"] = self.query_width, self.hidden
        into = ("gate", "up") if self.kind.gates > 1 else ("up",)
        found |= {f"feed_forward.{name}": (self.hidden, self.ffn) for name in into}
        return {**found, "feed_forward.down": (self.ffn, self.hidden)}

    @property
    def block_problems(self) -> list[str]:
        """What is wrong with the blocks of the matrices, a sentence for each reason; empty without blocks."""
        found, blocks = dict[str, list[str]](), self.blocks
        for name, sizes in self.matrices.items():
            if blocks is not None and (problem := blocks.problem(*sizes)) is not None:
                found.setdefault(problem, []).append(name.rpartition(".")[2])
        return [f"density {self.density:g} does not fit {', '.join(names)}: {why}" for why, names in found.items()]

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of one layer's norms of the heads of queries and keys."""
        return 2 * self.head_size if self.kind.qk_norm == "head" else 0

    @property
    def layer_matrix_parameters(self) -> float:
        """Parameters of one layer's matrices: four of attention, those into the feed-forward block and one back.

        Of a layer with experts those of all of them, and the router's. Where layers differ, the mean.
        """
        return _mean([self._matrices(has_experts=one) for one in self._distinct])

    @property
    def expert_parameters(self) -> float:
        """Of ``layer_matrix_parameters`` those of experts, without the ones that every token takes."""
        if self.experts is None:
            return 0.0
        each = self.hidden * (self.kind.gates + 1) * self.experts.ffn
        return self.experts.count * each * _mean(self._distinct)

    @property
    def active_by_layer(self) -> list[int]:
        """For each layer the parameters of its matrices that a token takes."""
        if self.experts is None:
            return [self._matrices(has_experts=False)] * self.layers
        dense, active = (self._matrices(has_experts=one, is_active=True) for one in (False, True))
        return [active if one else dense for one in self.with_experts]

    @property
    def _distinct(self) -> tuple[bool, ...]:
        """``with_experts``, of one layer where all are equal."""
        return self.with_experts if self.experts is not None and self.experts.every > 1 else (self.experts is not None,)

    def _matrices(self, *, has_experts: bool, is_active: bool = False) -> int:
        """Parameters of the matrices of a layer with or without experts: all, or those that a token takes."""
        inner, router, experts = self.ffn, 0, self.experts
        if has_experts and experts is not None:
            inner, router = experts.active_inner if is_active else experts.inner, experts.count
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return self.kept(attention + self.hidden * ((self.kind.gates + 1) * inner + router))

    def kept(self, elements: int) -> int:
        """Parameters among so many elements of a layer's matrices."""
        return elements if self.blocks is None else round(elements * self.blocks.density)

    @property
    def inner(self) -> float:
        """Inner width of the feed-forward blocks that a token takes in a layer; where layers differ, the mean."""
        experts = self.experts
        return _mean([self.ffn if experts is None or not one else experts.active_inner for one in self._distinct])

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; of the head as well, where it has its own."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters without norms and biases, which are below 0.1 %."""
        sets = self.layers if self.sharing is None else self.sharing.num_distinct
        layers = round(sets * self.layer_matrix_parameters)
        return layers + (1 if self.tied else 2) * self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Those of them that a token takes, on which FLOPs depend; those that layers share once for each layer."""
        if self.experts is None:
            return replace(self, sharing=None).parameters
        return sum(self.active_by_layer) + (1 if self.tied else 2) * self.embedding_parameters


def _mean(values: Sequence[int]) -> float:
    return values[0] if len(values) == 1 else sum(values) / len(values)
