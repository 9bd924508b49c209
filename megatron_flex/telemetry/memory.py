"""Memory in use, under the names that Megatron-LM writes to TensorBoard."""

from __future__ import annotations

import psutil
import torch


def memory_in_use() -> dict[str, float]:
    """The CUDA allocator's figures, or the resident memory of this process, in bytes."""
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        return {
            "mem-reserved-bytes": float(stats["reserved_bytes.all.current"]),
            "mem-allocated-bytes": float(stats["allocated_bytes.all.current"]),
            "mem-max-allocated-bytes": float(stats["allocated_bytes.all.peak"]),
            "mem-allocated-count": float(stats["allocation.all.current"]),
        }
    return {"mem-resident-bytes": float(psutil.Process().memory_info().rss)}
