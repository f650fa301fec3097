"""The programs beside pipeloom train the same model on the same batches; how long they take is not asserted."""

import argparse
import csv
import itertools
import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from thinned import thinned

import peers.launch
from peers.case import (
    DDP,
    FSDP2,
    INTERLEAVED,
    LOOPED_BFS,
    LOOPED_FSDP2,
    ONE_F_ONE_B,
    OURS,
    PLAIN,
    ROWS,
    SIZES,
    TRANSFORMERS,
    Size,
)
from peers.launch import Alone, Steps, run_alone, run_in_turns, why_skipped
from peers.programs import PROGRAMS, train
from peers.start import RUN, START, write_start
from peers.table import Measured, write
from pipeloom import load_run
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.session import run_on_all_ranks
from pipeloom.training.trainer import Trainer
from side_by_side.results import Load

LAYOUTS = [
    (PLAIN, 1, 1),
    pytest.param(TRANSFORMERS, 1, 1, marks=pytest.mark.long),
    (DDP, 1, 2),
    (FSDP2, 1, 2),
    (LOOPED_FSDP2, 2, 2),
]
LAYOUTS += [(ONE_F_ONE_B, 2, 1), (LOOPED_BFS, 2, 1), pytest.param(INTERLEAVED, 2, 1, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder of a tiny start, and pipeloom's losses."""
    folder = tmp_path_factory.mktemp("peers")
    text = folder / "text"
    text.mkdir()
    (text / "a.py").write_text("".join(f"def f{n}(x): return x + {n}\n" for n in range(500)))
    size = Size(
        name="tiny", num_layers=4, hidden_size=32, num_heads=4, seq_len=16, warmup=1, turns=1, timed=1, path=str(text)
    )
    write_start(size, folder)
    config = load_run(folder / RUN, layout={"pp": 1, "loops": 1, "num_microbatches": 8, "microbatch_size": 2})
    return folder, run_on_all_ranks(config, partial(_own, folder, size.steps))


def _own(folder, steps, config, world, data):
    trainer = Trainer(config, world, data, RunFolder(folder / "run"), quiet=True)
    return [trainer._step(step)[0] for step in range(1, steps + 1)]


def _theirs(folder, program, pp, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 60.0)
    start = torch.load(folder / START, weights_only=False)
    options = argparse.Namespace(pp=pp, loops=program.loops, schedule=program.schedule)
    losses = train(PROGRAMS[program.kind](start, options), start, None)
    world.leave()
    return losses


@pytest.mark.parametrize(
    ("program", "pp", "dp"), thinned(LAYOUTS, 2), ids=lambda value: getattr(value, "name", str(value))
)
def test_a_peer_computes_the_losses_of_pipeloom(prepared, program, pp, dp):
    folder, expected = prepared
    losses = run_workers(partial(_theirs, folder, program, pp), pp * dp)[0]
    assert expected[-1] < expected[0]
    assert losses == pytest.approx(expected, rel=2e-5)


def test_every_program_of_a_row_exists_and_pipelooms_come_first():
    for row in ROWS:
        assert row.programs[0].kind == "pipeloom"
        assert {one.kind for one in row.programs} - {"pipeloom"} <= set(PROGRAMS)
        for size in SIZES:  # pipeloom takes the layout
            words = row.words(row.programs[0], size)
            assert all(word.startswith("--") for word in words[::2])


def test_a_missing_package_is_one_line():
    reason = why_skipped(ROWS[0], replace(TRANSFORMERS, needs="no_such_package"))
    assert reason == "the package no_such_package is missing (pip install 'no_such_package')"
    assert why_skipped(ROWS[0], PLAIN) is None


def test_the_table_compares_with_the_best_peer_that_computes_the_same(tmp_path):
    measured = Measured(ROWS[4], SIZES[0], Load(1.0, 2.0))
    fast, slow, wrong, *_ = (one for one in ROWS[4].programs if one.kind != "pipeloom")
    measured.in_turns = {
        OURS: [Steps([5.0], [0.3, 0.5]), Steps([5.0], [0.3])],
        slow: [Steps([5.00001], [0.6])],
        fast: [Steps([5.0], [0.4])],
        wrong: [Steps([5.0], [0.1]), Steps([5.001], [0.1])],
    }
    measured.alone = {program: Alone(2.0, 10**8, steps) for program, (steps, *_) in measured.in_turns.items()}
    assert measured.best_peer == fast == ONE_F_ONE_B
    write([measured], tmp_path / "peers.csv")
    lines = list(csv.DictReader((tmp_path / "peers.csv").read_text().splitlines()))
    assert [line["is_error"] for line in lines] == ["False", "False", "False", "True"]
    assert lines[0]["to_best_peer"] == "0.75"
    assert measured.target is not None
    assert measured.target.is_met


WRITER = """
import json, sys, time
for number in range(int(sys.argv[2])):
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 0.05:
        pass
    with open(sys.argv[1], "a") as file:
        line = {"loss": number, "step_time_s": time.monotonic() - begin_s, "begin_s": begin_s}
        print(json.dumps(line), file=file)
sys.exit("that is all" if int(sys.argv[2]) < 9 else 0)
"""
TURNS = Size(name="writers", warmup=1, turns=3, timed=2)


@pytest.fixture
def writers(monkeypatch, tmp_path):
    """Programs that write a line every 50 ms, DDP only five lines; returns a function: program -> its lines."""
    files = {program: tmp_path / f"{program.name}.jsonl" for program in (OURS, PLAIN, DDP)}

    def words(row, program, size, start, folder):
        return [sys.executable, "-c", WRITER, str(files[program]), "5" if program is DDP else "900"], files[program]

    monkeypatch.setattr(peers.launch, "_words", words)
    return lambda program: [json.loads(line) for line in files[program].read_text().splitlines()]


def test_programs_in_turns_do_not_compute_at_the_same_time(writers, tmp_path):
    found, failed = run_in_turns(ROWS[0], [OURS, PLAIN], TURNS, tmp_path)
    assert failed == []
    # After the warm-up each turn has a step that was stopped, which does not count, and two that do.
    assert [len(found[one].losses) for one in (OURS, PLAIN)] == [10, 10]
    counted = [number for number in range(1, 10) if number % 3 != 1]
    for program in (OURS, PLAIN):
        lines = writers(program)
        assert found[program].seconds == [lines[number]["step_time_s"] for number in counted]
    spans = [
        (line["begin_s"], line["begin_s"] + line["step_time_s"])
        for program in (OURS, PLAIN)
        for line in [writers(program)[number] for number in counted]
    ]
    spans.sort()
    assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(spans))


def test_a_program_that_ends_early_does_not_end_the_others(writers, tmp_path):
    found, (error,) = run_in_turns(ROWS[0], [DDP, PLAIN], TURNS, tmp_path)
    assert set(found) == {PLAIN}
    assert len(found[PLAIN].seconds) == 6
    assert str(error).startswith("1 process, 1 thread, DDP: a process ended early\n")
    assert "that is all" in str(error)


def test_a_program_alone_counts_the_steps_between_the_warm_up_and_the_last(writers, tmp_path):
    found = run_alone(ROWS[0], PLAIN, TURNS, tmp_path, 4)
    assert found.steps.seconds == [line["step_time_s"] for line in writers(PLAIN)[1:3]]
    assert 0 < found.start_s < 60
    assert found.memory_bytes > 10**6
