"""A run that starts from weights never starts from random ones: other programs read these, or are refused."""

import json

import pytest
from launch_runs import command_of, reasons_of, values_of, written_for

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def llama(tmp_path):
    """A folder of Hugging Face, of which an export reads the sizes alone."""
    folder = tmp_path / "a llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_torchtitan_reads_a_folder_of_hugging_face(tmp_path, llama):
    written = written_for("torchtitan", tmp_path / "out", checkpoint={"init": str(llama)})
    # A model from a folder has no default of these.
    recipe = {"OPTIMIZER_LR": "1e-5", "OPTIMIZER_LR_WARMUP_STEPS": "2", "TRAINING_STEPS": "9"}
    found = command_of(written.files[0], TOKENIZER="/tokenizer", DATASET="c4", **recipe)
    assert values_of(found, "--checkpoint.initial_load_path") == [str(llama)]
    assert {"--checkpoint.enable", "--checkpoint.initial_load_in_hf"} <= set(found)
    assert f"checkpoint.init is {llama}, on every node" in written.notes.differs


def test_megatron_needs_its_own_conversion(tmp_path, llama):
    (reason,) = reasons_of("megatron", tmp_path / "out", checkpoint={"init": str(llama)})
    assert reason.startswith(f"checkpoint.init {llama}: ")
    assert "tools/checkpoint/convert.py" in reason
    assert "--pretrained-checkpoint" in reason


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("setting", ["init", "resume"])
def test_a_run_of_this_program_is_refused_with_the_way_to_its_weights(tmp_path, target, setting):
    run = tmp_path / "run" / "checkpoints" / "step-000002"
    run.mkdir(parents=True)
    (run / "checkpoint.json").write_text("{}")
    (reason,) = reasons_of(target, tmp_path / "out", checkpoint={setting: str(tmp_path / "run")})
    assert reason.startswith(f"checkpoint.{setting} {tmp_path / 'run'}: ")
    assert "pipeloom export --format hf" in reason


def test_torchrun_names_the_folder_that_every_node_needs(tmp_path, llama):
    written = written_for("torchrun", tmp_path / "out", checkpoint={"init": str(llama)})
    assert f"checkpoint.init is {llama}, on every node" in written.notes.differs
