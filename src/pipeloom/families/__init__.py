"""How schedules are made: every module of this folder may add families; none needs another's rule.

Other distributions add theirs through entry points of the group ``pipeloom.families`` (docs/extending.md).
"""

import pkgutil
from importlib import import_module

from pipeloom.families.check_rows import Rows
from pipeloom.families.family import (
    AUTO,
    FAMILIES,
    Choice,
    Family,
    HeldInputs,
    Request,
    backward,
    ends_forwards_first,
    family,
    forward,
    installed,
    make_schedule,
)

# Importing a module registers its families, so that a new file needs no entry in a list.
for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "AUTO",
    "FAMILIES",
    "Choice",
    "Family",
    "HeldInputs",
    "Request",
    "Rows",
    "backward",
    "ends_forwards_first",
    "family",
    "forward",
    "installed",
    "make_schedule",
]
