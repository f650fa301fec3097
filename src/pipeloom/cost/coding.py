"""Seconds of coding what two stages send each other (``layout.boundary``), by closed forms.

The kernels are those of ``execute/communication/coding.py``, which read and write memory.
"""

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.layers import Pieces
from pipeloom.cost.parts import Parts
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

CODING_KERNELS, DECODING_KERNELS = 9, 2
_WIDE_BYTES = 4
"""Of a float32, in which numbers are coded."""
_CODED_BYTES = 8 + 8 + 8 + 5
"""Bytes that coding moves for each number: it is read for the largest and for the smallest one, read and written for
the quotient and for rounding, read and written as one byte."""
_DECODED_BYTES = 5 + 8
"""Decoding: read as one byte and written as a float32, then read and written for the product."""


def coding_s_of(run: Run, cluster: Cluster, software: Software) -> tuple[float, float]:
    """Seconds of coding a message between two stages on a device, and of decoding it."""
    numbers = run.sent_numbers(scatters=software.scatter_gather)
    casts = run.element_bytes != _WIDE_BYTES
    cast_bytes = casts * (run.element_bytes + _WIDE_BYTES)
    coded_s, decoded_s = (
        Pieces(run, cluster, software).seconds(
            Parts(
                memory_s=cluster.device.memory_s(numbers * (moved + cast_bytes), software.efficiency.memory),
                num_kernels=kernels + casts,
            )
        )
        for moved, kernels in ((_CODED_BYTES, CODING_KERNELS), (_DECODED_BYTES, DECODING_KERNELS))
    )
    return coded_s, decoded_s
