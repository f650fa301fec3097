"""Where stages cannot be compiled, a run says so before anything starts."""

import sysconfig
from dataclasses import replace

import pytest

from pipeloom.config import RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.generate import FAMILIES
from pipeloom.generate.family import Rows, backward, family, forward
from pipeloom.schedule import Kind
from pipeloom.toolchain import toolchain_problems


def problems_of(**training):
    return RunConfig(training=TrainingConfig(compile=True, **training)).problems()


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
    assert RunConfig().problems() == []


def test_a_compiler_is_found_by_name_or_by_the_environment(bare, monkeypatch):
    other = bare / "my-compiler"
    other.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(other))
    assert not any("compiler" in one for one in toolchain_problems("cpu"))


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert any(f"found no Python.h in {tmp_path}" in one for one in toolchain_problems("cpu"))


@pytest.fixture
def split_family():
    @family("split", is_looped=False)
    def split(request):
        """Each backward in two halves."""
        rows = []
        for rank in range(request.placement.num_ranks):
            halves = [
                backward(rank, m)._replace(kind=kind)
                for m in range(request.num_microbatches)
                for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            ]
            rows.append([*(forward(rank, m) for m in range(request.num_microbatches)), *halves])
        return Rows(rows, [request.num_microbatches] * len(rows))

    yield "split"
    del FAMILIES["split"]


def test_a_schedule_that_splits_the_backward_cannot_be_compiled(split_family):
    config = RunConfig(
        schedule=ScheduleConfig(family=split_family),
        training=TrainingConfig(compile=True, compile_backend="aot_eager"),
    )
    config = replace(config, layout=replace(config.layout, loops=1))
    (problem,) = config.problems()
    assert "schedule.family split splits in two; leave training.compile out" in problem
    assert replace(config, training=TrainingConfig()).problems() == []
