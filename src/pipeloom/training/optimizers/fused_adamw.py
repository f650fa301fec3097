"""AdamW in one kernel, without PyTorch's optimizer classes: these load the compiler, a second of a run's start."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 1 << 22
"""Elements of a flat parameter that are updated in a wide copy at the same time."""


class Rule:
    """What the run needs of an optimizer, with ``_update`` to be written.

    Args:
        groups: each with ``params``, and its own value of any setting.
        settings: the defaults of the groups.

    Attributes:
        param_groups: the groups with all settings, which may be changed.
        state: for each parameter ``step`` and the tensors of the rule.
        defaults: the settings.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        self.defaults = settings
        self.param_groups = [{**self.defaults, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(every)}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            # Kernels take lists of one device and type.
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    self._update_narrow(parameter, parameter.grad, group)
                elif parameter.grad is not None:
                    alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in alike.values():
                self._update(parameters, [one.grad for one in parameters if one.grad is not None], group)

    def _update_narrow(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter that is narrower than its gradient, in wide copies of its pieces that are then rounded."""
        state, number = self.state[parameter], self._numbers[parameter]
        step = state["step"]
        noise = torch.Generator(parameter.device).manual_seed(int(step) * len(self._numbers) + number)
        flat = parameter.dim() == 1
        pieces = parameter.split(_AT_ONCE) if flat else [parameter]
        for piece, its_gradient in zip(pieces, gradient.split(_AT_ONCE) if flat else [gradient], strict=True):
            wide = piece.to(gradient.dtype)
            # Each piece is updated in the same step.
            self.state[wide] = state | {"step": step.clone()}
            self._update([wide], [its_gradient], group)
            state["step"] = self.state.pop(wide)["step"]
            piece.copy_(rounded(wide, noise))

    def zero_grad(self) -> None:
        """Drop the gradients, as optimizers of ``torch.optim`` do."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _update(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one device and type, with the settings of their group."""
        raise NotImplementedError


def rounded(values: Tensor, noise: torch.Generator) -> Tensor:
    """Single-precision values rounded up or down to bfloat16 numbers, so that each is the mean of its roundings.

    Rounded to the nearest number, changes below half of the last digit would be lost in every step (arXiv 2010.06192).
    """
    bits = values.view(torch.int32)
    below = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=noise)
    # A carry out of the lower half rounds up; the mask leaves what bfloat16 has.
    return ((bits + below) & ~0xFFFF).view(torch.float32)


class FusedAdamW(Rule):
    """Adam with decoupled weight decay (arXiv 1711.05101), bit for bit that of ``torch.optim.AdamW(fused=True)``.

    Args:
        groups: as of ``Rule``.
        lr: learning rate.
        betas: of the two means.
        eps: added to the root of the second mean.
        weight_decay: of the weights.

    Attributes:
        grad_scale: what the kernel divides the gradients by; ``None`` for nothing.
    """

    _step_supports_amp_scaling = True  # the name that PyTorch gives to optimizers that read grad_scale

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: Sequence[float], eps: float, weight_decay: float = 0.0
    ) -> None:
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(groups, settings)
        self.grad_scale: Tensor | None = None

    def _update(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            list(parameters),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
