"""The llama of ``pipeloom.model`` as one would write it for one process: PyTorch's modules and nothing else."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.workload.model import ModelConfig

_NAMES = {
    "attention_norm": "attention_norm",
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "output": "attention.output",
    "feed_forward_norm": "feed_forward_norm",
    "gate": "feed_forward.gate",
    "up": "feed_forward.up",
    "down": "feed_forward.down",
}
"""Module of a plain layer -> its name in pipeloom."""


class PlainLayer(nn.Module):
    """A layer: attention, then SwiGLU, each with a norm before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.ffn_size, config.known_norm_eps
        assert inner is not None, "the model configuration is not resolved"
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(hidden, eps=eps)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=eps)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Residual stream to residual stream."""
        normed = self.attention_norm(x)
        heads = (layer(normed).unflatten(-1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in heads)
        query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class PlainLlama(nn.Module):
    """The whole model, tokens to logits.

    Args:
        config: resolved; of the family llama, with as many key heads as query heads, without tied embeddings.
        num_tokens: length of the sequences, whose rotary angles are computed once.
    """

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the model configuration is not resolved"
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.known_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        size = config.hidden_size // config.num_heads
        frequencies = config.known_rope_theta ** -(torch.arange(0, size, 2) / size)
        angles = (torch.arange(num_tokens)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def plain_names(config: ModelConfig) -> Mapping[str, str]:
    """Parameter of a plain llama -> parameter of pipeloom's."""
    ends = {
        "embedding.weight": "embedding.tokens.weight",
        "norm.weight": "head.norm.weight",
        "head.weight": "head.output.weight",
    }
    layers = range(config.num_layers)
    inner = {f"layers.{n}.{own}.weight": f"layers.{n}.{name}.weight" for n in layers for own, name in _NAMES.items()}
    return ends | inner
