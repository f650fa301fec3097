"""Plans of runs that update each stage within the step: what is searched is simulated, trained and kept in memory."""

import json

import pytest

from pipeloom.cli import main
from pipeloom.config import find_problems
from pipeloom.predict.describe import load_run

LOMO = """optimizer.name = "lomo"
optimizer.clip = "none"
optimizer.update = "stage"
data.seq_len = 256
layout.num_microbatches = 8
"""
ONE = ["--micro-batch", "1"]
LARGE = [
    "--model",
    "gpt-6.6b",
    "--seq",
    "1024",
    "--pp",
    "4",
    "--families",
    "1f1b",
    "breadth-first",
]
SIZES = {
    "7B": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008},
    "65B": {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 22016},
}


@pytest.fixture
def planned(tmp_path, capsys):
    """Plan a run file with words of the command line -> exit status, what was printed, and the errors."""

    def plan(lines, *words):
        run = tmp_path / "run.toml"
        run.write_text(lines)
        status = main(["plan", str(run), "--no-explain", "--json", *words])
        out, err = capsys.readouterr()
        return status, out, " ".join(err.split())

    return plan


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--pp", "4", "--families", "breadth-first", "--loops", "2", *ONE],
        ["--pp", "2", "--shards", "full", "--families", "breadth-first", "--loops", "4", *ONE],
        ["--pp", "2", "--shards", "gradients", "--families", "depth-first", "--loops", "2", *ONE],
        ["--pp", "2", "--shards", "full", "--recompute", "none", "full"],
        ["--pp", "4", "--families", "zb-h1"],
        ["--tp", "2", "--pp", "2"],
        ["--pp", "4", "--strategies", "slices", *ONE],
        ["--pp", "2", "--strategies", "order", "--families", "gpipe"],
        [*LARGE, "--machine.memory", "0.2x", "--strategies", "keep"],
        [*LARGE, "--recompute", "none", "--machine.memory", "0.3x", "--strategies", "balance"],
    ],
)
def test_a_plan_is_a_run_that_trains_and_simulates_the_same(planned, tmp_path, capsys, words):
    places = ["--cluster", "dgx-a100", "--devices", "4", "--out", str(tmp_path / "new")]
    status, out, err = planned(LOMO, *places, *words)
    assert status == 0, err
    best, file = json.loads(out)["layouts"][0], tmp_path / "new" / "run.toml"
    config = load_run(file)
    assert config.optimizer.update == "stage"
    assert config.schedule.gradient_buffers is None
    assert find_problems(config, trains=False) == []
    assert main(["simulate", str(file), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["step_time_s"] == pytest.approx(best["step_time_s"])
    assert step["after_s"]["optimizer_s"] == 0
    assert max(memory["total_bytes"] for memory in step["memory"]) == pytest.approx(best["memory_bytes"])


def test_updates_within_the_step_leave_room_for_fewer_shards_and_less_recomputation(planned):
    """Gradients of all stages but one need no memory, so the same devices have a faster layout."""
    words = ["--cluster", "rtx-4090", "--devices", "4", "--model", "llama-3-8b", "--pp", "4"]
    later = LOMO.replace('"stage"', '"step"')
    found = {lines: json.loads(planned(lines, *words)[1])["layouts"] for lines in (LOMO, later)}
    assert not found[later] or found[LOMO][0]["step_time_s"] < found[later][0]["step_time_s"]


@pytest.mark.parametrize(
    ("size", "num_devices", "update", "fits"),
    [
        ("7B", 1, "lomo stage", True),
        ("7B", 1, "lomo step", False),
        ("7B", 1, "adamw step", False),
        ("65B", 8, "lomo stage", True),
        ("65B", 8, "lomo step", False),
        ("65B", 8, "adamw step", False),
    ],
)
def test_what_is_published_to_fit_devices_of_24_gb_does(planned, size, num_devices, update, fits):
    """arXiv 2306.09782: LLaMA 7B on one RTX 3090, 65B on eight, with LOMO; bfloat16 weights, nothing else."""
    name, when = update.split()
    narrow = "optimizer.wide_weights = false\n" if name == "lomo" else ""
    lines = "".join(f"model.{key} = {value}\n" for key, value in SIZES[size].items()) + (
        f'model.family = "llama"\nmodel.vocab_size = 32000\noptimizer.name = "{name}"\noptimizer.clip = "none"\n'
        f'optimizer.update = "{when}"\ntraining.dtype = "bfloat16"\n{narrow}'
    )
    words = ["--cluster", "rtx-4090", "--devices", str(num_devices), "--global-batch", "1", "--seq", "1024"]
    limits = ["--tp", str(num_devices), "--families", "breadth-first", "--strategies", "none"]
    status, out, err = planned(lines, *words, *limits)
    answer = json.loads(out)
    assert bool(answer["layouts"]) == fits, (status, err)


@pytest.mark.parametrize(
    ("lines", "words", "problem"),
    [
        ("", ["--for", "megatron"], "optimizer.update stage: the program updates weights behind the pipeline"),
        ("", ["--software", "nanotron"], "optimizer.update stage needs machine.software pipeloom, found nanotron"),
        ("model.experts = 4\n", ["--ep", "2"], "layout.ep does not work with optimizer.update stage"),
        ("training.check_every = 2\n", [], "optimizer.update stage does not work with training.check_every"),
    ],
)
def test_what_updates_within_the_step_exclude_is_refused(planned, lines, words, problem):
    status, _, err = planned(LOMO + lines, "--cluster", "dgx-a100", "--devices", "4", *words)
    assert status == 2
    assert err.count(problem) == 1


def test_clipping_of_stages_leaves_gradients_whole(planned):
    lines = LOMO.replace('"none"', '"stage"').replace("lomo", "adamw")
    words = ["--cluster", "dgx-a100", "--devices", "4"]
    status, out, err = planned(lines, *words)
    assert status == 0, err
    assert {(one["tp"], one["shard"]) for one in json.loads(out)["layouts"]} == {(1, "none")}
    status, _, err = planned(lines, *words, "--tp", "2", "--shards", "full")
    assert status == 2
    assert err.count("optimizer.update stage with optimizer.clip stage needs tp 1 and shards none") == 1


def test_stages_that_are_swapped_are_planned_with_the_clipping_of_the_run(planned, tmp_path, capsys):
    """Without a norm to wait for, a stage is updated behind its last backward, and moves less often."""
    places = ["--cluster", "dgx-a100", "--devices", "1", "--out", str(tmp_path / "new")]
    limits = ["--model", "gpt-6.6b", "--seq", "1024", "--global-batch", "8", "--strategies", "swap"]
    status, out, err = planned('optimizer.clip = "none"\n', *places, *limits)
    assert status == 0, err
    best, file = json.loads(out)["layouts"][0], tmp_path / "new" / "run.toml"
    assert load_run(file).optimizer.clip == "none"
    assert main(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(best["step_time_s"])
