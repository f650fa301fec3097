"""A decoder-only transformer, or a contiguous part of one.

The network is a list of *pieces*: piece 0 is the embedding, pieces 1..L are the layers 0..L-1, piece L+1 is the head
(last norm and output projection). A pipeline stage is a range of pieces. Parameters have the same global names in
every range. With ``tied`` the output projection is the embedding's matrix, a parameter of the embedding alone; a range
with the head but without the embedding borrows it.

Names of tensors end in their shape, one letter for each dim:

    B  sequences          N  query heads            F  inner width of the feed-forward layer
    T  tokens             K  key and value heads    V  vocabulary       E  experts
    H  hidden             D  size of one head       R  rotary pairs of a head, D / 2
    Q  N x D              G  K x D

With tensor parallelism N, K, Q, G, F and V are this rank's share, and the residual stream between layers has all tokens
or this rank's share (``model.tensor_parallel``).
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from pipeloom.errors import UserError
from pipeloom.model.attention import Attention
from pipeloom.model.block_sparse import BlockSparseLinear, Pattern, layer_patterns
from pipeloom.model.context_parallel import WHOLE_SEQUENCES, ContextParallel
from pipeloom.model.deferred import OwnGradients
from pipeloom.model.expert_parallel import Steps, in_turns
from pipeloom.model.experts import ExpertFeedForward
from pipeloom.model.feed_forward import feed_forward
from pipeloom.model.key_values import EarlierTokens, KeyValueCache
from pipeloom.model.norms import residual_norm
from pipeloom.model.parallel_layers import (
    Adaptable,
    ColumnParallelLinear,
    Lookup,
    Split,
    VocabParallelEmbedding,
    product,
)
from pipeloom.model.rotary import Rotary
from pipeloom.model.run_part import run_part
from pipeloom.model.tensor_parallel import WHOLE, TensorParallel, TensorSlice
from pipeloom.model.visible_keys import Documents
from pipeloom.workload.adapter import PATHS, Adapter, is_pair
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS

TIED_NAME = "embedding.tokens.weight"
"""The parameter that a tied head uses."""


def num_pieces(config: ModelConfig) -> int:
    """Number of pieces of a model: its layers, the embedding and the head."""
    return config.num_layers + 2


class Embedding(nn.Module):
    """Piece 0: token embedding; gpt2 adds learned positions, Gemma multiplies by the root of H."""

    def __init__(self, config: ModelConfig, max_positions: int, parallel: TensorParallel) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the model configuration is not resolved"
        self._parallel = parallel
        self.tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.positions = Lookup(max_positions, config.hidden_size) if not MODELS[config.family].is_rotary else None
        self._scale = config.hidden_size**0.5 if MODELS[config.family].scales_embedding else None

    def forward(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """From tokens, int64, to the residual stream; ``positions`` of the tokens, int64 [T] or [B, T]."""
        x_BTH = self.tokens(tokens_BT)
        if self._scale is not None:
            # Rounded to the type of the activations, as Gemma was trained: 55.5 instead of 55.43 in bfloat16.
            x_BTH = x_BTH * _rounded(self._scale, x_BTH.dtype)
        return x_BTH if self.positions is None else x_BTH + self.positions(self._parallel.own_tokens(positions))


class Layer(nn.Module):
    """One transformer layer: attention, then feed-forward, perhaps with experts.

    Each reads a normed copy of the residual stream, or what it adds to the stream is normed, or both. With both, the
    latter norms are ``attention_post_norm`` and ``feed_forward_post_norm``.
    """

    feed_forward: nn.Module

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        assert config.ffn_size is not None, "the model configuration is not resolved"
        family = MODELS[config.family]
        self.attention_norm = residual_norm(config)
        self.attention = Attention(config, parallel)
        self.feed_forward_norm = residual_norm(config)
        self.feed_forward = feed_forward(config, config.ffn_size, parallel)
        self._norms_precede, self._norms_follow = family.norms_precede, family.norms_follow
        if self._norms_precede and self._norms_follow:
            self.attention_post_norm, self.feed_forward_post_norm = residual_norm(config), residual_norm(config)
        self.recomputes = False

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        earlier: EarlierTokens | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Residual stream to residual stream; ``rotary``, ``earlier`` and ``documents`` as in :class:`Attention`."""
        x = self._attended(x, rotary, earlier, documents)
        return self._fed(x, self.feed_forward(self.feed_forward_norm(x) if self._norms_precede else x))

    def steps(self, x: Tensor, rotary: Rotary | None) -> Steps[Tensor]:
        """As ``forward``, with pauses while tokens travel to experts."""
        x, block = self._attended(x, rotary), self.feed_forward
        read = self.feed_forward_norm(x) if self._norms_precede else x
        return self._fed(x, (yield from block.steps(read)) if isinstance(block, ExpertFeedForward) else block(read))

    def halves(self, first: Tensor, second: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """As ``forward``, of two parts of a micro-batch in turns."""
        return in_turns(self.steps(first, rotary), self.steps(second, rotary))

    def _attended(
        self,
        x: Tensor,
        rotary: Rotary | None,
        earlier: EarlierTokens | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The residual stream behind attention."""
        read = self.attention_norm(x) if self._norms_precede else x
        added = self.attention(read, rotary, earlier, documents)
        if not self._norms_precede:
            added = self.attention_norm(added)
        return x + (self.attention_post_norm(added) if self._norms_precede and self._norms_follow else added)

    def _fed(self, x: Tensor, added: Tensor) -> Tensor:
        """The residual stream behind the feed-forward block, which returned what it adds."""
        if not self._norms_precede:
            added = self.feed_forward_norm(added)
        return x + (self.feed_forward_post_norm(added) if self._norms_precede and self._norms_follow else added)


class Head(nn.Module, OwnGradients):
    """The last piece: norm and projection to the vocabulary, without bias; Gemma 2 bounds the logits."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the model configuration is not resolved"
        self._parallel = parallel
        self.norm = residual_norm(config)
        self._softcap = config.known_logit_softcap
        is_own = not config.tied
        sizes = config.hidden_size, config.vocab_size
        self.output = ColumnParallelLinear(*sizes, bias=False, parallel=parallel) if is_own else None

    def forward(self, x: Tensor, tied_VH: Tensor | None) -> Tensor:
        """Residual stream to logits_BTV; ``tied_VH`` is the embedding's matrix if the model is tied."""
        # The norm is per token, so with sequence parallelism it runs before the all-gather, on 1 / tp of the tokens.
        x_BTH = self._parallel.enter(self.norm(x))
        if self.output is not None:
            # Logits of this rank's part of the vocabulary; the loss exchanges three numbers per token.
            return self._capped(self.output(x_BTH))
        assert tied_VH is not None, "a tied head without the embedding's matrix: call borrow first"
        return self._capped(product(x_BTH, tied_VH, self))

    def _capped(self, logits_BTV: Tensor) -> Tensor:
        """``c tanh(logit / c)``, each logit by itself; for the backward it keeps the tanh."""
        return (logits_BTV / self._softcap).tanh() * self._softcap if self._softcap else logits_BTV


class Transformer(nn.Module):
    """A range of the model's pieces.

    Parameters have global names in every range: ``embedding.tokens.weight``, ``layers.17.attention.query.weight``,
    ``head.output.weight``.

    Args:
        config: resolved model (:meth:`ModelConfig.resolve`).
        max_positions: longest sequence.
        pieces: which pieces to build, contiguous and not empty. None: all of them.
        parallel: tensor parallelism.
        adapter: low-rank adapters of the layers; ``None`` for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        pieces: range | None = None,
        parallel: TensorParallel = WHOLE,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        last = num_pieces(config) - 1
        pieces = range(last + 1) if pieces is None else pieces
        assert pieces, "a part of a model without pieces"
        assert pieces.step == 1, f"pieces with gaps: {pieces}"
        assert 0 <= pieces[0] <= pieces[-1] <= last, f"pieces that are not in the model: {pieces}"
        # Numbers of the layers in order, and for each the one whose weights it has.
        self.numbers = tuple(piece - 1 for piece in pieces if 0 < piece < last)
        self._owner = {one: one if config.sharing is None else config.sharing.owner(one) for one in self.numbers}
        self.config = config
        self.max_positions = max_positions
        self.pieces = pieces
        self.parallel = parallel
        self.context = WHOLE_SEQUENCES
        self._overlaps = False  # whether layers run on the halves of a micro-batch in turns
        self.embedding = Embedding(config, max_positions, parallel) if 0 in pieces else None
        kind = _layer_class(config.family)
        # A dict with layer numbers of the whole model as keys, so that names are global on every stage. Layers that
        # share their weights are one module, which runs once for each.
        self.layers = nn.ModuleDict({str(one): kind(config, parallel) for one in dict.fromkeys(self._owner.values())})
        for name, built in self.layers.items():
            assert isinstance(built, Layer)
            built.attention.window = config.window_of(int(name))
            if config.expert_layout is not None and config.expert_layout.are_in(int(name)):
                built.feed_forward = ExpertFeedForward(config, parallel)
            for path, pattern in layer_patterns(config, int(name)).items():
                _keep_blocks(built, path, pattern)
            if adapter is not None and int(name) >= adapter.first_layer:
                _adapt(built, adapter, parallel)
        self.head = Head(config, parallel) if last in pieces else None
        # Not registered as a parameter: the first stage owns, updates and saves the matrix.
        self._borrowed_VH: Tensor | None = None

    @property
    def has_embedding(self) -> bool:
        """Whether the range begins with the embedding, and so takes tokens."""
        return self.embedding is not None

    @property
    def has_head(self) -> bool:
        """Whether the range ends with the head, and so returns logits."""
        return self.head is not None

    @property
    def borrows(self) -> bool:
        """Whether the head is tied to an embedding that is not in the range."""
        return self.config.tied and self.has_head and not self.has_embedding

    @property
    def tied_name(self) -> str:
        """The parameter that a tied head uses."""
        return TIED_NAME

    @property
    def borrowed(self) -> Tensor | None:
        """The embedding's matrix, while it is borrowed."""
        return self._borrowed_VH

    def borrow(self, weight_VH: Tensor | None) -> None:
        """Give the head the embedding's matrix; ``None`` removes it.

        It does not become a parameter of this module. If it requires a gradient, it gets the head's share.
        """
        self._borrowed_VH = weight_VH

    def run_in_halves(self) -> None:
        """Run layers on the halves of a micro-batch in turns, while tokens of the other travel to experts.

        Raises:
            UserError: a layer of the family has a forward of its own, which the steps of a half would not follow.
        """
        for kind in {type(layer) for layer in self.layers.values()}:
            if issubclass(kind, Layer) and kind.forward is not Layer.forward and kind.steps is Layer.steps:
                raise UserError(
                    f"layout.ep_overlap: {kind.__name__} of model.family {self.config.family} overrides forward, but "
                    "halves of a micro-batch run through steps; override steps, too, or leave layout.ep_overlap out"
                )
        self._overlaps = True

    def set_recompute(self, by_layer: Sequence[Recompute]) -> None:
        """Set activation checkpointing.

        Args:
            by_layer: for each layer of the whole model: "none", "selective" (core attention), or "full".
        """
        for name, layer in self.layers.items():
            assert isinstance(layer, Layer)
            layer.recomputes = by_layer[int(name)] == "full"
            layer.attention.recomputes_core = by_layer[int(name)] == "selective"

    def set_context(self, context: ContextParallel) -> None:
        """Share the tokens of sequences among ranks: the input then has this rank's tokens only."""
        self.context = context
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            layer.attention.context = context

    def freeze(self, num_pieces: int) -> None:
        """Keep the weights of the first pieces of the whole model: their parameters require no gradient."""
        frozen = [layer for name, layer in self.layers.items() if int(name) + 1 < num_pieces]
        if self.embedding is not None and num_pieces:
            frozen.append(self.embedding)
        for piece in frozen:
            piece.requires_grad_(requires_grad=False)

    def freeze_base(self) -> None:
        """Keep all weights but those of adapters."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_pair(name))

    def slices(self) -> dict[str, TensorSlice]:
        """For each parameter by name, its slice of the whole model's parameter."""
        found: dict[str, TensorSlice] = {}
        for path, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                whole = TensorSlice(tuple(parameter.shape), (0,) * parameter.ndim)
                found[f"{path}.{name}"] = module.slice_of(name, parameter) if isinstance(module, Split) else whole
        return found

    def replicated(self) -> frozenset[str]:
        """Names of parameters that are replicated over tensor-parallel ranks; empty if there is only one rank."""
        if self.parallel.size == 1:
            return frozenset()
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        return frozenset(name for name, here in self.slices().items() if here.whole == shapes[name])

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, documents: Documents | None = None) -> Tensor:
        """Run the pieces.

        Args:
            x: tokens_BT (int64) if the range begins with the embedding, else x_BtH: this rank's share of the tokens of
                each sequence.
            cache: for a token slice, the cache of its micro-batch; slices are passed in order. None: whole sequences.
            documents: which keys the tokens see, and their positions. None: each sequence is one document.

        Returns:
            logits_BTV if the range ends with the head, else x_BtH.

        Raises:
            UserError: the sequences are longer than ``max_positions``.
        """
        # A stage input has this rank's share of the tokens; the embedding takes all tokens.
        num_tokens = x.shape[1] if self.has_embedding else x.shape[1] * self.parallel.size
        begin = 0 if cache is None else cache.take(num_tokens)
        self._check_length(begin + self.context.num_tokens(num_tokens))
        # Positions cover all tokens, also if the residual stream has only this rank's share.
        places_T = begin + self.context.places(num_tokens, x.device)
        positions = places_T if documents is None else documents.positions(places_T)
        x = self.parallel.from_boundary(x) if self.embedding is None else self.embedding(x, positions)
        rotary = self._rotary(positions, x)
        if self._overlaps and len(x) > 1 and cache is None and documents is None:
            x = self._in_halves(x, rotary)
        else:
            for number, layer, own in self._in_order(rotary):
                earlier = None if cache is None else cache.earlier(str(number), begin)
                x = run_part(layer, x, own, earlier, documents, recomputes=layer.recomputes)
        if self.head is None:
            return self.parallel.to_boundary(x)
        return self.head(x, self._borrowed_VH if self.embedding is None else self.embedding.tokens.weight)

    def _in_order(self, rotary: Mapping[bool, Rotary]) -> Iterator[tuple[int, Layer, Rotary | None]]:
        """The layers with their numbers and their angles."""
        for number in self.numbers:
            layer = self.layers[str(self._owner[number])]
            assert isinstance(layer, Layer)
            yield number, layer, rotary.get(layer.attention.window is not None)

    def _in_halves(self, x: Tensor, rotary: Mapping[bool, Rotary]) -> Tensor:
        """Run the layers on the halves of a micro-batch in turns; what a layer recomputes, it computes alone."""
        layers, (first, second) = list(self._in_order(rotary)), x.chunk(2)
        while layers:
            number = next((n for n, (_, one, _) in enumerate(layers) if one.recomputes), len(layers))
            ahead, layers = layers[:number], layers[number:]
            first, second = in_turns(*(_through(half, ahead) for half in (first, second)))
            if layers:
                (_, layer, own), *layers = layers
                first, second = run_part(layer.halves, first, second, own, recomputes=True)
        return torch.cat([first, second])

    def _rotary(self, positions: Tensor, x: Tensor) -> dict[bool, Rotary]:
        """Rotary angles of these positions for layers without and with a window; empty for learned positions."""
        if not MODELS[self.config.family].is_rotary:
            return {}
        # Computed in each forward: a buffer would have to be moved, cast, and initialized after `to_empty`.
        config, size, local = self.config, self.config.known_head_size, self.config.known_rope_local_theta
        kinds = {layer.attention.window is not None for layer in self.layers.values() if isinstance(layer, Layer)}
        found: dict[bool, Rotary] = {}
        if kinds - ({True} if local is not None else set()):
            whole = Rotary.make(positions, size, config.known_rope_theta, dtype=x.dtype, scaling=config.scaling)
            found = dict.fromkeys(kinds, whole)
        if local is not None and True in kinds:
            found[True] = Rotary.make(positions, size, local, dtype=x.dtype)
        return found

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_positions:
            raise UserError(
                f"the model takes sequences of at most {self.max_positions} tokens, found {num_tokens}; "
                "shorten the sequence or build the model with a larger max_positions (data.seq_len)"
            )


def _through(x: Tensor, layers: Sequence[tuple[int, Layer, Rotary | None]]) -> Steps[Tensor]:
    for _, layer, rotary in layers:
        x = yield from layer.steps(x, rotary)
    return x


def _keep_blocks(layer: Layer, path: str, pattern: Pattern) -> None:
    """Replace a matrix of a layer by some of its blocks."""
    block, _, name = path.rpartition(".")
    whole = layer.get_submodule(path)
    assert isinstance(whole, nn.Linear)
    setattr(layer.get_submodule(block), name, BlockSparseLinear(pattern, bias=whole.bias is not None))


def _adapt(layer: Layer, adapter: Adapter, parallel: TensorParallel) -> None:
    for target in adapter.targets:
        matrix = layer.get_submodule(PATHS[target])
        assert isinstance(matrix, Adaptable)
        matrix.adapt(adapter.rank, adapter.scale, parallel)


@cache  # stages of one model share the code of a compiled layer
def _layer_class(family: str) -> type[Layer]:
    layer = MODELS[family].layer
    return Layer if layer is None else layer()


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a type."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
