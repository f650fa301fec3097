"""Findings as a machine could have given them."""

from pipeloom.measure.findings import Collectives, Findings, Host, Messages, Product, Timing, Traffic


def timing(seconds):
    return Timing(seconds, 0.02, 7)


def findings(kind="cpu", name="Some CPU", **changed):
    """Of two processes on a host; ``changed`` replaces fields."""
    rates = {"fp32": 1e11, "bf16": 2e11}
    kernel_s = 2e-6
    values = {
        "host": Host(kind, name, 2, 8e9, 0 if kind == "cpu" else 108, "Linux, PyTorch"),
        "num_processes": 2,
        "per_host": 2,
        "core_share": 1.0,
        "products": tuple(
            Product(precision, flops, timing(flops / rate + kernel_s))
            for precision, rate in rates.items()
            for flops in (2.0 * 64**3, 2.0 * 512**3)
        ),
        "too_slow": {},
        "kernel": timing(kernel_s),
        "launch": timing(3e-6),
        "copy": Traffic(2e8, timing(0.01)),
        "add": Traffic(3e8, timing(0.01)),
        "intra": messages(),
        "inter": None,
        "collectives": (
            Collectives("all_reduce", 2, ((4096.0, timing(1e-4)), (1048576.0, timing(1e-3)))),
            Collectives("all_gather", 2, ((4096.0, timing(1e-4)), (1048576.0, timing(5e-4)))),
        ),
        "seconds": 12.0,
    }
    return Findings(**{**values, **changed})


def messages(num_pairs=1, latency_s=1e-4, rate=1e9):
    sizes = (4096.0, 65536.0, 1048576.0)
    return Messages(num_pairs, tuple((size, timing(latency_s + size / rate)) for size in sizes))
