"""A decoder-only transformer, or a contiguous part of one.

The network is a list of *pieces*: piece 0 is the embedding, pieces 1..L are the layers 0..L-1, piece L+1 is the head
(last norm and output projection). A pipeline stage is a range of pieces. Parameters carry the same global names
whatever the range is, so the parts of a model never clash and together name all of it. With ``tied`` the projection is
the embedding's matrix, a parameter of the embedding alone; a part that has the head without it is lent that matrix.

Values carry their shape in their name, one letter for each dim:

    B  sequences          N  query heads            F  inner width of the feed-forward layer
    T  tokens             K  key and value heads    V  vocabulary
    H  hidden             D  size of one head       R  rotary pairs of a head, D / 2
"""

# ruff: noqa: N803, N806, N815 (upper-case letters in names are shapes)

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.config import ModelConfig
from pipeloom.errors import UserError
from pipeloom.model.tensor_parallel import TensorSlice

TIED_NAME = "embedding.tokens.weight"
"""The parameter that a tied head projects with."""


def num_pieces(config: ModelConfig) -> int:
    """Number of pieces of a model: its layers, the embedding and the head."""
    return config.num_layers + 2


class Rotary(NamedTuple):
    """Cosine and sine of every position's rotary angles.

    Attributes:
        cos_TR: cosines, [T, R], float32 or wider.
        sin_TR: sines, the same shape and type.
    """

    cos_TR: Tensor
    sin_TR: Tensor

    @classmethod
    def make(
        cls, num_tokens: int, head_size: int, theta: float, *, dtype: torch.dtype, device: torch.device
    ) -> "Rotary":
        """The table for positions 0..T-1.

        It is a pure function of its arguments, so all stages compute the same values.

        Args:
            num_tokens: T.
            head_size: D, even.
            theta: base of the frequencies; pair r turns by ``theta ** (-2 r / D)`` radians a position.
            dtype: type of the activations; the table has this type if it is wider than float32.
            device: where the table is made.
        """
        wide = torch.promote_types(dtype, torch.float32)
        exponents_R = torch.arange(0, head_size, 2, dtype=wide, device=device) / head_size
        positions_T = torch.arange(num_tokens, dtype=wide, device=device)
        angles_TR = torch.outer(positions_T, theta**-exponents_R)
        return cls(angles_TR.cos(), angles_TR.sin())

    def turn(self, x_BNTD: Tensor) -> Tensor:
        """Turn each head's pairs (dims r and r + R) by the angles of their positions.

        The product of a turned query and a turned key depends on the distance of their positions only.

        Args:
            x_BNTD: queries or keys, any number of heads.

        Returns:
            The same shape and type; computed in the table's type.
        """
        left_BNTR, right_BNTR = x_BNTD.chunk(2, dim=-1)
        turned_left_BNTR = left_BNTR * self.cos_TR - right_BNTR * self.sin_TR
        turned_right_BNTR = right_BNTR * self.cos_TR + left_BNTR * self.sin_TR
        return torch.cat([turned_left_BNTR, turned_right_BNTR], dim=-1).to(x_BNTD.dtype)


class Embedding(nn.Module):
    """Piece 0: tokens to vectors; gpt2 adds a learned vector for each position.

    Args:
        config: resolved model.
        max_positions: rows of the position table; gpt2 only.
    """

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the model configuration is not resolved"
        learned = config.family == "gpt2"
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(max_positions, config.hidden_size) if learned else None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens, int64, to x_BTH."""
        x_BTH = self.tokens(tokens_BT)
        if self.positions is None:
            return x_BTH
        return x_BTH + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves N / K query heads.

    Args:
        config: resolved model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_kv_heads is not None, "the model configuration is not resolved"
        hidden, bias = config.hidden_size, config.family == "gpt2"
        self.head_size = hidden // config.num_heads
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, config.num_kv_heads * self.head_size, bias=bias)
        self.value = nn.Linear(hidden, config.num_kv_heads * self.head_size, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x_BTH: Tensor, rotary: Rotary | None) -> Tensor:
        """Mix each token with those before it.

        Args:
            x_BTH: normed hidden states.
            rotary: angles of the T positions; None if positions were added to the embedding.

        Returns:
            What is added to the residual stream, [B, T, H].
        """
        query_BNTD = self._heads(self.query(x_BTH))
        key_BKTD = self._heads(self.key(x_BTH))
        value_BKTD = self._heads(self.value(x_BTH))
        if rotary is not None:
            query_BNTD, key_BKTD = rotary.turn(query_BNTD), rotary.turn(key_BKTD)
        mixed_BNTD = functional.scaled_dot_product_attention(
            query_BNTD, key_BKTD, value_BKTD, is_causal=True, enable_gqa=self.is_grouped
        )
        return self.output(mixed_BNTD.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads x D] to [B, heads, T, D]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class GatedFeedForward(nn.Module):
    """SwiGLU, of the llama family: ``down(silu(gate(x)) * up(x))``, no biases.

    Args:
        hidden_size: H.
        ffn_size: F.
    """

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Each token by itself; returns what is added to the residual stream, [B, T, H]."""
        inner_BTF = functional.silu(self.gate(x_BTH)) * self.up(x_BTH)
        return self.down(inner_BTF)


class GeluFeedForward(nn.Module):
    """The gpt2 family's feed-forward layer: ``down(gelu(up(x)))`` with biases and the tanh form of GELU.

    Args:
        hidden_size: H.
        ffn_size: F.
    """

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Each token by itself; returns what is added to the residual stream, [B, T, H]."""
        inner_BTF = functional.gelu(self.up(x_BTH), approximate="tanh")
        return self.down(inner_BTF)


class Layer(nn.Module):
    """One transformer layer: attention, then feed-forward, each on a normed copy of the residual stream.

    Args:
        config: resolved model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_size is not None, "the model configuration is not resolved"
        feed_forward = GeluFeedForward if config.family == "gpt2" else GatedFeedForward
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = feed_forward(config.hidden_size, config.ffn_size)

    def forward(self, x_BTH: Tensor, rotary: Rotary | None) -> Tensor:
        """x_BTH to x_BTH; ``rotary`` as in :class:`Attention`."""
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH), rotary)
        return x_BTH + self.feed_forward(self.feed_forward_norm(x_BTH))


class Head(nn.Module):
    """The last piece: norm and projection to the vocabulary, without bias.

    Args:
        config: resolved model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the model configuration is not resolved"
        self.norm = _norm(config)
        self.output = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_BTH: Tensor, tied_VH: Tensor | None) -> Tensor:
        """x_BTH to logits_BTV; ``tied_VH`` is the embedding's matrix if the model is tied."""
        x_BTH = self.norm(x_BTH)
        if self.output is not None:
            return self.output(x_BTH)
        assert tied_VH is not None, "a tied head without the embedding's matrix: call borrow first"
        return functional.linear(x_BTH, tied_VH)


class Transformer(nn.Module):
    """A range of the model's pieces.

    Parameters are named globally: ``embedding.tokens.weight``, ``layers.17.attention.query.weight``,
    ``head.output.weight``, whichever other pieces are here.

    Args:
        config: resolved model (:meth:`ModelConfig.resolve`).
        max_positions: longest sequence that is taken.
        pieces: which pieces to build, contiguous and not empty. None: all of them.
    """

    def __init__(self, config: ModelConfig, max_positions: int, pieces: range | None = None) -> None:
        super().__init__()
        last = num_pieces(config) - 1
        pieces = range(last + 1) if pieces is None else pieces
        assert pieces, "a part of a model without pieces"
        assert pieces.step == 1, f"pieces with gaps: {pieces}"
        assert 0 <= pieces[0] <= pieces[-1] <= last, f"pieces that are not in the model: {pieces}"
        layers = [piece - 1 for piece in pieces if 0 < piece < last]
        self.config = config
        self.max_positions = max_positions
        self.pieces = pieces
        self.embedding = Embedding(config, max_positions) if 0 in pieces else None
        self.layers = nn.ModuleDict({str(layer): Layer(config) for layer in layers})
        self.head = Head(config) if last in pieces else None
        self._borrowed_VH: Tensor | None = None

    @property
    def has_embedding(self) -> bool:
        """Whether the range begins with the embedding, so that it takes tokens."""
        return self.embedding is not None

    @property
    def has_head(self) -> bool:
        """Whether the range ends with the head, so that it returns logits."""
        return self.head is not None

    @property
    def borrows(self) -> bool:
        """Whether the head projects with the matrix of an embedding that is not in the range."""
        return self.config.tied and self.has_head and not self.has_embedding

    def borrow(self, weight_VH: Tensor | None) -> None:
        """Lend the head the embedding's matrix, or take it back.

        It is no parameter of this part; if it requires a gradient, it gets the head's share of the matrix's gradient.
        """
        self._borrowed_VH = weight_VH

    def slices(self) -> dict[str, TensorSlice]:
        """For each parameter, by name, where it lies in the whole model's parameter of that name."""
        return {name: TensorSlice(tuple(p.shape), (0,) * p.ndim) for name, p in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        """Run the pieces.

        Args:
            x: tokens_BT (int64) if the range begins with the embedding, else x_BTH.

        Returns:
            logits_BTV if the range ends with the head, else x_BTH.

        Raises:
            UserError: the sequences are longer than ``max_positions``.
        """
        self._check_length(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x)
        rotary = self._rotary(x)
        for layer in self.layers.values():
            x = layer(x, rotary)
        if self.head is None:
            return x
        return self.head(x, self._borrowed_VH if self.embedding is None else self.embedding.tokens.weight)

    def _rotary(self, x_BTH: Tensor) -> Rotary | None:
        """The angles of x's positions, made anew each time: no buffer to move, cast or leave uninitialized."""
        if self.config.family == "gpt2" or not self.layers:
            return None
        head_size = self.config.hidden_size // self.config.num_heads
        return Rotary.make(x_BTH.shape[1], head_size, self.config.rope_theta, dtype=x_BTH.dtype, device=x_BTH.device)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_positions:
            raise UserError(
                f"the model takes sequences of at most {self.max_positions} tokens, found {num_tokens}; "
                "shorten the sequence or build the model with a larger max_positions (data.seq_len)"
            )


def _norm(config: ModelConfig) -> nn.Module:
    """The family's norm over H."""
    norm = nn.LayerNorm if config.family == "gpt2" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)
