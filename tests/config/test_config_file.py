"""Run files."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.config import (
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from pipeloom.config.file import format_run, parse_run, read_run_file
from pipeloom.config.paths import expand_home, with_absolute_paths
from pipeloom.errors import UserError
from pipeloom.workload.layout import Layout

finite = st.floats(allow_nan=False, allow_infinity=False)
paths = st.none() | st.sampled_from([Path("a.txt"), Path("/tmp/with space"), Path('double"quote\\back')])
whole = st.integers(-(2**40), 2**40)
runs = st.builds(
    RunConfig,
    model=st.builds(
        ModelConfig,
        norm_eps=finite,
        rope_theta=finite,
        num_layers=whole,
        preset=st.none() | st.just("gpt-6.6b"),
        tied=st.booleans(),
    ),
    data=st.builds(DataConfig, path=paths, cache=paths, validation_fraction=finite),
    layout=st.builds(Layout, partition=st.none() | st.lists(whole, max_size=4).map(tuple)),
    schedule=st.builds(ScheduleConfig, family=st.text(st.characters(codec="utf-8", exclude_characters="\n"))),
    optimizer=st.builds(
        OptimizerConfig,
        lr=finite,
        betas=st.tuples(finite, finite),
        lr_min_fraction=finite,
        eps=finite,
        weight_decay=finite,
        clip_grad_norm=finite,
    ),
    training=st.builds(TrainingConfig, stall_timeout_s=finite),
    output=st.builds(OutputConfig, folder=paths),
)


def read(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return read_run_file(file)


@settings(max_examples=30, deadline=None)
@given(runs)
def test_a_run_file_repeats_the_configuration(tmp_path_factory, config):
    folder = tmp_path_factory.getbasetemp()
    assert read(folder, format_run(config)) == (with_absolute_paths(config), [])


def test_a_run_file_says_nothing_that_a_preset_or_named_layers_replace():
    layout = Layout(recompute_layers=("full", "none"))
    text = format_run(RunConfig(model=ModelConfig(preset="gpt-6.6b"), layout=layout))
    printed = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip()
    assert printed.startswith('[model]\npreset = "gpt-6.6b"\n\n')
    assert "recompute =" not in text
    assert 'recompute_layers = ["full", "none"]\n' in text
    assert parse_run(tomllib.loads(text))[0].layout == layout


def test_a_run_file_repeats_a_run_without_clipping(tmp_path):
    config = replace(RunConfig(), optimizer=replace(RunConfig().optimizer, clip_grad_norm=float("inf")))
    assert read(tmp_path, format_run(config)) == (config, [])


def test_an_empty_file_is_the_default_run(tmp_path):
    assert read(tmp_path, "") == (RunConfig(), [])


def test_a_file_overrides_the_default_that_it_is_given(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("layout.loops = 3\n", encoding="utf-8")
    default = replace(RunConfig(), layout=Layout(pp=2, loops=4), output=OutputConfig(folder=Path("/there")))
    assert read_run_file(file, default) == (replace(default, layout=Layout(pp=2, loops=3)), [])


def test_values_of_a_file_override_the_defaults(tmp_path):
    config, problems = read(
        tmp_path,
        'model.family = "gpt2"\n[layout]\npp = 2\npartition = [5, 5]\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n'
        '[data]\npath = "corpus"\n',
    )
    assert problems == []
    assert config.model.family == "gpt2"
    assert (config.layout.pp, config.layout.loops, config.layout.partition) == (2, RunConfig().layout.loops, (5, 5))
    assert (config.optimizer.lr, config.optimizer.betas) == (1.0, (0.8, 0.9))
    assert config.data.path == tmp_path / "corpus"


def test_five_mistakes_are_five_sentences_and_the_rest_of_the_file_counts(tmp_path):
    config, problems = read(
        tmp_path,
        """
        modl.num_layers = 4
        [layout]
        pp = "four"
        loop = 3
        num_microbatches = 12
        [optimizer]
        betas = [0.9]
        [training]
        dtype = "float8"
        """,
    )
    assert len(problems) == 5
    sentences = "\n".join(sorted(problems))
    assert "there is no setting 'modl'; did you mean 'model'?" in sentences
    assert "there is no setting 'layout.loop'; did you mean 'layout.loops'?" in sentences
    assert "layout.pp must be a whole number" in sentences
    assert "found 'four'" in sentences
    assert "optimizer.betas must be a list" in sentences
    assert "training.dtype must be 'float32'" in sentences
    assert "found 'float8'" in sentences
    assert config == replace(RunConfig(), layout=replace(RunConfig().layout, num_microbatches=12))


def test_an_unknown_key_that_is_like_no_other_lists_what_there_is():
    _, problems = parse_run({"output": {"zzzzzz": 1}})
    assert problems == ["there is no setting 'output.zzzzzz'; known: folder, trace_step, profile, log"]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"layout": {"lr": 3}}, "there is no setting 'layout.lr'; did you mean 'optimizer.lr'?"),
        ({"pp": 2}, "there is no setting 'pp'; did you mean 'layout.pp'?"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be a list of two numbers, found [0.9]"),
        ({"layout": {"token_slices": [1, "a"]}}, "each of layout.token_slices must be a whole number, found 'a'"),
        ({"layout": {"partition": [1, "a"]}}, "each of layout.partition must be a whole number, found 'a'"),
        (
            {"layout": {"token_slices": "a"}},
            "layout.token_slices must be a whole number or a list or 'auto', found 'a'",
        ),
    ],
)
def test_a_wrong_place_or_type_is_one_sentence_with_the_right_one(tree, problem):
    assert parse_run(tree) == (RunConfig(), [problem])


def test_betas_are_the_only_list_of_a_fixed_length():
    sections = get_type_hints(RunConfig)
    hints = {
        f"{section}.{name}": hint for section, one in sections.items() for name, hint in get_type_hints(one).items()
    }
    lists = {name: one for name, hint in hints.items() for one in (hint, *get_args(hint)) if get_origin(one) is tuple}
    assert [name for name, one in lists.items() if ... not in get_args(one)] == ["optimizer.betas"]


@pytest.mark.parametrize("value", [3, "text", [1, 2]])
def test_a_section_that_is_no_table_is_named(value):
    config, problems = parse_run({"model": value, "layout": {"pp": 3}})
    (problem,) = problems
    assert problem.startswith("model must be a section")
    assert config.model == RunConfig().model
    assert config.layout.pp == 3


def test_two_wrong_items_of_one_value_do_not_hide_other_mistakes():
    config, problems = parse_run({"layout": {"partition": ["a", "b"], "pp": None}})
    assert {problem.split(" must")[0] for problem in problems} == {"each of layout.partition", "layout.pp"}
    assert config == RunConfig()


def test_a_file_that_is_not_there_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot read the configuration .*missing.toml"):
        read_run_file(tmp_path / "missing.toml")


def test_a_folder_in_place_of_a_file_is_refused_with_a_file_in_it(tmp_path):
    with pytest.raises(UserError, match="expected a run file, found a folder without one"):
        read_run_file(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="found a folder; did you mean '.*config.toml'"):
        read_run_file(tmp_path)


def test_a_file_that_is_not_toml_is_refused_with_the_line(tmp_path):
    with pytest.raises(UserError, match="is not TOML: .*line 2"):
        read(tmp_path, "[model]\nnum_layers = \n")


def test_a_file_that_is_not_text_is_the_users_error(tmp_path):
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read the configuration"):
        read_run_file(file)


PATHS = {
    "model.file",
    "data.path",
    "data.cache",
    "schedule.swap_folder",
    "checkpoint.resume",
    "output.folder",
    "machine.cluster",
    "machine.software",
}


def paths_of(config):
    return {name: str(getattr(getattr(config, name.split(".")[0]), name.split(".")[1])) for name in PATHS}


def test_every_path_of_a_file_begins_at_the_folder_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    text = "".join(f'{name} = "../there/x.toml"\n' for name in PATHS)
    (tmp_path / "runs" / "run.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config, problems = read_run_file(Path("runs/run.toml"))
    assert problems == []
    assert paths_of(config) == dict.fromkeys(PATHS, str(tmp_path / "there" / "x.toml"))


@pytest.mark.parametrize("dot", [".", "./"])
def test_a_dot_is_the_folder_of_the_file_and_an_empty_path_is_refused(tmp_path, dot):
    config, problems = read(
        tmp_path, f'[data]\npath = "{dot}"\n[checkpoint]\nresume = "{dot}"\n[output]\nfolder = ""\n'
    )
    assert (config.data.path, config.checkpoint.resume, config.output.folder) == (tmp_path, tmp_path, None)
    assert problems == ["output.folder must be a path, found ''"]
    assert with_absolute_paths(DataConfig(path=Path())).path == Path.cwd()
    config, problems = read(tmp_path, f'[[data.sources]]\npath = "{dot}"\n')
    assert (config.data.sources[0].path, problems) == (tmp_path, [])


def test_a_path_through_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "far" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "far" / "runs")
    (tmp_path / "runs" / "run.toml").write_text('data.path = "../text"')
    config, _ = read_run_file(tmp_path / "runs" / "run.toml")
    assert config.data.path.resolve() == tmp_path / "far" / "text"


def test_every_path_of_a_file_may_be_absolute_or_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for written, found in [("/data/x.toml", "/data/x.toml"), ("~/x.toml", "/home/me/x.toml")]:
        config, _ = read(tmp_path, "".join(f'{name} = "{written}"\n' for name in PATHS))
        assert paths_of(config) == dict.fromkeys(PATHS, found)


def test_names_of_the_catalog_are_no_paths(tmp_path):
    config, _ = read(tmp_path, 'machine.cluster = "dgx-a100"\nmachine.software = "megatron-lm"\n')
    assert (config.machine.cluster, config.machine.software) == ("dgx-a100", "megatron-lm")
    assert with_absolute_paths(config) == config


def test_a_run_is_written_so_that_it_means_the_same_in_any_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        data=DataConfig(path=Path("text"), cache=Path("cache")), machine=MachineConfig(cluster="mine.toml")
    )
    text = format_run(config)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again, _ = read(tmp_path / "elsewhere", text)
    assert (again.data.path, again.data.cache) == (tmp_path / "text", tmp_path / "cache")
    assert again.machine.cluster == str(tmp_path / "mine.toml")


def test_home_is_expanded_where_there_is_one(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_home(Path("~/text")) == Path("/home/me/text")
    assert expand_home(Path("~nobody-of-this-name/cache")) == Path("~nobody-of-this-name/cache")
