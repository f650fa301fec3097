"""Inputs of Calculon, and what becomes of its answer; the program itself is replaced by one that adds up its inputs."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pipeloom.accuracy import calculon
from pipeloom.accuracy.programs import cluster_of, program_of
from pipeloom.accuracy.rows import read_rows

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]
PROGRAM = program_of(ROW)[1]
CLUSTER = cluster_of(ROW, PROGRAM)


class RefusedError(Exception):
    """As ``Llm.Error``."""


class Llm:
    """Takes a second for each device of the layout and GB/s of the first network; refuses three layers."""

    Error = RefusedError
    Application = SimpleNamespace
    Execution = SimpleNamespace(from_json=lambda values: values)

    def __init__(self, application, log):
        self.layers = application.num_blocks

    def compile(self, system, execution):
        if self.layers == 3:
            raise RefusedError
        self.seconds = execution["num_procs"] + system["networks"][0]["bandwidth"]

    def run(self, system):
        assert system["mem1"]["GiB"] > 1e5

    def get_total_time(self):
        return self.seconds


@pytest.fixture
def program(monkeypatch):
    """The module ``calculon.llm``."""
    package, llm, system = (ModuleType(name) for name in ("calculon", "calculon.llm", "calculon.system"))
    Llm.Application = lambda values: SimpleNamespace(**values)
    llm.Llm, system.System = Llm, lambda values: values
    for module in (package, llm, system):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return llm


def test_another_package_of_that_name_is_not_it(monkeypatch):
    for name in ("calculon.llm", "calculon.system"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "calculon", ModuleType("calculon"))
    assert calculon.installed() is None


def test_its_seconds_follow_from_the_layout_and_the_cluster(program):
    assert calculon.installed() is program
    seconds = ROW.run.num_devices + CLUSTER.intra.bytes_per_s / 1e9
    assert calculon.step_s(program, ROW, CLUSTER, PROGRAM) == pytest.approx(seconds)


def test_a_layout_that_it_refuses_has_no_prediction(program):
    few = replace(ROW, run=replace(ROW.run, shape=replace(ROW.run.shape, layers=3)))
    assert calculon.step_s(program, few, CLUSTER, PROGRAM) is None


def test_a_third_matrix_of_an_mlp_is_a_wider_inner_layer():
    shape = ROW.run.shape
    assert calculon.application_of(ROW.run)["feedforward"] == shape.ffn
    gated = replace(ROW.run, shape=replace(shape, family="llama"))
    assert calculon.application_of(gated)["feedforward"] == shape.ffn * 3 // 2


def test_groups_over_nodes_use_the_network():
    one = calculon.execution_of(ROW.run, CLUSTER, PROGRAM)
    assert one["tensor_par_net"] == 0
    assert one["data_par_net"] == one["pipeline_par_net"] == int(ROW.run.num_devices > 8)
    assert one["tensor_par"] * one["pipeline_par"] * one["data_par"] == one["num_procs"]
