"""``pipeloom profile``: a file that the other commands read, a table, JSON, refusals."""

import json

import pytest
from machines import findings

import pipeloom.measure.machine
import pipeloom.measure.pieces
from pipeloom.catalog import load_cluster, load_model
from pipeloom.cli import main
from pipeloom.cost.hardware import Group
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.measure.pieces import PieceFindings
from pipeloom.workload.run import Run

QUICK = ["--device", "cpu", "--budget-s", "1"]


def test_two_processes_measure_this_machine_and_the_file_is_a_cluster(tmp_path, capfd):
    file = tmp_path / "here.toml"
    assert main(["profile", *QUICK, "--processes", "2", "--output", str(file), "--json"]) == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    cluster = load_cluster(str(file))
    assert cluster.name == answer["cluster"]["name"] == "here"
    assert cluster.intra.latency_s == pytest.approx(answer["cluster"]["intra"]["latency_s"], rel=1e-5)
    assert "measuring 1/35" in err
    assert 1e7 < cluster.device.peak_flops_per_s["fp32"] < 1e13
    assert 1e8 < cluster.device.memory_bytes_per_s < 1e13
    assert 1e-8 < cluster.device.launch_s < 1e-2
    assert all(curves[0].ranks == 2 for curves in cluster.collective_curves.values())
    assert len(cluster.collective_curves) == 3
    assert 0 < cluster.collective_s("all_reduce", 1e6, Group(2, 2, 1)) < 10
    text = file.read_text()
    assert "# Measured by `pipeloom profile` on 20" in text
    assert "NOT MEASURED, there was one host" in text


@pytest.fixture
def measured(monkeypatch):
    """Findings that need no measuring."""
    requested = []

    def answer(request):
        requested.append(request)
        return findings(**found)

    found = {}
    monkeypatch.setattr(pipeloom.measure.machine, "measure_machine", answer)
    return requested, found


def test_the_table_names_everything_that_was_measured(measured, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    assert main(["profile", *QUICK, "--output", str(file)]) == 0
    out = capsys.readouterr().out
    for words in ("fp32 product, 512 wide", "host's time", "memory, copy", "latency", "all_reduce of 2, 1 MiB, bus"):
        assert words in out
    assert f"pipeloom simulate RUN.toml --machine.cluster {file}" in out
    assert "busy" not in out


def test_one_process_says_that_links_were_skipped_and_a_busy_machine_that_it_was(measured, tmp_path, capsys):
    measured[1].update(intra=None, collectives=(), num_processes=1, per_host=1, core_share=0.5)
    assert main(["profile", *QUICK, "--processes", "1", "--output", str(tmp_path / "mine.toml")]) == 0
    out = capsys.readouterr().out
    assert "links      not measured" in out
    assert "rank 0 had 50% of a core" in out
    assert measured[0][0].num_processes == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "nowhere/mine.toml"], "there is no folder nowhere"),
        (["--output", "."], "--output: expected a file"),
        (["--processes", "0", "--budget-s", "0"], "the command line has 2 problems"),
    ],
)
def test_wrong_input_is_reported_before_anything_is_measured(measured, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert not measured[0]


def test_a_file_that_cannot_be_written_is_reported_before_anything_is_measured(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["profile", "--device", "cpu", "--output", str(tmp_path / "mine.toml")]) == 2
    assert ": no permission" in capsys.readouterr().err
    assert not measured[0]


MODEL = """
name = "tiny"
layers = 2
hidden = 16
heads = 2
ffn = 32
family = "llama"
vocab = 11
tied = false
"""


@pytest.fixture
def tiny(tmp_path):
    """A model's file."""
    file = tmp_path / "tiny.toml"
    file.write_text(MODEL)
    return file


def test_the_pieces_of_a_model_go_into_the_file_and_into_the_table(measured, monkeypatch, tiny, tmp_path, capsys):
    requested = []

    def answer(request):
        requested.append(request)
        shape = load_model(str(tiny))
        key = Run(shape=shape, seq=request.seq_len, tp=2, micro_batch=4, precision="fp32").of_measured_pieces
        pieces = MeasuredPieces(run=key, embedding=(1e-3, 0), layer=(2e-3, 4e-3), head=(1e-3, 1e-3), message_s=5e-4)
        return PieceFindings((pieces,), MeasuredUpdate(fixed_s=1e-3, parameter_s=1e-9, precision="fp32"), 7)

    monkeypatch.setattr(pipeloom.measure.pieces, "measure_pieces", answer)
    file = tmp_path / "mine.toml"
    words = ["profile", *QUICK, "--processes", "2", "--output", str(file), "--model", str(tiny), "--seq", "64"]
    assert main([*words, "--micro-batches", "4", "--tp", "2", "--recompute", "none", "full"]) == 0
    (request,) = requested
    assert (request.model.hidden_size, request.model.vocab_size, request.seq_len) == (16, 11, 64)
    assert (request.micro_batches, request.tp, request.recompute) == ((4,), (2,), ("none", "full"))
    assert request.budget_s + measured[0][0].budget_s == pytest.approx(1)
    cluster = load_cluster(str(file))
    assert cluster.pieces[0].layer == pytest.approx((2e-3, 4e-3))
    assert cluster.update.parameter_s == pytest.approx(1e-9)
    assert cluster.cores_per_node == 2
    assert "The lower quartile of 7 rounds." in file.read_text()
    out = capsys.readouterr().out
    assert "layer, micro-batch 4, tp 2" in out
    assert "2.00 + 4.00 ms" in out


def test_everything_that_cannot_be_measured_of_a_model_is_reported_first(measured, tiny, tmp_path, capsys):
    words = ["profile", *QUICK, "--processes", "2", "--output", str(tmp_path / "mine.toml"), "--model", str(tiny)]
    assert main([*words, "--micro-batches", "0", "--tp", "1", "4"]) == 2
    err = capsys.readouterr().err
    assert "--micro-batches must be one whole number of at least 1 or more of them, found 0" in err
    assert "--tp must divide 2 processes, 128 tokens and 2 key and value heads, found 4" in err
    assert main([*words[:-1], "gpt-7000b"]) == 2
    assert "gpt-7000b" in capsys.readouterr().err
    assert not measured[0]
