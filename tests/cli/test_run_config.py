"""Flags over a file."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from pipeloom import load_run
from pipeloom.cli import evaluate, generate, main, simulate, train
from pipeloom.cli.run_config import parse_config, parse_words
from pipeloom.config import OptimizerConfig, ScheduleConfig
from pipeloom.errors import ConfigError
from pipeloom.families import Choice
from pipeloom.system.host_memory import Available

FILE = "[model]\nnum_layers = 6\n[layout]\npp = 2\nloops = 2\npartition = [1, 3, 3, 1]\n"


def layout(tmp_path, *flags):
    file = tmp_path / "config.toml"
    file.write_text(FILE, encoding="utf-8")
    return parse_config(train.COMMAND, [str(file), *flags]).layout


def test_a_files_partition_holds_for_its_number_of_stages(tmp_path):
    assert layout(tmp_path, "--layout.dp", "2").partition == (1, 3, 3, 1)
    assert layout(tmp_path, "--layout.pp", "4", "--layout.loops", "1").partition == (1, 3, 3, 1)


def test_flags_for_another_number_of_stages_leave_it_out(tmp_path):
    found = layout(tmp_path, "--layout.loops", "1")
    assert (found.num_stages, found.partition) == (2, None)


def test_flags_for_another_number_of_layers_leave_it_out(tmp_path):
    found = layout(tmp_path, "--model.num-layers", "7")
    assert (found.num_stages, found.partition) == (4, None)
    assert layout(tmp_path, "--model.num-layers", "7", "--layout.partition", "2", "3", "3", "1").partition == (
        2,
        3,
        3,
        1,
    )
    assert layout(tmp_path, "--model.num-layers", "6").partition == (1, 3, 3, 1)
    file = tmp_path / "config.toml"
    assert load_run(file, model={"num_layers": 7}).layout.partition is None


def test_a_partition_among_the_flags_is_held_to_what_they_ask_for(tmp_path):
    flags = ("--layout.loops", "1", "--layout.partition")
    assert layout(tmp_path, *flags, "4", "4").partition == (4, 4)
    with pytest.raises(ConfigError, match="must name 2 stages, found 3"):
        layout(tmp_path, *flags, "4", "2", "2")


@pytest.mark.parametrize(("family", "loops"), [("1f1b", 1), ("gpipe", 1), ("zb-v", 2), ("breadth-first", 2)])
def test_unset_loops_are_the_only_number_that_the_family_takes(family, loops):
    words = ["--layout.pp", "2", "--schedule.family", family]
    config = parse_config(train.COMMAND, words)
    assert config.layout.num_stages == 2 * loops
    assert load_run(layout={"pp": 2}, schedule={"family": family}).layout.num_stages == 2 * loops


def test_loops_that_the_family_lacks_are_refused_where_they_are_set():
    with pytest.raises(ConfigError, match="1f1b runs one stage on each rank, found loops 2"):
        parse_config(train.COMMAND, ["--schedule.family", "1f1b", "--layout.loops", "2"])


def test_a_family_of_the_flags_has_its_own_loops_and_leaves_a_files_partition_out(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[layout]\npp = 2\npartition = [3, 2, 2, 3]\n", encoding="utf-8")
    found = parse_config(train.COMMAND, [str(file), "--schedule.family", "1f1b"]).layout
    assert (found.num_stages, found.partition) == (2, None)


def group_size(tmp_path, of_file, *flags):
    file = tmp_path / "config.toml"
    order = f'[schedule]\nfamily = "hybrid"\ngroup_size = {of_file}\n'
    file.write_text(f"[layout]\npp = 2\nloops = 2\nnum_microbatches = 8\n{order}", encoding="utf-8")
    return parse_config(train.COMMAND, [str(file), *flags]).schedule.group_size


def test_a_group_size_that_came_from_the_pipeline_ranks_goes_with_them(tmp_path):
    assert group_size(tmp_path, 2, "--layout.dp", "2") == 2
    assert group_size(tmp_path, 2, "--layout.pp", "4") is None
    assert group_size(tmp_path, 2, "--layout.pp", "4", "--schedule.group-size", "6") == 6
    assert group_size(tmp_path, 5, "--layout.pp", "4") == 5


def test_a_file_s_number_of_micro_batches_goes_where_flags_give_each_replica_its_own(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[layout]\npp = 1\nloops = 1\nnum_microbatches = 2\n", encoding="utf-8")
    words = [str(file), "--layout.dp", "2", "--layout.microbatches", "1", "3"]
    assert parse_config(train.COMMAND, words).layout.num_microbatches == 3
    assert load_run(file, layout={"dp": 2, "microbatches": [1, 3]}).layout.num_microbatches == 3
    with pytest.raises(ConfigError, match="num_microbatches 7 has no effect with layout.microbatches; leave it out"):
        parse_config(train.COMMAND, [*words, "--layout.num-microbatches", "7"])


def test_a_value_behind_a_flag_that_takes_none_is_reported_with_everything_else(tmp_path):
    with pytest.raises(ConfigError) as refused:
        layout(tmp_path, "--schedule.balance", "true", "--layout.sequence-parallel", "False", "--layout.dp", "0")
    assert refused.value.problems[:2] == (
        "--schedule.balance takes no value: write --schedule.balance for true, --schedule.no-balance for false",
        (
            "--layout.sequence-parallel takes no value: write --layout.sequence-parallel for true, "
            "--layout.no-sequence-parallel for false"
        ),
    )
    assert "layout.dp must be at least 1, found 0" in refused.value.problems
    assert layout(tmp_path, "--layout.tp", "2", "--layout.sequence-parallel").sequence_parallel


def test_paths_of_a_file_begin_at_its_folder_and_those_of_flags_at_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "current").mkdir()
    for text in (tmp_path / "runs" / "file.txt", tmp_path / "current" / "flag.txt"):
        text.write_text("words")
    (tmp_path / "runs" / "run.toml").write_text('data.path = "file.txt"\ndata.cache = "cache"\n')
    monkeypatch.chdir(tmp_path / "current")
    config = parse_config(train.COMMAND, ["../runs/run.toml"])
    assert config.data.path == tmp_path / "runs" / "file.txt"
    config = parse_config(train.COMMAND, ["../runs/run.toml", "--data.path", "flag.txt"])
    assert config.data.path == Path("flag.txt")
    assert config.data.cache == tmp_path / "runs" / "cache"
    with pytest.raises(ConfigError, match="found nothing at file.txt"):
        parse_config(train.COMMAND, ["../runs/run.toml", "--data.path", "file.txt"])


def test_home_is_expanded_in_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text").write_text("words")
    assert parse_config(train.COMMAND, ["--data.path=~/text"]).data.path == tmp_path / "text"


@pytest.mark.parametrize("words", [("--data.path", "."), ("--data.path=./",)])
def test_a_dot_is_the_current_folder_and_no_empty_path(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert parse_config(train.COMMAND, list(words)).data.path == tmp_path
    with pytest.raises(ConfigError, match="--data.path must be a path, found ''"):
        parse_config(train.COMMAND, ["--data.path", ""])


def there(monkeypatch, size_bytes):
    """Let a host have so much memory; the module's name is also that of a function in its package."""
    module = import_module("pipeloom.families.family")
    monkeypatch.setattr(module, "available_memory", lambda: Available(size_bytes, "free on this host"))


HUGE = {
    "micro-batches": (["--layout.num-microbatches", "100000000"], "1,600,000,000 actions"),
    "ranks": (["--layout.pp", "1000000000"], "32,000,000,000 actions"),
    "loops": (["--layout.loops", "1000000000"], "64,000,000,000 actions"),
    "slices": (["--layout.token-slices", "1000000000", "--data.seq-len", "1000000000"], "128,000,000,000 actions"),
    "layers": (["--model.num-layers", "10000000"], "model.num_layers must be at most 100,000, found 10,000,000"),
}


READERS = ("train", "verify", "slices", "simulate", "launch")


@pytest.mark.parametrize(("command", "what"), list(zip(READERS, HUGE, strict=True)))
def test_what_no_memory_holds_is_refused_before_it_is_made(monkeypatch, capsys, command, what):
    there(monkeypatch, 8e9)
    flags, message = HUGE[what]
    assert main([command, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "gpipe", "--num-microbatches", "100000000"],
        ["schedule", "1f1b", "--pp", "1000000000"],
        ["schedule", "zb-v", "--slices", "1000000000"],
        ["families", "--num-microbatches", "100000000"],
        ["families", "--loops", "1000000000"],
    ],
    ids=" ".join,
)
def test_a_schedule_that_no_memory_holds_is_refused_before_it_is_made(monkeypatch, capsys, words):
    there(monkeypatch, 8e9)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "8 GB are free on this host; choose smaller numbers" in captured.err


def test_a_schedule_that_fits_is_not_refused(monkeypatch):
    choice = Choice(family="gpipe", pp=1, num_microbatches=1_000_000)
    there(monkeypatch, choice.least_bytes)
    assert choice.problems() == []
    there(monkeypatch, choice.least_bytes - 1)
    assert len(choice.problems()) == 1


def test_a_vocabulary_below_the_bytes_is_found_before_text_is_read():
    with pytest.raises(
        ConfigError, match="model.vocab_size must be at least 257, the number of tokens of data.tokenizer bytes"
    ):
        parse_config(train.COMMAND, ["--model.vocab-size", "100"])
    assert parse_config(train.COMMAND, ["--model.vocab-size", "257"]).model.vocab_size == 257
    bpe = ["--data.tokenizer", "bpe", "--model.vocab-size", "256"]
    assert parse_config(train.COMMAND, bpe).model.vocab_size == 256


def test_a_tokenizer_larger_than_the_vocabulary_of_a_model_file_is_another_models(tmp_path):
    """Whoever starts from a file has not set the size, and cannot leave it out."""
    file = tmp_path / "model.toml"
    sizes = 'layers = 2\nhidden = 16\nheads = 2\nffn = 32\nfamily = "llama"\ntied = false\n'
    file.write_text(f'name = "tiny"\nvocab = 100\n{sizes}')
    words = ["--model.file", str(file), "--data.path", str(file), "--data.tokenizer", "bytes"]
    words += ["--optimizer.lr", "1", "--optimizer.lr-warmup-steps", "1", "--training.steps", "1"]
    with pytest.raises(
        ConfigError, match="found 100; set data.tokenizer to one of at most 100 tokens, the size of .*model.toml"
    ):
        parse_config(train.COMMAND, words)


def test_a_flag_that_a_command_does_not_read_is_refused_by_name():
    with pytest.raises(ConfigError) as refusal:
        parse_config(simulate.COMMAND, ["--training.threads", "2", "--training.no-compile"])
    assert [problem.partition(";")[0] for problem in refusal.value.problems] == [
        "--training.threads has no effect on simulate",
        "--training.no-compile has no effect on simulate",
    ]
    with pytest.raises(ConfigError, match="--machine.cluster has no effect on train"):
        parse_config(train.COMMAND, ["--machine.cluster=laptop"])


def test_simulate_takes_every_setting_that_changes_a_prediction_as_a_flag(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('optimizer.name = "lomo"\ntraining.dtype = "bfloat16"\nmachine.cluster = "dgx-h100"\n')
    on_cpus = ["--machine.cluster", "laptop"]

    def step(*flags):
        assert main(["simulate", str(file), "--json", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["step_time_s"], found["memory"]

    for flags, on in (
        (["--training.matmul-dtype", "float8"], []),
        (["--optimizer.no-wide-weights"], []),
        (["--data.attention", "document"], on_cpus),
        (["--optimizer.outer-delayed"], ["--layout.dp", "2", "--layout.average-every", "5"]),
    ):
        assert step(*flags, *on) != step(*on)


OF_PLUGINS = """
[layout]
pp = 2
loops = 2
[schedule]
family = "eager"
group_size = 3
[optimizer]
name = "lion"
betas = [0.9, 0.98]
settings = ["power=2"]
"""


@pytest.fixture
def of_plugins(tmp_path):
    """A run with an optimizer and a family of a distribution that is not installed."""
    (tmp_path / "config.toml").write_text(OF_PLUGINS)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "judge", "words"),
    [
        (evaluate.COMMAND, evaluate._judge, ["--data.path", "."]),
        (generate.COMMAND, generate._problems, ["--prompt", "To be"]),
    ],
    ids=["evaluate", "generate"],
)
def test_what_reads_a_trained_model_needs_neither_its_optimizer_nor_its_family(of_plugins, command, judge, words):
    found = parse_words(command, [str(of_plugins), *words], judge).options
    assert (found.optimizer, found.schedule) == (OptimizerConfig(), ScheduleConfig())


def test_a_family_of_a_flag_is_refused_there(of_plugins):
    words = [str(of_plugins), "--schedule.family", "eager"]
    with pytest.raises(ConfigError, match="--schedule.family has no effect on evaluate"):
        parse_words(evaluate.COMMAND, words, evaluate._judge)


def test_training_needs_both(of_plugins):
    with pytest.raises(ConfigError, match="2 problems") as refused:
        parse_config(train.COMMAND, [str(of_plugins / "config.toml")])
    assert "there is no optimizer 'lion'" in str(refused.value)
    assert "there is no schedule 'eager'" in str(refused.value)


def refusals(*words):
    with pytest.raises(ConfigError) as error:
        parse_config(simulate.COMMAND, list(words))
    return list(error.value.problems)


def test_a_given_size_that_is_a_default_is_refused_where_the_preset_has_another(tmp_path):
    wrong = "model.num_layers must be 32, as in model.preset llama-3-8b, found 8; leave model.num_layers out"
    cluster = ("--machine.cluster", "dgx-h100")
    assert refusals("--model.preset", "llama-3-8b", "--model.num-layers", "8", *cluster) == [wrong]
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "llama-3-8b"\nnum_layers = 8\n', encoding="utf-8")
    assert refusals(str(file), *cluster) == [wrong]
    for settings in ({"model": {"preset": "llama-3-8b", "num_layers": 8}}, {}):
        with pytest.raises(ConfigError) as error:
            load_run(None if settings else file, **settings)
        assert list(error.value.problems) == [wrong]


def test_a_given_size_may_be_that_of_the_preset_or_none():
    words = ("--model.preset", "llama-3-8b", "--model.num-layers", "32", "--model.head-size", "None")
    found = parse_config(simulate.COMMAND, [*words, "--machine.cluster", "dgx-h100"])
    assert found.model.num_layers == 32
