"""Collections of garbage around imports."""

import gc
import sys
from types import ModuleType

import pytest

from pipeloom.system.garbage import few_collections, kept_imports


@pytest.mark.parametrize("loads", [True, False])
def test_what_is_imported_is_never_looked_at_again(monkeypatch: pytest.MonkeyPatch, loads: bool):
    before = gc.get_freeze_count()
    try:
        with kept_imports():
            was_on = gc.isenabled()
            made = [[number] for number in range(1000)]
            if loads:
                monkeypatch.setitem(sys.modules, "a_module_of_this_test", ModuleType("a_module_of_this_test"))
        assert not was_on
        assert gc.isenabled()
        assert (gc.get_freeze_count() >= before + len(made)) == loads
    finally:
        gc.unfreeze()


def test_the_end_of_few_collections_collects_nothing():
    collections, before = [], gc.get_threshold()

    def note(phase, _):
        collections.append(phase)

    gc.set_threshold(700)
    gc.callbacks.append(note)
    try:
        with few_collections():
            made = [[number] for number in range(10_000)]
        made += [[number] for number in range(100)]
        assert gc.get_threshold() == (700, *before[1:])
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(made) == 10_100
    assert collections == []
