"""Runs whose matrices are kept blocks: what they hold and send, and the dense run that goes on from one."""

import json
from dataclasses import replace

import pytest
import torch
from resumed import losses
from safetensors.torch import load_file
from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig
from pipeloom.config.file import read_run_file
from pipeloom.model import Transformer
from pipeloom.model.block_sparse import weight_patterns
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.export import export_weights, load_stored, stored_parameters
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout

MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, ffn_size=64, density=0.25, density_block=8)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    config = small_run(
        folder,
        model=MODEL,
        layout=Layout(pp=1, loops=2, num_microbatches=2, microbatch_size=1),
        optimizer=OptimizerConfig(lr=0.01, lr_warmup_steps=1, lr_decay_style="constant"),
        training=TrainingConfig(
            steps=3, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20
        ),
        checkpoint=CheckpointConfig(final="checkpoint"),
        output=OutputConfig(folder=folder / "run"),
    )
    return train(config, quiet=True).folder


@pytest.fixture(scope="module")
def dense(sparse):
    folder = sparse.parent / "dense"
    assert main(["convert", "densify", str(sparse), str(folder)]) == 0
    return folder


def tensors_of(run):
    stored = stored_parameters(CheckpointReader(find_checkpoint(run)), prefix="")
    found = {key: torch.empty(shape, dtype=stored.dtypes[key]) for key, shape in stored.shapes.items()}
    load_stored(stored, found)
    return found


def model_of(run):
    return read_run_file(run / "config.toml")[0].model


def whole(run, folder, model):
    found = Transformer(model, 8).double()
    found.load_state_dict(load_file(export_weights(run, folder)[0]))
    return found


def test_matrices_become_dense_with_zeros_and_compute_the_same(sparse, dense, tmp_path):
    assert model_of(dense) == replace(model_of(sparse), density=None, density_block=None)
    old, own = (whole(run, tmp_path / run.name, model_of(run)) for run in (sparse, dense))
    tokens = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (own(tokens) - old(tokens)).abs().max() < 1e-13
    before, after = (tensors_of(run) for run in (sparse, dense))
    patterns = weight_patterns(model_of(sparse))
    for key, one in after.items():
        name = next((name for name in patterns if key.endswith(f".{name}")), None)
        assert torch.equal(one, before[key] if name is None else patterns[name].dense(before[key]))
    assert {key.split(".")[1] for key in after if key.startswith("optimizer.")} == {"exp_avg", "exp_avg_sq"}


def test_the_dense_run_goes_on_and_moves_what_was_zero(sparse, dense, tmp_path, capsys):
    after = tmp_path / "after"
    assert main(["train", str(dense / "config.toml"), "--output.folder", str(after), "--training.steps", "5"]) == 0
    assert "step 3" in capsys.readouterr().out
    assert list(losses(after)) == [4, 5]
    assert losses(after)[4] < losses(sparse)[1]
    patterns = weight_patterns(model_of(sparse))
    stored = tensors_of(after)
    name = next(iter(patterns))
    outside = patterns[name].dense(torch.ones(patterns[name].shape)) == 0
    assert (stored[f"model.{name}"][outside] != 0).float().mean() > 0.9


def test_files_of_hugging_face_have_dense_matrices(sparse, dense, tmp_path):
    for run in (sparse, dense):
        export_weights(run, tmp_path / run.name, format="hf")
    of_sparse, of_dense = (load_file(tmp_path / run.name / "model.safetensors") for run in (sparse, dense))
    assert of_sparse.keys() == of_dense.keys()
    assert all(torch.equal(of_sparse[name], of_dense[name]) for name in of_dense)
    configs = [json.loads((tmp_path / run.name / "config.json").read_text()) for run in (sparse, dense)]
    assert configs[0] == configs[1]


def test_what_cannot_be_made_dense_is_refused_and_nothing_is_written(sparse, dense, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", "densify", str(dense), str(out)]) == 2
    assert "is dense; densify takes one with model.density" in capsys.readouterr().err
    assert main(["convert", "densify", str(sparse), str(out), "--experts", "4"]) == 2
    assert "--experts has no effect with densify" in capsys.readouterr().err
    assert main(["convert", "upcycle", str(sparse), str(out)]) == 2
    assert "model.density does not work with model.experts 8" in capsys.readouterr().err
    assert not out.exists()
    words = ["--checkpoint.init", str(dense), "--output.folder", str(out), "--training.steps", "1"]
    assert main(["train", str(sparse / "config.toml"), *words]) == 2
    assert "model.density is 0.25, the checkpoint has None" in capsys.readouterr().err
