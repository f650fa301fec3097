"""Where stages cannot be compiled, a run prints that before anything starts."""

import sysconfig
from dataclasses import replace

import pytest

from pipeloom.config import RunConfig, ScheduleConfig, TrainingConfig, find_problems
from pipeloom.system.toolchain import toolchain_problems
from pipeloom.workload.layout import Layout


def problems_of(**training):
    return find_problems(RunConfig(training=TrainingConfig(compile=True, **training)))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with nothing on its path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_without_a_compiler_the_message_says_which(bare):
    found = [one for one in problems_of() if "compiler" in one]
    sentence = "training.compile needs a C++ compiler, found none of CXX, g++, clang++; install one"
    assert found == [f"{sentence}, or leave training.compile out"]
    assert any("needs a C compiler, found none of CC, gcc" in one for one in problems_of(device="cuda"))


def test_tracing_alone_needs_none(bare):
    assert problems_of(compile_backend="aot_eager") == []
    assert find_problems(RunConfig()) == []


def test_a_compiler_is_found_by_name_or_by_the_environment(bare, monkeypatch):
    other = bare / "my-compiler"
    other.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(other))
    assert not any("compiler" in one for one in toolchain_problems("cpu"))


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert any(f"found no Python.h in {tmp_path}" in one for one in toolchain_problems("cpu"))


def test_a_schedule_that_splits_the_backward_is_compiled_and_one_of_slices_is_not():
    config = RunConfig(
        layout=Layout(loops=1),
        schedule=ScheduleConfig(family="zb-h1"),
        training=TrainingConfig(compile=True, compile_backend="aot_eager"),
    )
    assert find_problems(config) == []
    (problem,) = find_problems(replace(config, layout=replace(config.layout, token_slices="auto")))
    assert problem.startswith("training.compile compiles for sequences of one length, and layout.token_slices cuts")
