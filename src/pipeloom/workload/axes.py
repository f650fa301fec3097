"""The parallel axes of a run: names, order in global ranks, and what follows from their sizes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Axes(NamedTuple):
    """Sizes of the parallel axes, the innermost in global ranks first, as in Megatron-LM (arXiv 2104.04473, section 4).

    Attributes:
        tp: tensor axis: ranks that share each matrix.
        cp: context axis: ranks that share the tokens of each sequence.
        dp: data axis: replicas with sequences of their own.
        pp: pipeline axis: ranks that share the layers.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    def words(self, form: str = "{} {}", joint: str = ", ") -> str:
        """The sizes in a line, such as ``tp 2, pp 4, dp 1``; axes that few runs have only if they have several ranks.

        Args:
            form: of a name and its size.
            joint: between two axes.
        """
        return joint.join(form.format(name, size) for name, size in self.shown.items())

    @property
    def shown(self) -> dict[str, int]:
        """Name -> size in the order of sentences, without axes of one rank that few runs have."""
        sizes = {name: getattr(self, name) for name in IN_SENTENCES}
        return {name: size for name, size in sizes.items() if name not in _SELDOM or size > 1}

    @property
    def cells(self) -> dict[str, str]:
        """Name -> size for a table; ``-`` for an axis that is not ``shown``."""
        return {name: str(self.shown.get(name, "-")) for name in IN_SENTENCES}

    def product(self, before: str = "") -> str:
        """The sizes, the outermost first, such as ``pp 2 x dp 1 x tp 1``; each name with ``before`` before it."""
        order = [name for name in RANKS_OF_AXES if name in self.shown]
        return " x ".join(f"{before}{name} {getattr(self, name)}" for name in order)

    @property
    def ranks(self) -> str:
        """The sizes with the ranks of each, such as ``2 pipeline x 1 data x 1 tensor ranks``."""
        order = [name for name in RANKS_OF_AXES if name in self.shown]
        return f"{' x '.join(f'{getattr(self, name)} {RANKS_OF_AXES[name]}' for name in order)} ranks"


_SELDOM = ("cp",)
"""Axes that are named only where they have several ranks."""
AXES = Axes._fields
"""Names of the axes, the innermost first."""
IN_SENTENCES = ("tp", "cp", "pp", "dp")
"""Names of the axes in the order of sentences and tables."""
RANKS_OF_AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}
"""Name of an axis -> what its ranks are called, the outermost first."""


class WithAxes(Protocol):
    """Base class of values with a size of each axis."""

    @property
    def tp(self) -> int:
        """Size of the tensor axis."""

    @property
    def cp(self) -> int:
        """Size of the context axis."""

    @property
    def dp(self) -> int:
        """Size of the data axis."""

    @property
    def pp(self) -> int:
        """Size of the pipeline axis."""

    @property
    def axes(self) -> Axes:
        """Size of each axis."""
        return Axes(self.tp, self.cp, self.dp, self.pp)

    @property
    def num_devices(self) -> int:
        """Devices of the run, and its ranks: one process for each."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_devices(self) -> int:
        """Devices that hold the stages of one pipeline rank; they are adjacent."""
        return self.tp * self.cp * self.dp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights and compute other tokens: they sum gradients, and may share state."""
        return self.dp * self.cp


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def axes(num_devices: int, tps: Iterable[int], cps: Sequence[int] = (1,)) -> list[Axes]:
    """Axes whose product is the number of devices.

    Args:
        num_devices: of the run.
        tps: sizes of the tensor axis; those that do not divide the devices are skipped.
        cps: sizes of the context axis, the same.
    """
    return [
        Axes(tp=tp, cp=cp, pp=pp, dp=num_devices // tp // cp // pp)
        for tp in tps
        for cp in cps
        if num_devices % (tp * cp) == 0
        for pp in divisors(num_devices // tp // cp)
    ]
