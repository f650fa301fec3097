"""Describes this host: device, memory, software."""

import os
import platform
from pathlib import Path

import torch

from pipeloom.measure.findings import Host
from pipeloom.system.cores import own_cores


def num_devices(kind: str) -> int:
    """GPUs of this host, or cores that this process may use."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return len(own_cores())


def describe_host(device: torch.device) -> Host:
    """Describe this host; CUDA devices by the properties of ``device``."""
    found = num_devices(device.type)
    system = f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        software = f"{system}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
        return Host(
            "cuda", properties.name, found, float(properties.total_memory), properties.multi_processor_count, software
        )
    software = f"{system}, PyTorch {torch.__version__}, gloo, one thread a process"
    return Host("cpu", cpu_name(), found, host_memory_bytes() / found, 0, software)


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name from Linux, or else from Python's ``platform``."""
    try:
        lines = info.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = list[str]()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "CPU"


def host_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Memory of the host, or the limit of its container (cgroup v2) if that is less."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        text = limit.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return total
    # Without a limit the file contains "max".
    return min(total, float(text)) if text.isdigit() else total
