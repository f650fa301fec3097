"""State of an optimizer that no checkpoint would have."""

import pytest
import torch
from torch import nn

from pipeloom import load_run, train
from pipeloom.config import OptimizerConfig
from pipeloom.errors import UserError
from pipeloom.execute.processes.workers import are_forked
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.training.optimizers.declared_state import DeclaredState
from pipeloom.training.optimizers.optimizer import make_optimizer
from pipeloom.workload.optimizers import OPTIMIZERS, Matrices, Optimizer


class Keeps(torch.optim.Optimizer):
    """Adds these to the state of each parameter."""

    def __init__(self, groups, added):
        super().__init__(groups, {"lr": 0.1})
        self.added = added

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] += 1
                self.state[parameter].update(self.added(parameter))


@pytest.fixture
def made():
    """Optimizer and check for a matrix [2, 3] and a vector [2]."""

    def make(added, matrices=None):
        OPTIMIZERS.remove("keeps")
        rule = Optimizer(
            summary="", settings={}, state=("seen",), make=lambda groups, lr: Keeps(groups, added), matrices=matrices
        )
        OPTIMIZERS.add("keeps", rule)
        config = OptimizerConfig(name="keeps")
        parts = StageWeights(nn.Linear(3, 2), "none", 1, 0, is_whole=rule.takes_whole).parts
        optimizer = make_optimizer(config, parts)
        return optimizer, DeclaredState(config, optimizer, parts)

    yield make
    OPTIMIZERS.remove("keeps")


def test_declared_state_and_the_number_of_steps_are_no_problem(made):
    optimizer, declared = made(lambda parameter: {"seen": torch.ones_like(parameter), "unused": None})
    declared.check()
    optimizer.step()
    declared.check(again=True)


def test_one_error_names_all_that_is_not_declared_and_what_to_declare(made):
    optimizer, declared = made(
        lambda parameter: {"other": torch.ones_like(parameter), "mean": parameter.detach().mean(), "count": 3}
    )
    optimizer.state["all"] = {"step": 1}
    optimizer.step()
    with pytest.raises(UserError) as found:
        declared.check()
    assert str(found.value).splitlines() == [
        "optimizer keeps keeps state that it does not declare; no checkpoint would have it:",
        "  - other: declare it in Optimizer(state=(..., 'other'))",
        "  - mean: expected a tensor of the parameter's shape [6], found shape []; keep none, or one of that shape",
        "  - count: expected a tensor of the parameter's shape [6], found type int; keep none, or one of that shape",
        "  - state['all']: expected a parameter of the run as the key; keep it in state[parameter]",
    ]


def test_values_of_groups_that_change_would_begin_anew(made):
    optimizer, declared = made(lambda _: {})
    (group, *_) = optimizer.param_groups
    group["lr"] = 0.01
    declared.check(again=True)
    group |= {"count": 1, "betas": torch.zeros(2)}
    with pytest.raises(UserError) as found:
        declared.check(again=True)
    assert str(found.value).splitlines()[1:] == [
        "  - param_groups['count']: expected the value that it began with; keep it in state[parameter]",
        "  - param_groups['betas']: expected the value that it began with; keep it in state[parameter]",
    ]


def test_a_changed_tensor_of_a_group_is_found(made):
    optimizer, _ = made(lambda _: {})
    (group, *_) = optimizer.param_groups
    group["scale"] = torch.ones(2)
    declared = DeclaredState(OptimizerConfig(name="keeps"), optimizer, [])
    declared.check(again=True)
    group["scale"].mul_(2)
    with pytest.raises(UserError, match=r"param_groups\['scale'\]"):
        declared.check(again=True)


def test_an_object_of_a_group_that_does_not_equal_its_copy_is_no_problem(made):
    optimizer, _ = made(lambda _: {})
    (group, *_) = optimizer.param_groups
    group["rule"] = object()
    DeclaredState(OptimizerConfig(name="keeps"), optimizer, []).check(again=True)


def test_state_of_whole_matrices_has_a_function_of_its_shape(made):
    matrices = Matrices(takes=lambda _, shape: len(shape) == 2, state={"rows": lambda shape: shape[:1]})
    optimizer, declared = made(lambda one: {"columns": one.detach().sum(0)} if one.ndim == 2 else {}, matrices)
    optimizer.step()
    with pytest.raises(UserError, match=r"columns: declare it in Matrices\(state=\{'columns': ...\}\).* here \[3\]$"):
        declared.check()


def test_state_that_begins_later_is_found_before_a_checkpoint(made):
    late = {}
    optimizer, declared = made(lambda _: late)
    optimizer.step()
    declared.check()
    late["late"] = 1
    optimizer.step()
    declared.check()
    with pytest.raises(UserError, match="late: expected a tensor"):
        declared.check(again=True)


@pytest.mark.skipif(not are_forked(), reason="ranks import the plug-in, which this test is not")
def test_a_run_ends_before_its_first_step_is_done(made, tmp_path):
    made(lambda parameter: {"other": torch.ones_like(parameter)})
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 99)
    run = load_run(
        model={"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        data={"path": tmp_path / "text.txt", "seq_len": 8, "cache": tmp_path / "cache"},
        layout={"pp": 1, "loops": 1},
        training={"steps": 2, "predict": False},
        optimizer={"name": "keeps"},
        output={"folder": tmp_path / "run"},
    )
    with pytest.raises(UserError, match="optimizer keeps keeps state that it does not declare"):
        train(run, quiet=True)
    assert not (tmp_path / "run").exists()
