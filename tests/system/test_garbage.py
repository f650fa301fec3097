"""Collections of garbage around imports."""

import gc

from pipeloom.system.garbage import kept_imports


def test_what_is_imported_is_never_looked_at_again():
    before = gc.get_freeze_count()
    try:
        with kept_imports():
            was_on = gc.isenabled()
            made = [[number] for number in range(1000)]
        assert not was_on
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
