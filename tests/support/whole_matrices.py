"""An optimizer whose update of a matrix depends on all of its elements, as those of Muon and Adafactor do."""

import torch

from pipeloom.workload.optimizers import OPTIMIZERS, Matrices, Optimizer

NAME = "orthogonal"


class Orthogonal(torch.optim.Optimizer):
    """Moves matrices along a nearly orthogonal factor of their momentum, scaled by row, and others along theirs."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, change = self.state[parameter], parameter.grad
                if group["is_matrix"]:
                    state["rows"].lerp_(parameter.grad.square().mean(1), 0.1)
                    state["mean"].lerp_(parameter.grad, 0.1)
                    change = state["mean"] / state["mean"].norm()
                    for _ in range(3):  # Newton-Schulz, which rounding disturbs less than the exact factor
                        change = 1.5 * change - 0.5 * change @ change.T @ change
                    change /= 1 + state["rows"].sqrt()[:, None]
                else:
                    change = state["momentum"].lerp_(parameter.grad, 0.5)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])


OPTIMIZERS.add(
    NAME,
    Optimizer(
        summary="for tests",
        settings={"weight_decay": 0.1},
        state=("momentum",),
        make=lambda groups, lr, **_: Orthogonal(groups, {"lr": lr}),
        matrices=Matrices(
            takes=lambda name, shape: len(shape) == 2 and name.startswith("layers."),
            state={"mean": lambda shape: shape, "rows": lambda shape: shape[:1]},
        ),
    ),
)
