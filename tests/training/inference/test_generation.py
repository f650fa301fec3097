"""Generation through the pipeline: its tokens are those of the whole model without cached keys and values."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hugging_face import require_transformers
from safetensors.torch import load_file
from small_run import small_run
from thinned import thinned

from pipeloom import train
from pipeloom.cli import main
from pipeloom.cli.generate import COMMAND, _forwards, _problems
from pipeloom.cli.run_config import parse_words
from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, ScheduleConfig, TrainingConfig
from pipeloom.config.file import format_run, read_run_file
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.inference import generation
from pipeloom.training.inference.generation import Request, Sampling, draw, generate
from pipeloom.training.inference.trained import with_trained
from pipeloom.training.session import load_tokens, resolve
from pipeloom.training.stages import StageSizes, stage_of
from pipeloom.workload.layout import Layout

PROMPTS = ("a", "the cat", "where is the dog")
GREEDY = Sampling(temperature=0)
NUM_TOKENS = 9
MODELS = {
    "llama": {},
    "gpt2": {},
    "olmo2": {},
    "gemma3": {"tied": True, "window": 5},
}
FAMILIES = tuple(MODELS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of four layers with nearly random weights, by family."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for family in FAMILIES:
        base = small_run(folder)
        config = replace(
            base,
            model=ModelConfig(
                family=family, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=4, **MODELS[family]
            ),
            data=replace(base.data, seq_len=32),
            layout=Layout(pp=1, loops=2, num_microbatches=2, microbatch_size=1),
            training=TrainingConfig(steps=1, validation_batches=0, sample_tokens=0, predict=False, dtype="float64"),
            output=OutputConfig(folder=folder / family),
            checkpoint=CheckpointConfig(final="checkpoint"),
        )
        found[family] = train(config, quiet=True).folder
    return found


def config_of(run, *flags):
    return _forwards(parse_words(COMMAND, [str(run), *flags], _problems).options)


def uncached(run, tmp_path):
    """The greedy continuations by the whole model in this process, which reads each sequence again for every token."""
    config = config_of(run)
    config = replace(config, model=config.model.resolve(257))
    model = stage_of(config, range(6), "cpu")
    # A tied head has no matrix of its own.
    model.load_state_dict(load_file(export_weights(run, tmp_path / "weights")[0]), strict=not config.model.tied)
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt.encode())
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        found.append(tuple(tokens[len(prompt) :]))
    return found


@pytest.mark.parametrize("family", thinned(FAMILIES, 4))
def test_cached_tokens_over_the_pipeline_are_those_of_the_whole_model(trained, tmp_path, family):
    expected, run = uncached(trained[family], tmp_path), trained[family]
    layouts = {
        "pipeline and tensor ranks": ("--layout.pp", "2", "--layout.tp", "2"),
        "swapped stages": ("--layout.loops", "3", "--schedule.device-budget", "200KB"),
    }
    for words in layouts.values():
        found = generate(config_of(run, *words), run, Request(PROMPTS, NUM_TOKENS, GREEDY))
        assert [text.tokens for text in found.texts] == expected, words
        assert {text.end for text in found.texts} == {"length"}


def test_a_ring_of_stages_continues_texts_as_the_model_at_once_within_its_budget(trained, monkeypatch):
    """More tokens than a schedule has, in several schedules, with texts that end before the last of them."""
    monkeypatch.setattr(generation, "_RING_TOKENS", 4)
    run, request = trained["llama"], Request(PROMPTS, 15, Sampling(temperature=1.5, seed=5))
    plain = generate(config_of(run), run, request)
    weights = [int(one.weights) for one in StageSizes(resolved(run, "6"), trains=False).stages()]
    budget = max(map(sum, pairwise(weights)))
    assert 2 * budget < sum(weights)
    swapped = generate(config_of(run, "--layout.loops", "6", "--schedule.device-budget", str(budget)), run, request)
    assert swapped.texts == plain.texts
    assert {text.end for text in plain.texts} == {"end of text", "length"}
    assert max(weights) < swapped.peak_stage_bytes <= budget
    assert plain.peak_stage_bytes == 0


def resolved(run, loops):
    config = with_trained(config_of(run, "--layout.loops", loops, "--schedule.device-budget", "1GB"), run)
    return resolve(config, load_tokens(config))


def test_a_budget_below_a_stage_is_refused(trained, capfd):
    words = ["--prompt", "a", "--max-tokens", "3", "--layout.loops", "6", "--schedule.device-budget", "10kB"]
    assert main(["generate", str(trained["llama"]), *words]) == 2
    printed = capfd.readouterr()
    assert printed.err.count("the device budget is 10 KB, but stage 0 takes") == 1
    assert "optimizer state" not in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_tokens_are_those_that_transformers_generates(trained, tmp_path):
    transformers = require_transformers()
    run = trained["llama"]
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    found = generate(config_of(run), run, Request(PROMPTS, NUM_TOKENS, GREEDY))
    for prompt, text in zip(PROMPTS, found.texts, strict=True):
        tokens = torch.tensor([list(prompt.encode())])
        made = model.generate(
            tokens, do_sample=False, max_new_tokens=NUM_TOKENS, attention_mask=torch.ones_like(tokens)
        )
        assert tuple(made[0, len(prompt) :].tolist()) == text.tokens
    # The folder itself, with its own tokenizer.
    config = config_of(tmp_path / "out", "--layout.pp", "2", "--layout.loops", "2", "--training.dtype", "float64")
    again = generate(config, tmp_path / "out", Request(PROMPTS, NUM_TOKENS, GREEDY))
    assert [text.tokens for text in again.texts] == [text.tokens for text in found.texts]
    assert (again.step, again.checkpoint) == (None, str(tmp_path / "out"))


def test_a_run_whose_model_file_is_gone_has_the_model_of_its_checkpoint(trained, tmp_path, capfd):
    moved, text = tmp_path / "moved", tmp_path / "text.txt"
    shutil.copytree(trained["llama"], moved)
    config, _ = read_run_file(moved / "config.toml")
    config = replace(config, model=ModelConfig(file=tmp_path / "base"))
    (moved / "config.toml").write_text(format_run(config))
    text.write_text("the cat and the dog\n" * 9)
    words = ["--data.path", str(text), "--data.seq-len", "16", "--json"]
    for run in (trained["llama"], moved):
        assert main(["evaluate", str(run), *words]) == 0
    losses = [json.loads(line)["loss"] for line in capfd.readouterr().out.splitlines()]
    assert losses[0] == losses[1]
    assert main(["simulate", str(moved / "config.toml")]) == 2  # nothing else has the sizes
    assert "no such file" in capfd.readouterr().err


def test_what_forwards_do_not_read_of_a_run_refuses_no_other_layout(trained, tmp_path, capfd):
    moved, text = tmp_path / "moved", tmp_path / "text.txt"
    shutil.copytree(trained["llama"], moved)
    config, _ = read_run_file(moved / "config.toml")
    layout = replace(config.layout, pp=2, loops=1, recompute="full", boundary="int8")
    config = replace(config, layout=layout, schedule=ScheduleConfig(family="1f1b", keep=(2, 1)))
    (moved / "config.toml").write_text(format_run(config))
    text.write_text("the cat and the dog\n" * 9)
    words = ["--data.path", str(text), "--data.seq-len", "16", "--json"]
    own = ["--layout.pp", "1", "--layout.loops", "3", "--layout.dp", "2", "--layout.microbatches", "1", "3"]
    for run, layout in ((trained["llama"], []), (moved, own)):
        assert main(["evaluate", str(run), *layout, *words]) == 0
    losses = [json.loads(line)["loss"] for line in capfd.readouterr().out.splitlines()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert main(["evaluate", str(moved), *own, *words, "--layout.num-microbatches", "7"]) == 2
    assert "layout.num_microbatches 7 has no effect with layout.microbatches" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [
        *("--schedule.family", "--schedule.group-size", "--schedule.keep", "--schedule.balance", "--schedule.offload"),
        *("--schedule.activation-budget", "--schedule.gradient-buffers", "--schedule.file", "--layout.recompute"),
        *("--layout.recompute-layers", "--layout.average-every", "--layout.boundary", "--layout.token-slices"),
    ],
)
def test_what_forwards_do_not_read_is_no_flag_of_evaluate(trained, capsys, flag):
    assert main(["evaluate", str(trained["llama"]), flag]) == 2
    assert f"{flag} has no effect on evaluate; leave it out" in capsys.readouterr().err


def test_an_exported_folder_has_the_loss_of_its_run(trained, tmp_path, capfd):
    run, out, text = trained["gemma3"], tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the cat and the dog\n" * 9)
    assert main(["export", str(run), str(out), "--format", "hf"]) == 0
    capfd.readouterr()
    words = ["--data.path", str(text), "--data.seq-len", "16", "--json"]
    assert main(["evaluate", str(run), *words]) == 0
    assert main(["evaluate", str(out), *words, "--training.dtype", "float64", "--layout.pp", "2"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-12)
    assert found[1]["tokens"] == found[0]["tokens"]
    (out / "tokenizer.json").unlink()
    assert main(["evaluate", str(out)]) == 2
    problems = capfd.readouterr().err
    assert "data.path must be set" in problems
    assert "data.tokenizer must be set" in problems
    assert main(["generate", str(out), "--prompt", "a", "--max-tokens", "2", "--data.tokenizer", "bytes"]) == 0
    assert main(["generate", str(out), "--prompt", "a", "--max-tokens", "2", "--data.tokenizer", "bpe"]) == 2
    assert "data.tokenizer bpe is trained on a text, found none beside" in capfd.readouterr().err


def test_draws_depend_on_seed_and_place_alone(trained):
    run = trained["llama"]
    sampling = Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=3)
    all_at_once = generate(config_of(run), run, Request(PROMPTS, NUM_TOKENS, sampling))
    one_by_one = generate(config_of(run), run, Request(PROMPTS, NUM_TOKENS, sampling, num_together=1))
    other = generate(config_of(run), run, Request(PROMPTS, NUM_TOKENS, replace(sampling, seed=4)))
    assert [text.tokens for text in all_at_once.texts] == [text.tokens for text in one_by_one.texts]
    assert [text.tokens for text in all_at_once.texts] != [text.tokens for text in other.texts]


def counts(logits, sampling):
    draws = torch.Generator().manual_seed(0)
    return {draw(torch.tensor(logits), sampling, draws) for _ in range(200)}


def test_sampling_draws_among_the_tokens_that_it_allows():
    logits = [0.0, 2.0, 2.0, 1.0]
    assert counts(logits, Sampling(temperature=0)) == {1}
    assert counts(logits, Sampling(temperature=1.0)) == {0, 1, 2, 3}
    assert counts(logits, Sampling(temperature=1.0, top_k=2)) == {1, 2}
    assert counts(logits, Sampling(temperature=1.0, top_k=9)) == {0, 1, 2, 3}
    assert counts(logits, Sampling(temperature=1.0, top_p=0.5)) == {1, 2}
    assert counts(logits, Sampling(temperature=1.0, top_p=1e-9)) == {1}


def test_the_command_writes_texts_or_json(trained, tmp_path, capfd):
    run = str(trained["gpt2"])
    assert main(["generate", run, "--prompt", "the", "--max-tokens", "3", "--temperature", "0"]) == 0
    streamed = capfd.readouterr()
    assert streamed.out.startswith("the")
    assert "3 tokens of prompts in" in streamed.err
    lines = tmp_path / "lines.txt"
    lines.write_text("the\n\ncat\n")
    assert main(["generate", run, "--prompts", str(lines), "--max-tokens", "3", "--temperature", "0", "--json"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["the", "cat"]
    assert "the" + found[0]["continuation"] == streamed.out.rstrip("\n")
    assert {len(one["tokens"]) for one in found} == {3}


def test_a_prompt_may_have_several_lines(trained, capfd):
    words = ["--prompt", "a\ncat", "--prompt=a\ndog", "--max-tokens", "2", "--json"]
    assert main(["generate", str(trained["llama"]), *words[2:]]) == 0
    assert json.loads(capfd.readouterr().out)["prompt"] == "a\ndog"
    assert main(["generate", str(trained["llama"]), *words[:2], *words[3:]]) == 0
    assert json.loads(capfd.readouterr().out)["prompt"] == "a\ncat"
    assert main(["generate", "a\nb", *words[2:]]) == 2
    assert "expected arguments of one line" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one of --prompt TEXT and --prompts FILE, found neither"),
        (["--prompt", "a", "--prompts", "b"], "expected one of --prompt TEXT and --prompts FILE, found both"),
        (["--prompt", "a" * 30], "prompt 1 has 30 tokens, which with 100 more are 130"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens must be at least 1, found 0"),
        (["--prompt", "a", "--seed", str(2**63)], "--seed must be at most 9,223,372,036,854,775,807"),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be above 0, found 0.0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature must be"),
        (["--prompt", "a", "--layout.dp", "2"], "--layout.dp has no effect on generate"),
        (["--prompt", "a", "--layout.pp", "9"], "need"),
        (["--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompt", "a", "--layout.loops", "auto"], "set a number of layout.loops"),
        (["--prompt", "a", "--layout.loops", "auto", "--layout.pp", "2"], "set a number of layout.loops"),
        (
            ["--prompt", "a", "--temperature", "0", "--top-k", "3", "--top-p", "1", "--seed", "0"],
            "--top-k, --top-p, --seed have no effect with --temperature 0; leave them out",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(trained, capsys, words, message):
    assert main(["generate", str(trained["llama"]), *words]) == 2
    written = capsys.readouterr()
    assert message in written.err
    assert written.out == ""
