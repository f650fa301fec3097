"""Flags of commands without the settings of a run that change figures of the cluster; they are those of ``machine``."""

from dataclasses import dataclass
from typing import Annotated

from pipeloom.cli.reference import Flag
from pipeloom.config.sections import WHAT_IFS


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Changes of the cluster."""

    inter_bandwidth: Annotated[str | None, Flag("machine.inter-bandwidth")] = None
    """What if the bandwidth between nodes were another: a factor such as 2x, or GB/s of a node. None: as it is."""
    intra_bandwidth: Annotated[str | None, Flag("machine.intra-bandwidth")] = None
    """The same for the bandwidth inside a node: a factor, or GB/s of a device. None: as it is."""
    memory: Annotated[str | None, Flag("machine.memory")] = None
    """The same for the memory of a device: a factor, or GB. None: as it is."""
    peak: Annotated[str | None, Flag("machine.peak")] = None
    """The same for the peak of a device in every precision: a factor, or TFLOP/s of 16 bits. None: as it is."""
    memory_bandwidth: Annotated[str | None, Flag("machine.memory-bandwidth")] = None
    """The same for the memory bandwidth of a device: a factor, or GB/s. None: as it is."""

    @property
    def what_if(self) -> dict[str, str]:
        """The changes that are given, by name."""
        return {name: text for name in WHAT_IFS if (text := getattr(self, name)) is not None}
