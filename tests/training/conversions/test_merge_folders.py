"""Merges with Hugging Face folders: as the base of runs that started from one, and as models tuned elsewhere."""

import json
import shutil

import pytest
import torch
from hugging_face import make_model, save
from merges import merging, tensors_of
from safetensors.torch import load_file, save_file
from small_run import write_text

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.cli import main
from pipeloom.data.tokenizer import ByteTokenizer
from pipeloom.training.conversions.export import export_weights

PWE = ("--method", "pwe", "--preference", "0.7", "0.3")


def folder_of(model, folder, **settings):
    """What transformers writes, with a tokenizer."""
    save(model, folder, **settings)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def tuned_elsewhere(model, folder):
    """The folder of a model whose weights another program has changed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return folder_of(model, folder)


def run_from(start, folder, text, *words):
    """A run of three steps whose weights come from a folder or a run, or are random ones."""
    given = [] if start is None else ["--checkpoint.init", str(start)]
    settings = {"data.path": text, "data.seq-len": 8, "data.cache": folder.parent / "cache", "output.folder": folder}
    settings |= {"optimizer.lr": 0.01, "optimizer.lr-warmup-steps": 1, "training.steps": 3, "layout.pp": 1}
    settings |= {"layout.loops": 1, "layout.num-microbatches": 2, "training.sample-tokens": 0}
    settings |= {"training.validation-batches": 0, "checkpoint.final": "checkpoint"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main(["train", *flags, "--training.no-predict", *given, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of several bfloat16 files, two runs from it, and a folder that was tuned elsewhere."""
    folder = tmp_path_factory.mktemp("folders")
    model, text = make_model("llama").to(torch.bfloat16), write_text(folder)
    capitals = folder / "capitals.txt"
    capitals.write_text(text.read_text().upper())
    base = folder_of(model, folder / "base", max_shard_size="8KB")
    runs = [run_from(base, folder / one.stem, one) for one in (text, capitals)]
    return base, *runs, tuned_elsewhere(model, folder / "tuned")


def weights_of(folder):
    """All tensors of a Hugging Face folder."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def exported(run, folder, **settings):
    export_weights(run, folder, format="hf", **settings)
    return weights_of(folder)


def problems(capsys, *words):
    """The message of a merge that is refused."""
    capsys.readouterr()
    assert main(merging(*words)) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


def test_differences_of_runs_and_folders_are_added_to_a_folder_in_the_widest_type(made, tmp_path):
    base, small, large, tuned = made
    out = tmp_path / "out"
    assert main(merging(base, out, small, large, tuned, "--weights", "0.6", "-0.3", "0.5")) == 0
    own = weights_of(base)
    assert {one.dtype for one in own.values()} == {torch.bfloat16}
    assert {one.dtype for one in tensors_of(out).values()} == {torch.float32}
    wide = [exported(run, tmp_path / run.name, dtype="float32") for run in (small, large)]
    found = exported(out, tmp_path / "wide", dtype="float32")
    for name, one in found.items():
        first = own[name].double()
        models = [each[name].double() - first for each in (*wide, weights_of(tuned))]
        expected = first + 0.6 * models[0] - 0.3 * models[1] + 0.5 * models[2]
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=1e-6)
        assert not torch.equal(one, own[name].float())


def test_the_merged_run_goes_on_and_is_exported_as_the_folder_was(made, tmp_path, capsys):
    base, small, large, _ = made
    out = tmp_path / "out"
    assert main(merging(base, out, small, large)) == 0
    assert main(["evaluate", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.rpartition("run file")[2].partition("\n")[2])["tokens"] > 0
    assert main(["train", str(out / "config.toml"), "--output.folder", str(tmp_path / "on")]) == 0
    names = {file.name for file in export_weights(out, tmp_path / "again", format="hf")}
    assert names == {file.name for file in base.iterdir()}
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (base / name).read_bytes()
    # A merge is no other start: it may be merged again.
    assert main(merging(base, tmp_path / "twice", out, large)) == 0


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_folders_alone_are_merged(tmp_path, capsys, name):
    model = make_model(name)
    base = folder_of(model, tmp_path / "base")
    tuned = tuned_elsewhere(model, tmp_path / "tuned")
    tokenizer = json.loads((tuned / "tokenizer.json").read_text())
    # As a program writes it that has trained with batches of equal length.
    tokenizer["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tuned / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "out"
    assert main(merging(base, out, tuned)) == 0
    found, expected = exported(out, tmp_path / "exported"), weights_of(tuned)
    assert found.keys() == expected.keys()
    for key, one in found.items():
        torch.testing.assert_close(one, expected[key], rtol=0, atol=1e-7)
    assert (find_checkpoint(out) / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 2
    assert "data.path must be set, since a model of Hugging Face folders has no text" in capsys.readouterr().err
    words = ["--data.path", str(write_text(tmp_path)), "--data.cache", str(tmp_path / "cache"), "--batches", "1"]
    assert main(["evaluate", str(out), *words]) == 0


def test_models_that_transformers_computes_are_the_same_whoever_wrote_their_config(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="needs pipeloom[hf]")
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.GPTNeoXConfig(**sizes, attention_dropout=0.0, hidden_dropout=0.0)
    model = transformers.GPTNeoXForCausalLM(config)
    base = folder_of(model, tmp_path / "base")
    model.config.use_cache = False
    tuned = tuned_elsewhere(model.to(torch.bfloat16), tmp_path / "tuned")
    assert main(merging(base, tmp_path / "out", tuned)) == 0
    model.config.rotary_pct = 0.5
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    other = folder_of(model, tmp_path / "other")
    assert f"{other}: model.adapted is " in problems(capsys, base, tmp_path / "not", other)


def test_everything_that_is_wrong_is_one_message(made, tmp_path, capsys):
    base, small, _, tuned = made
    text = small.parent / "text.txt"
    out, lacks, bare, tokens = (tmp_path / name for name in ("out", "lacks", "bare", "tokens"))
    for folder in (lacks, bare, tokens):
        shutil.copytree(tuned, folder)
    tensors = load_file(lacks / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacks / "model.safetensors", metadata={"format": "pt"})
    (bare / "model.safetensors").unlink()
    swapped = (tokens / "tokenizer.json").read_text().replace('"A": 65', '"A": 66').replace('"B": 66', '"B": 65')
    (tokens / "tokenizer.json").write_text(swapped)
    tied = folder_of(make_model("llama tied"), tmp_path / "tied")
    random = run_from(None, tmp_path / "random", text, "--model.file", str(base), "--data.tokenizer", str(base))
    pairs = run_from(base, tmp_path / "pairs", text, "--adapter.rank", "2")
    models = (lacks, bare, tokens, tied, random, pairs, tmp_path / "none", small)
    printed = problems(capsys, base, out, *models, "--weights", "1")
    for sentence in (
        "--weights takes a number for each of 8 models, found 1",
        f"{lacks} does not have the weights of its config.json:\n  - it lacks model.norm.weight",
        f"expected model.safetensors or model.safetensors.index.json in {bare}, found neither",
        f"{tokens}: it has another tokenizer than the base",
        f"{tied}: model.tied is False, there it is True",
        f"{random}: it was trained from random weights, not from {base}",
        f"{pairs}: it has adapters; give the folder that `pipeloom export {pairs} FOLDER --format hf --merge` writes",
        f"found nothing at {tmp_path / 'none'}, and no config.json of a Hugging Face model",
    ):
        assert sentence in printed
    assert f"{small}: " not in printed
    assert not out.exists()
    assert main(["export", str(pairs), str(tmp_path / "joined"), "--format", "hf", "--merge"]) == 0
    assert main(merging(base, out, small, tmp_path / "joined")) == 0


def test_weights_that_are_no_numbers_are_refused_before_anything_is_written(made, tmp_path, capsys):
    base, small, _, tuned = made
    wrong = shutil.copytree(tuned, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(torch.nan)
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    printed = problems(capsys, base, tmp_path / "out", small, wrong)
    assert "model.layers.1.mlp.up_proj.weight of " in printed
    assert "has values that are NaN or infinite" in printed
    assert not (tmp_path / "out").exists()


def test_a_base_is_recognized_by_its_weights(made, tmp_path, capsys):
    base, small, _, tuned = made
    copied = shutil.copytree(base, tmp_path / "copied")
    assert main(merging(copied, tmp_path / "out", small)) == 0
    assert f"{small}: it was trained from {base}, not from {tuned}" in problems(capsys, tuned, tmp_path / "not", small)
    own_files = ["--model.file", str(base), "--data.tokenizer", str(base)]
    later = run_from(small, tmp_path / "later", small.parent / "text.txt", *own_files)
    printed = problems(capsys, base, tmp_path / "not", later)
    assert f"{later}: it was trained from {find_checkpoint(small)}, not from {base}" in printed
    assert main(merging(small, tmp_path / "of run", later, tuned)) == 0
    # The base's run began from a folder, as which its merges are exported.
    assert {one.dtype for one in exported(tmp_path / "of run", tmp_path / "narrow").values()} == {torch.bfloat16}


def test_a_folder_without_a_tokenizer_takes_that_of_its_runs(made, tmp_path, capsys):
    base, small, _, tuned = made
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert main(merging(bare, tmp_path / "out", tuned, small)) == 0
    stored = [(find_checkpoint(run) / "tokenizer.json").read_bytes() for run in (tmp_path / "out", small)]
    assert stored[0] == stored[1]
    assert f"{bare}: it has no tokenizer.json" in problems(capsys, bare, tmp_path / "not", tuned)


def test_routers_begin_from_a_folder_with_the_settings_of_the_first_run(made, tmp_path, capsys):
    base, small, large, tuned = made
    out = tmp_path / "out"
    assert main(merging(base, out, small, large, *PWE, "--router-steps", "2")) == 0
    again = tmp_path / "again"
    assert main(merging(base, again, small, large, *PWE, "--routers", str(out))) == 0
    first, second, own = map(tensors_of, (out, again, small))
    assert first.keys() == own.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    printed = problems(capsys, base, tmp_path / "not", small, tuned, *PWE)
    assert f"routers are trained on the text of each model's run, {tuned} has none; use --method arithmetic" in printed
    printed = problems(capsys, base, tmp_path / "not", large, small, *PWE, "--routers", str(out))
    assert "were trained for other runs" in printed
