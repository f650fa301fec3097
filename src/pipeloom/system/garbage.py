"""Collecting garbage less often, or not at all, while a command makes many objects that live until its end."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MANY_OBJECTS = 1_000_000
"""New objects between two collections of garbage; Python's default is 700."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Context for searches and tables, where collections take a tenth of the time and find little."""
    before = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        # Together these make all objects old ones. Else the next new object would start a collection of everything
        # that was made meanwhile, which takes half a second after a search, and most processes end here.
        gc.freeze()
        gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def kept_imports() -> Iterator[None]:
    """Context for imports of a command: nothing that they make is collected, or looked at by later collections.

    Collections otherwise take a sixth of the time in which PyTorch and the modules of a run are loaded.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else a program that calls a command often would keep its garbage
            gc.freeze()
        gc.enable()
