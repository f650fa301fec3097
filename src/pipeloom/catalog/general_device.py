"""What a device has whose file has only peaks, memory and links: figures of devices that were measured."""

from collections.abc import Mapping

from pipeloom.cost.hardware import Curve, usual_peak

LAUNCH_US, KERNEL_US = 6.0, 4.0
"""Launch of a kernel by the host, and its fixed cost: the values of every GPU of the catalog."""
_SECONDS_AT_PEAK = (3.2e-6, 3.2e-5, 3.2e-4, 2e-3)
"""Sizes of products as seconds at the peak. The points of A100, H100, B200 and MI325X are close to these."""
_FRACTIONS = (0.42, 0.615, 0.70, 0.71)
"""Fractions of the peak. The last is the mean of the largest measured product (stas00/ml-engineering,
compute/accelerator) of A100, H100, B200, B300, GB200, MI300X, MI325X and MI355X, 0.51 to 0.87; the others have the mean
descent of the curves of the catalog."""


def general_curve(peak_flops_per_s: Mapping[str, float]) -> Curve:
    """(FLOPs of a product, fraction of the peak) of a device whose products nobody measured.

    Args:
        peak_flops_per_s: precision -> peak; that of 16 bits sets the sizes, or the highest.
    """
    # In GFLOP with six digits, as files are written, so that a written cluster is read as the same one.
    sizes = [float(f"{seconds * usual_peak(peak_flops_per_s) / 1e9:.6g}") * 1e9 for seconds in _SECONDS_AT_PEAK]
    return tuple(zip(sizes, _FRACTIONS, strict=True))
