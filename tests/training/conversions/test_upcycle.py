"""Experts that are copies of a dense model's blocks: the same function, and a run that starts from them."""

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_run
from torch.distributed import checkpoint as dcp

from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, TrainingConfig
from pipeloom.config.file import read_run_file
from pipeloom.model import Transformer
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    config = small_run(
        folder,
        model=ModelConfig(num_layers=3, hidden_size=16, num_heads=2),
        layout=Layout(pp=1, loops=2, num_microbatches=2, microbatch_size=1),
        training=TrainingConfig(
            steps=2, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20
        ),
        checkpoint=CheckpointConfig(final="checkpoint"),
        output=OutputConfig(folder=folder / "run"),
    )
    return train(config, quiet=True).folder


def whole(run, model, folder):
    found = Transformer(model, 8).double()
    found.load_state_dict(load_file(export_weights(run, folder)[0]))
    return found


def test_a_model_with_copies_as_experts_computes_the_same_and_can_be_trained(dense, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--experts", "4", "--experts-per-token", "3", "--expert-every", "2"]
    assert main(["convert", "upcycle", str(dense), str(out), *words]) == 0
    printed = capsys.readouterr().out
    assert str(out / "checkpoints" / "step-000002") in printed
    config, problems = read_run_file(out / "config.toml")
    assert not problems
    assert (config.model.experts, config.model.experts_per_token, config.model.expert_every) == (4, 3, 2)
    own = whole(out, config.model, tmp_path / "own")
    old = whole(dense, read_run_file(dense / "config.toml")[0].model, tmp_path / "old")
    routers = [name for name, _ in own.named_parameters() if "router" in name]
    assert routers == ["layers.1.feed_forward.router.weight"]
    tokens = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (own(tokens) - old(tokens)).abs().max() < 1e-13
    assert (
        main(["train", str(out / "config.toml"), "--output.folder", str(tmp_path / "next"), "--training.steps", "1"])
        == 0
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--experts", "1"], "--experts must be at least 2, found 1"),
        (
            ["--experts", "2", "--experts-per-token", "3"],
            "model.experts_per_token must be at most model.experts 2, found 3",
        ),
        (["--expert-every", "4"], "model.expert_every must be at most model.num_layers 3, found 4"),
    ],
)
def test_wrong_sizes_are_one_message_and_nothing_is_written(dense, tmp_path, capsys, words, sentence):
    assert main(["convert", "upcycle", str(dense), str(tmp_path / "out"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_has_experts_and_a_folder_that_exists_are_refused(dense, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", "upcycle", str(dense), str(out), "--experts", "2"]) == 0
    assert main(["convert", "upcycle", str(dense), str(out)]) == 2
    assert f"{out} exists; choose another folder" in capsys.readouterr().err
    assert main(["convert", "upcycle", str(out), str(tmp_path / "again")]) == 2
    assert "has experts already" in capsys.readouterr().err


def test_what_appears_at_the_folder_meanwhile_stays(dense, tmp_path, capsys, monkeypatch):
    folder, save = tmp_path / "new" / "run", dcp.save

    def save_beside(*words, **more):
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
        return save(*words, **more)

    monkeypatch.setattr(dcp, "save", save_beside)
    assert main(["convert", "upcycle", str(dense), str(folder), "--experts", "2"]) == 1
    assert f"{folder} was made by another process meanwhile; choose another folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.joinpath("new").rglob("*")} == {"run", "notes.txt"}


def test_an_interrupted_conversion_removes_only_what_it_made(dense, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "run"

    def interrupted(*_words, **_more):
        (tmp_path / "new" / "thesis.txt").write_text("mine")
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp, "save", interrupted)
    assert main(["convert", "upcycle", str(dense), str(folder), "--experts", "2"]) == 130
    assert [path.name for path in tmp_path.joinpath("new").iterdir()] == ["thesis.txt"]
