"""Pictures of values in notebooks."""

from importlib import import_module


class Pictured:
    """Base class of values that ``pipeloom.plot`` can draw: a notebook shows the picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        # Imported by name and late: plotting is a layer above, and loads matplotlib.
        return import_module("pipeloom.plotting.plot").plot(self)._repr_svg_()
