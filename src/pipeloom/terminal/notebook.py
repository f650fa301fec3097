"""Values that a notebook shows as a picture."""

from importlib import import_module


class Pictured:
    """A value that ``pipeloom.plot`` can draw: a notebook shows its picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        # By name, and only here: what draws is floors above what it draws, and loads matplotlib.
        return import_module("pipeloom.plotting.plot").plot(self)._repr_svg_()
