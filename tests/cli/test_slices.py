"""``pipeloom slices``."""

import json
import re

import pytest

from pipeloom.cli import main

RUN = ["slices", "--model.preset", "llama-3-8b", "--training.dtype", "bfloat16", "--machine.cluster", "dgx-a100"]
RUN += ["--layout.pp", "8", "--layout.loops", "1", "--schedule.family", "1f1b", "--layout.num-microbatches", "2"]
RUN += ["--data.seq-len", "1024", "--unit", "256"]


def test_memory_is_in_units_of_ten_to_the_ninth_as_everywhere(capsys):
    assert main([*RUN, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert main(RUN) == 0
    out = capsys.readouterr().out
    assert "iB" not in out
    (chosen,) = re.findall(r"(?m)^\d+ chosen .* ([\d.]+) GB$", out)
    assert float(chosen) == pytest.approx(expected / 1e9, abs=0.06)
