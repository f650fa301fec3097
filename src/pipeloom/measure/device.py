"""One device: matrix products, the fixed time of a kernel, memory, the host's time to launch an operation."""

import torch

from pipeloom.measure.findings import Product, Timing, Traffic
from pipeloom.measure.stopwatch import Sample, Stopwatch, on_device, on_host

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name that cluster files use. fp32 is fp32: PyTorch leaves TF32 off unless told otherwise."""

WIDTHS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Of the square matrices."""

LEAST_RATE = 0.25
"""A precision that is slower than this fraction of fp32 is emulated, and left out."""

_TINY = 8
_PROBE = 1


def precisions(device: torch.device) -> tuple[str, ...]:
    """Those to try: fp16 on GPUs, bf16 but on GPUs that have no units for it."""
    if device.type != "cuda":
        return ("fp32", "bf16")
    return ("fp32", "bf16", "fp16") if torch.cuda.is_bf16_supported(including_emulation=False) else ("fp32", "fp16")


def num_products(device: torch.device) -> int:
    """Measurements that ``measure_products`` and ``measure_kernel`` make together."""
    return len(precisions(device)) * (len(WIDTHS[device.type]) + 1)


def measure_products(watch: Stopwatch) -> tuple[tuple[Product, ...], dict[str, float]]:
    """Products of all sizes in the precisions of useful speed, sizes rising; and FLOP/s of the other precisions."""
    device = watch.world.device
    widths = WIDTHS[device.type]
    # An emulated type is slow: one small size shows it, before large ones take their time.
    probes = {name: _measure(watch, name, widths[_PROBE]) for name in precisions(device)}
    products: list[Product] = []
    too_slow: dict[str, float] = {}
    for name, probe in probes.items():
        # Rank 0 decides for all, since all make the same measurements.
        if watch.agree(probe.flops_per_s < LEAST_RATE * probes["fp32"].flops_per_s):
            too_slow[name] = probe.flops_per_s
            watch.skip(len(widths) - 1)
            continue
        products += [probe if width == widths[_PROBE] else _measure(watch, name, width) for width in widths]
    return tuple(products), too_slow


def measure_kernel(watch: Stopwatch) -> Timing:
    """The fixed time of a kernel: a product so small that nothing else is left, in the precision where it is least."""
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
"""Measurements that ``measure_traffic`` makes."""

_LARGE_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Of each of three tensors: beyond any cache."""
_PART = 16
"""Each tensor takes at most this part of a device's memory."""


def measure_traffic(watch: Stopwatch, memory_bytes: float) -> tuple[Traffic, Traffic]:
    """A copy (a read and a write) and a sum of two tensors (two reads and a write).

    Args:
        watch: repeats them.
        memory_bytes: of the device; small ones get smaller tensors.
    """
    device = watch.world.device
    size = int(min(_LARGE_BYTES[device.type], memory_bytes / _PART)) // 4
    left, right, out = (torch.ones(size, device=device) for _ in range(3))
    copy = watch.time("memory: copies", on_device(device, lambda: out.copy_(left)))
    add = watch.time("memory: sums", on_device(device, lambda: torch.add(left, right, out=out)))
    return Traffic(2 * 4.0 * size, copy), Traffic(3 * 4.0 * size, add)


NUM_LAUNCHES = 1
"""Measurements that ``measure_launch`` makes."""


def measure_launch(watch: Stopwatch) -> Timing:
    """Host seconds of a tiny operation: on CUDA to launch it, on a CPU to do it."""
    device = watch.world.device
    tiny = torch.zeros(16, device=device)
    return watch.time("the host's time for an operation", on_host(device, lambda: tiny.add_(1.0)))
