"""Peaks that datasheets promise, for the GPUs that are known here."""

from collections.abc import Mapping

_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float], str], ...] = (
    (("V100-SXM2",), {"fp32": 15.7e12, "fp16": 125e12}, "NVIDIA V100 datasheet, SXM2"),
    (("A100",), {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}, "NVIDIA A100 datasheet, dense"),
    (("H100 80GB HBM3",), {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}, "NVIDIA H100 datasheet, SXM, dense"),
    (("NVIDIA H200",), {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}, "NVIDIA H200 datasheet, SXM, dense"),
)
"""(what the name contains, FLOP/s by precision, source). Tensor cores without sparsity; fp32 without TF32."""

_OTHERS = ("MIG", "PCIe", "PCIE", "NVL", "GH200")
"""Names with one of these mean other clocks or a part of the device, except for the A100, whose cards are alike."""


def datasheet_peaks(device_name: str) -> tuple[dict[str, float], str]:
    """FLOP/s by precision and where they are from; empty for a device that is not known here."""
    for words, peaks, source in _PEAKS:
        is_other = any(other in device_name for other in (_OTHERS[:1] if words == ("A100",) else _OTHERS))
        if not is_other and any(word in device_name for word in words):
            return dict(peaks), source
    return {}, ""
