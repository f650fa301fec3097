"""The examples of docs/extending.md, installed as distributions of their own, work in every command."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from commands import TRAINS, run_command
from plugins import write_plugin

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```toml\n(.*?)```", PAGE, flags=re.S)
QUESTION = ("--model", "gpt-6.6b", "--devices", "8", "--global-batch", "16", "--seq", "512", "--no-explain", "--json")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the distributions of all examples."""
    folder = tmp_path_factory.mktemp("site")
    for code, project in EXAMPLES:
        ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
        ((name, module),) = points.items()
        write_plugin(folder, module, code, {group: name})
    return folder


@pytest.fixture
def answer(site, tmp_path):
    """What a command prints with the examples installed; JSON is read."""
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*words):
        path = os.pathsep.join([str(site), *sys.path])
        done, _ = run_command(*words, folder=folder, imported=TRAINS, PYTHONPATH=path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return json.loads(done.stdout) if "--json" in words else done.stdout

    return run


def test_a_cluster(answer):
    planned = answer("plan", "--cluster", "XPU_farm", *QUESTION, "--pp", "8", "--best", "1")
    assert planned["question"]["cluster"] == "xpu-farm"
    assert planned["layouts"][0]["step_time_s"] > 0
    assert answer("simulate", "--machine.cluster", "xpu-farm", "--json")["step_time_s"] > 0
    assert "xpu-farm" in answer("launch", "--machine.cluster", "xpu-farm", "--out", "start")


TINY = ("--model.num-layers", "2", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8")
SHORT = ("--training.steps", "4", "--training.no-predict", "--training.validation-batches", "0")
SHORT = (*SHORT, "--training.sample-tokens", "0", "--layout.microbatch-size", "1", "--checkpoint.final", "none")


@pytest.mark.timeout(300)  # three runs over processes
def test_an_optimizer(answer, site, tmp_path):
    (tmp_path / "here" / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 99)

    def losses(folder, *words):
        answer(
            "train",
            *TINY,
            *SHORT,
            "--data.path",
            "text.txt",
            "--optimizer.name",
            "lion",
            "--output.folder",
            folder,
            *words,
        )
        lines = (tmp_path / "here" / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    split = ("--layout.pp", "1", "--layout.dp", "2", "--layout.shard", "optimizer", "--layout.num-microbatches", "4")
    whole = losses("one", "--layout.pp", "2", "--checkpoint.every", "2")
    checkpoint = min((tmp_path / "here" / "one" / "checkpoints").iterdir())
    again = losses("other", *split, "--checkpoint.resume", str(checkpoint))
    swapped = losses("swapped", "--layout.pp", "1", "--layout.loops", "4", "--schedule.device-budget", "64KiB")
    assert again[-2:] == pytest.approx(whole[-2:], rel=1e-5)
    assert swapped == pytest.approx(whole, rel=1e-5)
    state = {name: _state_bytes(answer, "--optimizer.name", name) for name in ("adamw", "lion", "sgd")}
    assert 2 * state["lion"] == 2 * state["sgd"] == state["adamw"]
    done, _ = run_command("train", "--optimizer.name", "lion", "--optimizer.eps", "1", folder=tmp_path / "here",
                       PYTHONPATH=os.pathsep.join([str(site), *sys.path]))  # fmt: skip
    assert done.returncode == 2
    assert "optimizer.eps has no effect with optimizer.name lion, which takes betas, weight_decay" in done.stderr


def _state_bytes(answer, *words):
    return answer("simulate", "--training.dtype", "float32", *words, "--json")["memory"][0]["optimizer_bytes"]


CONFIG_JSON = {"model_type": "squared_relu", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
               "intermediate_size": 64, "vocab_size": 257, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}  # fmt: skip


def test_a_family_of_models(answer, tmp_path):
    family = ("--model.family", "squared-relu")
    (tmp_path / "here" / "config.json").write_text(json.dumps(CONFIG_JSON))
    layout = ("--layout.pp", "2", "--layout.tp", "2", "--layout.sequence-parallel", "--layout.num-microbatches", "2")
    assert "EQUAL" in answer("verify", *TINY, *family, *layout)
    named, read = (answer("simulate", *which, "--data.seq-len", "8", "--layout.pp", "2", "--json")
                   for which in ((*TINY, *family), ("--model.file", "config.json")))  # fmt: skip
    assert named["step_time_s"] == read["step_time_s"]
    assert named["run"]["shape"]["family"] == "squared-relu"
    (tmp_path / "here" / "run.toml").write_text('[model]\nfamily = "squared-relu"\nhidden_size = 768\n')
    planned = answer("plan", "run.toml", "--cluster", "xpu-farm", "--devices", "4", "--no-explain", "--json")
    assert planned["question"]["model"]["family"] == "squared-relu"
    assert planned["layouts"]
    assert "torchrun" in answer("launch", "run.toml", "--out", "start", "--to", "torchrun")


def test_a_strategy(answer, tmp_path):
    question = "--model llama-13b --cluster dgx-1-v100 --devices 16 --global-batch 32 --seq 2048 --pp 16 --loops 1"
    question = [*question.split(), "--families", "1f1b", "--recompute", "none", "--no-explain"]
    plain = answer("plan", *question, "--strategies", "none", "keep-one", "--out", "plan", "--json")
    assert plain["question"]["limits"]["strategies"] == ["none", "keep-one"]
    assert plain["layouts"][0]["keep"] == [1] * 16
    assert plain["counts"]["tried"] > 0
    (tmp_path / "here" / "plan" / "schedule.txt").unlink(missing_ok=True)
    again = answer("simulate", "plan/run.toml", "--json")
    assert again["step_time_s"] == pytest.approx(plain["layouts"][0]["step_time_s"])
