"""The programs beside pipeloom train the same model on the same batches; how long they take is not asserted."""

import argparse
import csv
from dataclasses import replace
from functools import partial

import pytest
import torch
from thinned import thinned

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
from peers.launch import Launched, why_skipped
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
    size = Size(name="tiny", num_layers=4, hidden_size=32, num_heads=4, seq_len=16, warmup=1, timed=1, path=str(text))
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
    measured.rounds = {
        OURS: [Launched([5.0], [0.3, 0.5, 0.3], 2.0, 10**8)],
        slow: [Launched([5.00001], [0.6], 3.0, 10**8)],
        fast: [Launched([5.0], [0.4], 3.0, 10**8)],
        wrong: [Launched([5.001], [0.1], 3.0, 10**8)],
    }
    assert measured.best_peer == fast == ONE_F_ONE_B
    write([measured], tmp_path / "peers.csv")
    lines = list(csv.DictReader((tmp_path / "peers.csv").read_text().splitlines()))
    assert [line["is_error"] for line in lines] == ["False", "False", "False", "True"]
    assert lines[0]["to_best_peer"] == "0.75"
    assert measured.target is not None
    assert measured.target.is_met
