"""Optimizers of other distributions that are wrong: one line names them, their file and the line."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom.config import OptimizerConfig
from pipeloom.errors import OptimizerError, UserError
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.training.optimizers.optimizer import make_optimizer
from pipeloom.workload.optimizers import OPTIMIZERS, Optimizer

HERE = Path(__file__)


class Raises(torch.optim.Optimizer):
    def __init__(self, groups, lr, error):
        super().__init__(groups, {"lr": lr})
        self.error = error

    def step(self):
        raise self.error  # in a step


@pytest.fixture
def made():
    """The optimizer ``wrong`` of a make, for a matrix."""

    def make(function):
        OPTIMIZERS.add("wrong", Optimizer(summary="", settings={}, state=(), make=function))
        return make_optimizer(OptimizerConfig(name="wrong"), StageWeights(nn.Linear(3, 2), "none", 1, 0).parts)

    yield make
    OPTIMIZERS.remove("wrong")


def line_of(text):
    number = 1 + next(number for number, line in enumerate(HERE.read_text().splitlines()) if line.strip() == text)
    return f"in {HERE}, line {number}: {text}; PIPELOOM_TRACEBACK=1 prints the traceback"


def test_an_error_in_a_step_names_the_optimizer_and_the_line(made):
    optimizer = made(lambda groups, lr: Raises(groups, lr, KeyError("momentun")))
    with pytest.raises(OptimizerError) as found:
        optimizer.step()
    where = line_of("raise self.error  # in a step")
    assert str(found.value) == f"the optimizer 'wrong' raised KeyError: 'momentun', {where}"


def test_an_error_in_make_does_too(made):
    def wrong(groups, lr):
        return groups[0]["weights"]

    with pytest.raises(OptimizerError) as found:
        made(wrong)
    where = line_of('return groups[0]["weights"]')
    assert str(found.value) == f"the optimizer 'wrong' raised KeyError: 'weights', {where}"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), UserError("of this program")])
def test_what_is_no_mistake_of_it_stays(made, error):
    optimizer = made(lambda groups, lr: Raises(groups, lr, error))
    with pytest.raises(type(error)) as found:
        optimizer.step()
    assert found.value is error


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda groups, lr: None, "got an unexpected keyword argument 'betas'"),
        (lambda groups, lr, betas, eps: None, "missing a required argument: 'eps'"),
    ],
)
def test_settings_that_make_does_not_take_are_found_when_it_is_registered(make, reason):
    declared = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    with pytest.raises(UserError) as refused:
        Optimizer(summary="", settings=declared, state=(), make=make)
    place = f"{HERE}, line {make.__code__.co_firstlineno}"
    assert str(refused.value) == f"make ({place}) does not take lr and the settings: {reason}"
