"""The example with images at a stage in the middle: gradients, what is frozen, and who sees the images."""

import importlib.util
from pathlib import Path

import pytest
import torch

from pipeloom.config import ModelConfig
from pipeloom.model import Transformer
from pipeloom.schedule import Kind

FILE = Path(__file__).parents[2] / "examples" / "perceive.py"


@pytest.fixture(scope="module")
def perceive():
    spec = importlib.util.spec_from_file_location("perceive", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task_of(perceive, steps):
    model = ModelConfig(num_layers=6, hidden_size=16, num_heads=2).resolve(257)
    torch.manual_seed(0)
    weights = {
        name: torch.randn(one.shape) * 0.3 + name.endswith("norm.weight")
        for name, one in Transformer(model, perceive.SEQ).named_parameters()
    }
    return perceive.Task(model, weights, steps, dtype=torch.float64)


def run_whole(perceive, task, features):
    """Stages of a single process, and the logits."""
    stages = [task.stage(index) for index in range(len(perceive.PARTITION))]
    x = perceive.tokens_of(len(features))
    for stage in stages:
        x = stage(x, documents=perceive.Seen(features))
    return stages, x


def test_two_ranks_have_the_gradients_of_one_process_and_no_stage_below_runs_backward(perceive):
    task = task_of(perceive, 0)
    ranks = perceive.train_projection(task)
    _, features, answers = task.batch(0)
    stages, logits = run_whole(perceive, task, torch.cat(features))
    loss = perceive.loss_of(logits, 0, answers=[torch.cat(answers)])
    loss.backward()
    expected = {name: one.grad for stage in stages for name, one in stage.named_parameters() if one.grad is not None}
    found = {name: torch.tensor(one, dtype=torch.float64) for rank in ranks for name, one in rank["gradients"].items()}
    assert found.keys() == expected.keys() == {"projection.weight", "projection.bias", "soft"}
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-10, atol=1e-14)
        assert one.abs().max() > 1e-6
    assert sum(rank["losses"][0] for rank in ranks) == pytest.approx(loss.item(), rel=1e-12)
    assert sorted(stage for rank in ranks for stage in rank["backwards"]) == [1, 2, 3]
    planned = {action.stage for _, _, action in perceive.schedule_of().actions() if action.kind is Kind.BACKWARD}
    assert planned == {1, 2, 3}


def test_training_moves_the_projection_alone(perceive):
    task = task_of(perceive, 5)
    ranks = perceive.train_projection(task)
    assert all(rank["frozen"] for rank in ranks)
    losses = [sum(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses[-1] < losses[0]
    before = task.stage(perceive.ENTRY)
    trained = {name: torch.tensor(one) for rank in ranks for name, one in rank["trained"].items()}
    assert all(not torch.equal(one, before.get_parameter(name).float()) for name, one in trained.items())


def test_below_its_stage_an_image_is_not_there(perceive):
    task = task_of(perceive, 0)
    features = torch.randn(2, perceive.FEATURES, dtype=torch.float64)
    first = task.stage(0)
    tokens = perceive.tokens_of(2)
    with torch.no_grad():
        behind = first(tokens, documents=perceive.Seen(features))[:, perceive.SLOTS :]
        alone = first.stage(tokens[:, perceive.SLOTS :].contiguous())
        torch.testing.assert_close(behind, alone, rtol=0, atol=1e-12)
        seen, other = (run_whole(perceive, task, one)[1][:, -1] for one in (features, -features))
    assert (seen - other).abs().max() > 1e-3
