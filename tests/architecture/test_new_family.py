"""A family of schedules is one file: proof, lowering, simulation and picture come by themselves."""

import importlib.util
import json

import pytest

from pipeloom.cli import main
from pipeloom.errors import ScheduleError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Level

FILE = '''
"""One micro-batch after the other."""

from pipeloom.families.family import Request, Rows, backward, family, forward


@family("one-by-one", is_looped=True)
def one_by_one(request: Request) -> Rows:
    """Each micro-batch goes forward and back before the next one starts."""
    rows = []
    for rank in range(request.placement.num_ranks):
        stages = request.local_stages(rank)
        rows.append([])
        for microbatch in range(request.num_microbatches):
            rows[-1] += [forward(stage, microbatch) for stage in stages]
            rows[-1] += [backward(stage, microbatch) for stage in reversed(stages)]
    return Rows(rows, [PROMISE] * len(rows))
'''


@pytest.fixture
def register(tmp_path):
    """Import the family's file, with a number of inputs that it promises to hold at most."""

    def load(promise):
        file = tmp_path / "one_by_one.py"
        file.write_text(FILE.replace("PROMISE", promise), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("one_by_one", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    yield load
    FAMILIES.remove("one-by-one")


def test_a_family_in_one_file_is_proven_lowered_simulated_and_drawn(register, tmp_path, capsys):
    register("request.loops")
    picture = tmp_path / "picture.png"
    words = ["one-by-one", "--pp", "3", "--loops", "2", "--num-microbatches", "4", "--json"]
    assert main(["schedule", *words, "--plot", str(picture)]) == 0
    capsys.readouterr()
    assert main(["schedule", *words, "--communication"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["makespan"] == 4 * 6 * 3  # nothing overlaps
    assert answer["bubble_overhead"] == 2
    assert answer["peak_stage_inputs"] == [2, 2, 2]
    assert answer["level"] == "communication"
    assert picture.read_bytes().startswith(b"\x89PNG")
    schedule = make_schedule("one-by-one", pp=3, loops=2, num_microbatches=4, placement="v")
    assert lower(schedule).level is Level.COMMUNICATION


def test_the_help_lists_a_new_family(register, capsys):
    register("request.loops")
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    assert "one-by-one" in capsys.readouterr().out


def test_a_family_that_breaks_its_promise_is_refused(register):
    register("1")
    with pytest.raises(ScheduleError, match="rule 'in-flight-bound' at rank 0, slot 1: holds up to 2 stage inputs"):
        make_schedule("one-by-one", pp=3, loops=2, num_microbatches=4)
