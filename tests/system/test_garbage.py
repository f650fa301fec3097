"""Collections of garbage around imports."""

import gc
import sys
from types import ModuleType

import pytest

from pipeloom.system.garbage import kept_imports


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
