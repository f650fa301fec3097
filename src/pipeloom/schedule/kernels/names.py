"""Names that kernels share: types of what they take, and codes of kinds.

A compiler takes constants and no table, so the codes are written out, here alone.
"""

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.kinds import Kind

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Shape = tuple[int, int, int]
"""Numbers of stages, micro-batches and token slices."""
Bytes = NDArray[np.int8]

FORWARD = Kind.FORWARD.code
BACKWARD = Kind.BACKWARD.code
BACKWARD_INPUT = Kind.BACKWARD_INPUT.code
BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT.code
RECOMPUTE = Kind.RECOMPUTE.code
SEND_F = Kind.SEND_F.code
RECV_F = Kind.RECV_F.code
SEND_B = Kind.SEND_B.code
RECV_B = Kind.RECV_B.code
UNSHARD = Kind.UNSHARD.code
