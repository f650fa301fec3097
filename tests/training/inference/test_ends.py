"""Generated texts end behind every token that the model's files list, as in transformers."""

import json
from dataclasses import replace
from shutil import copytree

import pytest
from small_run import small_run

from pipeloom import train
from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig
from pipeloom.data.tokenizer import ByteTokenizer
from pipeloom.training.inference.ends import end_tokens
from pipeloom.training.pretrained import origin_of
from pipeloom.workload.layout import Layout

END = ByteTokenizer.end_of_text
GENERATION = "generation_config.json"


def run_of(folder, name, model, start=None):
    base = small_run(folder)
    return train(
        replace(
            base,
            model=model,
            data=replace(base.data, tokenizer="bytes"),
            optimizer=OptimizerConfig(lr=1e-3, lr_warmup_steps=1),
            layout=Layout(pp=1, loops=1, num_microbatches=1, microbatch_size=1),
            training=TrainingConfig(steps=1, validation_batches=0, sample_tokens=0, predict=False),
            output=OutputConfig(folder=folder / name),
            checkpoint=CheckpointConfig(final="checkpoint", init=start),
        ),
        quiet=True,
    ).folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with random weights and the tokenizer of bytes."""
    place = tmp_path_factory.mktemp("ends")
    run = run_of(place, "run", ModelConfig(num_layers=1, hidden_size=16, num_heads=2, ffn_size=32))
    assert main(["export", str(run), str(place / "out"), "--format", "hf"]) == 0
    return place / "out"


def first_token(folder, capfd, status=0):
    words = ["--prompt", "the", "--max-tokens", "3", "--temperature", "0", "--json"]
    assert main(["generate", str(folder), *words]) == status
    printed = capfd.readouterr()
    return printed.err if status else json.loads(printed.out)


def listed(folder, tokens):
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": tokens}))


def test_a_text_ends_at_each_token_that_the_folder_lists(folder, capfd):
    listed(folder, [END])
    found = first_token(folder, capfd)
    assert found["end"] == "length"
    listed(folder, [END, found["tokens"][0]])
    found = first_token(folder, capfd)
    assert (found["tokens"], found["end"]) == ([], "end of text")


def test_a_run_from_the_folder_has_its_end_tokens_too(folder, tmp_path):
    listed(folder, [END, 7])
    run = run_of(tmp_path, "tuned", ModelConfig(file=folder), folder)
    assert end_tokens(next((run / "checkpoints").iterdir()), ByteTokenizer()) == {END, 7}


def test_numbers_of_another_tokenizer_end_no_text(folder, tmp_path):
    listed(folder, [END, 7])
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tree = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tree))
    assert end_tokens(other, ByteTokenizer()) == {END}
    run = run_of(tmp_path, "tuned", ModelConfig(file=other), start=other)
    assert end_tokens(next((run / "checkpoints").iterdir()), ByteTokenizer()) == {END}


def test_an_export_of_a_run_with_another_tokenizer_than_its_folder_has_the_tokens_of_the_run(folder, tmp_path):
    other = tmp_path / "other"
    copytree(folder, other)
    (other / GENERATION).write_text(json.dumps({"eos_token_id": [9, 7], "temperature": 0.5}))
    for name, change in (("tokenizer.json", {}), ("config.json", {"eos_token_id": 9, "bos_token_id": 8})):
        (other / name).write_text(json.dumps(json.loads((other / name).read_text()) | change))
    run = run_of(tmp_path, "tuned", ModelConfig(file=other), start=other)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 0
    model, generation = (json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", GENERATION))
    assert (model["eos_token_id"], model["bos_token_id"]) == (END, None)
    assert generation == {"eos_token_id": END, "bos_token_id": None, "pad_token_id": None, "temperature": 0.5}


def test_a_run_with_another_tokenizer_than_the_checkpoint_that_it_starts_from_does_not_take_its_tokens(
    folder, tmp_path
):
    run = run_of(tmp_path, "tuned", ModelConfig(file=folder), folder)
    (checkpoint,) = (run / "checkpoints").iterdir()
    same, other = ({"tokenizer.json": text} for text in (ByteTokenizer().files()["tokenizer.json"], "{}"))
    found = [json.loads(origin_of(checkpoint, files)) for files in (same, other)]
    assert [one["uses_tokenizer"] for one in found] == [True, False]
    assert [one["is_other_tokenizer"] for one in found] == [False, True]
    assert ["tokenizer_config.json" in one["texts"] for one in found] == [True, False]


def test_without_generation_settings_the_model_file_has_the_tokens(folder):
    (folder / GENERATION).unlink(missing_ok=True)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, "eos_token_id": 9}))
    assert end_tokens(folder, ByteTokenizer()) == {END, 9}


@pytest.mark.parametrize("wrong", ["</s>", [1, "x"], -1, True])
def test_something_else_than_tokens_is_refused(folder, capfd, wrong):
    listed(folder, wrong)
    assert "eos_token_id in generation_config.json" in first_token(folder, capfd, status=2)
