"""Names for what kernels take."""

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Shape = tuple[int, int, int]
"""Numbers of stages, micro-batches and token slices."""
Bytes = NDArray[np.int8]
