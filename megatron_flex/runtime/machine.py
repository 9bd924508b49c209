"""What a worker computes on, by name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def machine_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor, such as ``NVIDIA H200``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
