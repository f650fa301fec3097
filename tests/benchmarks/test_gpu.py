"""The script of ``make gpu`` where there is no GPU."""

import pytest
import torch

import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_ends_with_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(tmp_path / "gpu.md")])
    assert gpu.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "expected a CUDA device, found none" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_case_is_a_row_of_its_table(tmp_path):
    bench = gpu.Bench(tmp_path, "cpu")

    def fail():
        raise AssertionError("losses differ")

    bench.run("one", lambda: ("5.0 ms", "fine"))
    bench.run("other", fail)
    bench.end_s = 0.0
    bench.run("late", lambda: ("", ""))
    assert [row[:2] for row in bench.rows] == [("one", "ok"), ("other", "FAILED"), ("late", "not run")]
    lines = gpu.table(bench.rows, "a device").splitlines()
    assert lines[-2:] == ["| other | FAILED |  | losses differ |", "| late | not run |  | the 600 s are over |"]


def test_every_case_has_settings_that_there_are():
    from pipeloom.cli.run_config import parse_config
    from pipeloom.cli.train import COMMAND

    for case in gpu.cases():
        words = f"{gpu.MODEL} {case.words} --training.steps {gpu.STEPS}".split()
        parse_config(COMMAND, words, lambda config, **_: [])
