"""Measures one device: matrix products, the fixed time of a kernel, memory bandwidth, launch overhead of the host."""

import torch

from pipeloom.measure.findings import Product, Timing, Traffic
from pipeloom.measure.stopwatch import Sample, Stopwatch, on_device, on_host

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name in cluster files. fp32 is without TF32, which PyTorch disables by default."""

WIDTHS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Widths of the square matrices."""

LEAST_RATE = 0.25
"""A precision slower than this fraction of fp32 is emulated, and is left out."""

_TINY = 8
_PROBE = 1


def precisions(device: torch.device) -> tuple[str, ...]:
    """Precisions to try: fp32; fp16 on GPUs; bf16 except on GPUs that emulate it."""
    if device.type != "cuda":
        return ("fp32", "bf16")
    return ("fp32", "bf16", "fp16") if torch.cuda.is_bf16_supported(including_emulation=False) else ("fp32", "fp16")


def num_products(device: torch.device) -> int:
    """Number of measurements of ``measure_products`` and ``measure_kernel`` together."""
    return len(precisions(device)) * (len(WIDTHS[device.type]) + 1)


def measure_products(watch: Stopwatch) -> tuple[tuple[Product, ...], dict[str, float]]:
    """Time matrix products.

    Returns:
        Products of all sizes in the precisions that are not emulated, by rising size; FLOP/s of the other precisions.
    """
    device = watch.world.device
    widths = WIDTHS[device.type]
    # One small size shows whether a precision is emulated, before large ones take long.
    probes = {name: _measure(watch, name, widths[_PROBE]) for name in precisions(device)}
    products: list[Product] = []
    too_slow: dict[str, float] = {}
    for name, probe in probes.items():
        # Rank 0 decides, since all ranks must make the same measurements.
        if watch.agree(probe.flops_per_s < LEAST_RATE * probes["fp32"].flops_per_s):
            too_slow[name] = probe.flops_per_s
            watch.skip(len(widths) - 1)
            continue
        products += [probe if width == widths[_PROBE] else _measure(watch, name, width) for width in widths]
    return tuple(products), too_slow


def measure_kernel(watch: Stopwatch) -> Timing:
    """The fixed time of a kernel: that of a tiny product, in the fastest precision."""
    timings = [
        watch.time("the fixed time of a kernel", _product(watch.world.device, DTYPES[name], _TINY))
        for name in precisions(watch.world.device)
    ]
    return min(timings, key=lambda timing: timing.median_s)


def _measure(watch: Stopwatch, precision: str, width: int) -> Product:
    sample = _product(watch.world.device, DTYPES[precision], width)
    return Product(precision, 2.0 * width**3, watch.time(f"{precision} products of {width} x {width}", sample))


def _product(device: torch.device, dtype: torch.dtype, width: int) -> Sample:
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty(width, width, device=device, dtype=dtype)
    return on_device(device, lambda: torch.mm(left, right, out=out))


NUM_TRAFFIC = 2
"""Number of measurements of ``measure_traffic``."""

_LARGE_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Size of each of three tensors: larger than any cache."""
_PART = 16
"""Each tensor takes at most 1 / ``_PART`` of a device's memory."""


def measure_traffic(watch: Stopwatch, memory_bytes: float) -> tuple[Traffic, Traffic]:
    """Time a copy (a read and a write) and a sum of two tensors (two reads and a write).

    Args:
        watch: repeats them.
        memory_bytes: of the device; limits the size of the tensors.
    """
    device = watch.world.device
    size = int(min(_LARGE_BYTES[device.type], memory_bytes / _PART)) // 4
    left, right, out = (torch.ones(size, device=device) for _ in range(3))
    copy = watch.time("memory: copies", on_device(device, lambda: out.copy_(left)))
    add = watch.time("memory: sums", on_device(device, lambda: torch.add(left, right, out=out)))
    return Traffic(2 * 4.0 * size, copy), Traffic(3 * 4.0 * size, add)


NUM_LAUNCHES = 1
"""Number of measurements of ``measure_launch``."""


def measure_launch(watch: Stopwatch) -> Timing:
    """Time a tiny operation on the host's clock: its launch on CUDA, its execution on a CPU."""
    device = watch.world.device
    tiny = torch.zeros(16, device=device)
    return watch.time("the host's time for an operation", on_host(device, lambda: tiny.add_(1.0)))
