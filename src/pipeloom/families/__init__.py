"""How schedules are made: every module of this folder may register families; none knows another's rule."""

import pkgutil

from pipeloom.families.answer import load
from pipeloom.families.family import FAMILIES, Choice, Family, HeldInputs, Request, Rows, family, make_schedule

for _module in pkgutil.iter_modules(__path__):
    load(f"{__name__}.{_module.name}")

__all__ = ["FAMILIES", "Choice", "Family", "HeldInputs", "Request", "Rows", "family", "make_schedule"]
