"""How many files of the package name each kind of action and each axis of a layout: a new one costs as many.

The bounds are what was reached. They may shrink; a change that raises one has put knowledge in a second place, unless
it expresses a layout in the words of another program, as ``accuracy/calculon.py`` does.
"""

import io
import tokenize
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import pipeloom
from pipeloom.schedule.kinds import Kind
from pipeloom.workload.layout import Layout

SOURCE = Path(pipeloom.__file__).parent
MOST_KIND = {
    "FORWARD": 30,
    "BACKWARD": 22,
    "BACKWARD_INPUT": 20,
    "RECOMPUTE": 18,
    "UNSHARD": 16,
    "REDUCE_GRAD": 17,
    "BACKWARD_WEIGHT": 16,
}
MOST_AXIS = {
    "pp": 52,
    "loops": 40,
    "num_microbatches": 40,
    "tp": 39,
    "recompute": 36,
    "shard": 33,
    "boundary": 33,  # half of them are places between stages, and the module of their specs
    "sequence_parallel": 29,
    "partition": 25,
    "average_every": 14,
    "microbatches": 19,
    "cp": 17,
    "dp": 15,
    "replicate": 14,
    "recompute_layers": 13,
    "token_slices": 11,
    "pipeline_order": 10,
    "ep": 18,
    "ep_overlap": 14,
    "microbatch_size": 8,
}
MOST_NEW_KIND = 8
"""Files that a new kind may touch, with all that the package does with it."""
AXES = tuple(field.name for field in fields(Layout))
NEWEST = "UPDATE"
"""It came last, and is alone in its group: no file handles it by a set of kinds without naming it."""


def names_in(text):
    """Names in a module's code; not in comments nor texts."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@cache
def files_that_name():
    """Name -> files of the package whose code has it."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name in names_in(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    return found


def counts_of(names):
    found = Counter({name: len(files_that_name().get(name, ())) for name in names})
    print(*(f"{count:4} {name}" for name, count in found.most_common()), sep="\n")  # noqa: T201  pytest -s shows it
    return found


def test_no_kind_is_named_in_more_files():
    found = counts_of(kind.name for kind in Kind)
    assert {name: count for name, count in found.items() if count > MOST_KIND.get(name, MOST_NEW_KIND)} == {}


def test_no_axis_is_named_in_more_files():
    found = counts_of(AXES)
    assert {name: count for name, count in found.items() if count > MOST_AXIS.get(name, 0)} == {}


def test_the_newest_kind_touches_few_files():
    assert [kind for kind in Kind if kind.group is Kind[NEWEST].group] == [Kind[NEWEST]]
    files = files_that_name()[NEWEST]
    print(NEWEST, *files, sep="\n  ")  # noqa: T201  pytest -s shows it
    assert len(files) <= MOST_NEW_KIND
    assert "schedule/kinds.py" in files


@pytest.mark.parametrize("module", ["execute/executor.py", "simulation.py", "schedule/row.py"])
def test_what_runs_every_kind_names_none(module):
    assert (SOURCE / module).exists()
    assert [kind.name for kind in Kind if module in files_that_name()[kind.name]] == []


def test_a_bound_is_of_something_that_there_is():
    assert set(MOST_KIND) <= {kind.name for kind in Kind}
    assert set(MOST_AXIS) == set(AXES)


def test_texts_and_comments_do_not_count():
    assert names_in('"""Kind.UPDATE"""\nx = Kind.LOAD  # Kind.EVICT\n') == {"x", "Kind", "LOAD"}
