"""Replicas that step alone, written out on one process."""

import torch

from pipeloom.training.stages import stage_of


def values(model):
    """Copies of its parameters."""
    return [one.detach().clone() for one in model.parameters()]


class Replicas:
    """Equal models of a resolved run of two-sequence updates, each with AdamW of its own."""

    def __init__(self, config, number):
        pieces = range(config.model.num_layers + 2)
        self.models = [stage_of(config, pieces, "cpu", dtype=torch.float64) for _ in range(number)]
        self._rules = [
            torch.optim.AdamW(_groups(one), lr=0.05, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
            for one in self.models
        ]

    def update(self, windows, counts):
        """So many updates of each replica, with the windows behind those of the replicas before it."""
        first = 0
        for model, rule, number in zip(self.models, self._rules, counts, strict=True):
            for _ in range(number):
                own = torch.from_numpy(windows[first : first + 2])
                first += 2
                rule.zero_grad()
                loss_of(model, own).backward()
                norm = sum(float(one.grad.square().sum()) for one in model.parameters()) ** 0.5
                for one in model.parameters():
                    one.grad /= max(1.0, norm)
                rule.step()

    def ways(self, begun):
        """For each replica the way of each parameter back to where it began."""
        return [
            [before - now for before, now in zip(own, values(model), strict=True)]
            for own, model in zip(begun, self.models, strict=True)
        ]

    def place(self, number, tensors):
        """Set the parameters of a replica."""
        with torch.no_grad():
            for one, tensor in zip(self.models[number].parameters(), tensors, strict=True):
                one.copy_(tensor)


class Outer:
    """Weights that all replicas have, and their outer step: gradient descent with Nesterov momentum."""

    def __init__(self, weights):
        self.weights, self._momenta = weights, [torch.zeros_like(one) for one in weights]

    def step(self, ways):
        """Update them by the mean of the replicas' ways."""
        for place, each in enumerate(zip(*ways, strict=True)):
            mean = sum(each) / len(each)
            self._momenta[place] = 0.9 * self._momenta[place] + mean
            self.weights[place] = self.weights[place] - 0.7 * (mean + 0.9 * self._momenta[place])


def loss_of(model, windows):
    """Mean loss of some windows."""
    logits = model(windows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _groups(model):
    decays = [one for one in model.parameters() if one.ndim > 1]
    return [{"params": decays}, {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0}]
