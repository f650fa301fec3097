"""Rotary positions (arXiv 2104.09864), also scaled to longer sequences than a model was first trained on.

Letters of shapes are those of ``model.transformer``.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.workload.model import RopeScaling


class Rotary(NamedTuple):
    """Cosine and sine of every position's rotary angles, for both dims of each pair.

    Attributes:
        cos: cosines, [T, 1, D], or [B, T, 1, D] for positions that differ between sequences; float32 or wider.
        sin: sines, the same shape and type; negative in the first R dims.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def make(
        cls,
        positions: Tensor,
        head_size: int,
        theta: float,
        *,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> "Rotary":
        """The table for some positions.

        Args:
            positions: of the tokens, int64 [T] or [B, T].
            head_size: D, even.
            theta: base of the frequencies; pair r turns by ``theta ** (-2 r / D)`` radians per position.
            dtype: of the activations; the table has this dtype if it is wider than float32, else float32.
            scaling: changes the frequencies.
        """
        # bfloat16 has 8 significant bits: it cannot represent position 257, and angles of far tokens would coincide.
        wide = torch.promote_types(dtype, torch.float32)
        exponents_R = torch.arange(0, head_size, 2, dtype=wide, device=positions.device) / head_size
        frequencies_R = theta**-exponents_R
        if scaling is not None:
            frequencies_R = _scaled(frequencies_R, head_size, theta, scaling)
        angles = positions[..., None, None].to(wide) * frequencies_R
        factor = 1.0 if scaling is None else scaling.attention_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def turn(self, x_BTND: Tensor) -> Tensor:
        """Turn each head's pairs (dims r and r + R) by the angles of their positions.

        The product of a turned query and a turned key depends on the distance of their positions only.

        Args:
            x_BTND: queries or keys, any number of heads.

        Returns:
            The same shape and type; computed in the table's type.
        """
        return _Turn.apply(x_BTND, self.cos, self.sin)

    def turn_two(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of linear layers, [B, T, out], by heads, [B, T, heads, D], of which the first two are turned."""
        heads = [one.unflatten(-1, (-1, self.cos.shape[-1])) for one in outputs]
        return [*map(self.turn, heads[:2]), *heads[2:]]


class _Turn(torch.autograd.Function):
    """Turns pairs, and the gradient back by the same angles: three operators each, where autograd needs eight.

    Dims r and r + R, as in Hugging Face's llama, not neighbors as in the paper (arXiv 2104.09864, section 3.2.2): the
    same function with rows in another order, and ``roll`` exchanges the dims of all pairs at once.
    """

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, cos, sin = args
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        (gradient,), (cos, sin) = args, ctx.saved_tensors
        return turned(gradient, cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of each head, [B, T, heads, D], by the angles of a table (``Rotary``); with ``-sin``, back."""
    # In place, since memory limits these operators: with a fresh tensor for each they took up to twice as long on CPUs.
    crossed = x.roll(x.shape[-1] // 2, -1).to(sin.dtype).mul_(sin)
    return crossed.addcmul_(x, cos).to(x.dtype)


def _scaled(frequencies_R: Tensor, head_size: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies of a model for longer sequences.

    A pair that turns often within the original length keeps its frequency, one that turns rarely has it divided by the
    factor, and those between are interpolated: llama3 by the number of turns (Llama 3.1's ``apply_scaling``), YaRN by
    the pair's index (arXiv 2309.00071, section 3.2). Both are those of transformers' ``modeling_rope_utils.py``.
    """
    slow_R = frequencies_R / scaling.factor
    if scaling.kind == "linear":
        return slow_R
    slow, fast = scaling.slow_turns, scaling.fast_turns
    if scaling.kind == "llama3":
        turns_R = scaling.original_len * frequencies_R / (2 * math.pi)
        share_R = ((turns_R - slow) / (fast - slow)).clamp(0, 1)
    else:
        # The index of the pair that turns so many times, rounded outwards; the upper limit is transformers'.
        first, last = (
            head_size * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), head_size - 1)
        index_R = torch.arange(len(frequencies_R), dtype=frequencies_R.dtype, device=frequencies_R.device)
        share_R = 1 - ((index_R - low) / ((high - low) or 0.001)).clamp(0, 1)
    return slow_R * (1 - share_R) + frequencies_R * share_R
