"""``pipeloom inspect`` of runs that hang: the rank, the place, and what the others wait for."""

import pytest
from hanging import Hang, answer_to, hangs
from thinned import thinned

from pipeloom.cli import main

HANGS = [
    Hang("before a send", "four stages", 1, 5),
    Hang("replicas' exchange", "replicas", 2, 7),
    Hang("tensor-parallel exchange", "tensor", 3, 9),
    Hang("killed", "pipeline", 1, 6),
]
KINDS = 8


@pytest.mark.parametrize("hang", thinned(HANGS, 2), ids=lambda hang: hang.kind)
def test_a_hang_is_named(tmp_path, capsys, hang):
    right_s, state, printed = answer_to(hang, tmp_path)
    assert right_s is not None, f"{state}\n{printed}"
    assert main(["inspect", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step ")
    assert lines[2].startswith(f"rank {hang.rank}, ")
    assert sum(line.startswith("  rank ") for line in lines) == state.ranks[0].size


def test_hangs_are_of_all_kinds():
    assert len({hang.kind for hang in hangs(40)}) == KINDS
    assert {hang.layout for hang in hangs(40)} == {"pipeline", "four stages", "replicas", "tensor"}


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "there is no run folder" in capsys.readouterr().err
