"""Stages that compute, that sleep instead, or that do next to nothing.

Sleeping stages let many ranks fit on few cores, and only the runtimes and the network are measured.
"""

import ctypes
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.deferred import Filed, OwnGradients, add_to_leaves, own_gradient
from side_by_side.case import Case

_PR_SET_TIMERSLACK = 29
_CALIBRATION_RUNS = 12


def sleep_precisely() -> None:
    """Let sleeps of this process end on time, not up to 50 microseconds late."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _InputWork(torch.autograd.Function):
    """Sleeps forward, and backward for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:  # type: ignore[override]
        ctx.backward_s = backward_s
        _sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        _sleep(ctx.backward_s)
        return gradient, None, None


class _WeightWork(torch.autograd.Function):
    """Sleeps backward for the gradient of the weights, which is made and added in full; later where it is deferred."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, backward_s: float, defers: bool) -> Tensor:  # type: ignore[override]
        ctx.backward_s, ctx.weights, ctx.defers = backward_s, weights, defers
        return weights.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        if ctx.defers:
            return own_gradient(_Later(ctx.weights, gradient, gradient, ctx.backward_s), "defer"), None, None
        _sleep(ctx.backward_s)
        return gradient.new_ones(ctx.weights.shape), None, None


@dataclass(frozen=True)
class _Later(Filed):
    """A gradient of weights that is deferred."""

    backward_s: float = 0.0

    def add(self) -> None:
        """Sleep, and add the gradient."""
        _sleep(self.backward_s)
        ones = torch.ones_like(self.leaf)
        if self.leaf.grad is None:
            add_to_leaves([self.leaf], [ones])
        else:
            self.leaf.grad.add_(ones)


@dataclass(frozen=True)
class OwnCost:
    """What an emulated stage costs in addition to its sleep: subtracted from the sleeps of all runtimes alike."""

    forward_s: float = 0.0
    backward_s: float = 0.0


class EmulatedStage(nn.Module, OwnGradients):
    """A stage of given times, message and weights.

    Args:
        forward_s: of a micro-batch.
        backward_s: of a micro-batch; half of it for the input's gradient, half for the weights'.
        weight_bytes: of the weights.
        is_first: whether its input needs no gradient; the sleep for that gradient is kept.
        own: cost in addition to the sleeps.
    """

    def __init__(self, forward_s: float, backward_s: float, weight_bytes: int, *, is_first: bool, own: OwnCost) -> None:
        super().__init__()
        self._forward_s = max(0.0, forward_s - own.forward_s)
        self._half_s = max(0.0, backward_s - own.backward_s) / 2
        self.weights = nn.Parameter(torch.zeros(max(16, weight_bytes // 4)))
        self.first = nn.Parameter(torch.zeros(1)) if is_first else None

    def forward(self, tensor: Tensor) -> Tensor:
        """Sleep, and hand the input on."""
        if self.first is not None:
            tensor = tensor + self.first
        return _InputWork.apply(tensor, self._forward_s, self._half_s) + _WeightWork.apply(
            self.weights, self._half_s, self.defers
        )


class LightStage(nn.Module):
    """A stage that computes next to nothing: what is left is the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tensor: Tensor) -> Tensor:
        """One product."""
        return tensor * self.weight


class RealStage(nn.Module):
    """Feed-forward layers with residuals.

    Args:
        width: of the layers' input; four times that inside.
        layers: how many.
        seed: of the weights.
    """

    def __init__(self, width: int, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.ModuleList([nn.Linear(width, 4 * width) for _ in range(layers)])
        self.down = nn.ModuleList([nn.Linear(4 * width, width) for _ in range(layers)])

    def forward(self, tensor: Tensor) -> Tensor:
        """All layers."""
        for up, down in zip(self.up, self.down, strict=True):
            tensor = tensor + down(functional.gelu(up(tensor)))
        return tensor


def stage_of(case: Case, loops: int, index: int, own: OwnCost) -> nn.Module:
    """One of ``pp * loops`` stages that do the case's work together."""
    if case.width is not None:
        return RealStage(case.width, case.layers * case.loops // loops, seed=index)
    if case.forward_s == 0:
        return LightStage()
    scale = case.loops / loops
    return EmulatedStage(
        case.forward_s * scale,
        case.backward_s * scale,
        round(case.weight_bytes * scale),
        is_first=index == 0,
        own=own,
    )


def message(case: Case, seed: int = 0) -> Tensor:
    """What stages hand over: ``float32[1, rows, width]``, from a seed where it matters; ``float32[1, n]`` where not."""
    if case.width is None:
        return torch.zeros(1, max(1, case.message_bytes // 4))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, case.message_bytes // (4 * case.width), case.width, generator=generator)


def measure_stage(case: Case) -> tuple[float, float]:
    """Seconds of forward and backward of a stage for a micro-batch, alone on this rank."""
    stage, tensor = stage_of(case, case.loops, 1, OwnCost()), message(case)
    forwards, backwards = [], []
    for _ in range(_CALIBRATION_RUNS):
        given = tensor.clone().requires_grad_()
        start_s = time.perf_counter()
        output = stage(given)
        middle_s = time.perf_counter()
        output.backward(torch.ones_like(output))
        forwards.append(middle_s - start_s)
        backwards.append(time.perf_counter() - middle_s)
    return statistics.median(forwards), statistics.median(backwards)


def own_cost(case: Case, forward_s: float, backward_s: float) -> OwnCost:
    """How much longer a sleeping stage takes than its sleep, with the caches that a sleep leaves behind."""
    if case.width is not None or case.forward_s == 0:
        return OwnCost()
    return OwnCost(max(0.0, forward_s - case.forward_s), max(0.0, backward_s - case.backward_s))


def loss(output: Tensor) -> Tensor:
    """Of a micro-batch."""
    return output.mean()
