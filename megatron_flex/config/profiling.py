"""Flags of profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Profile some iterations."""

    profile: bool = False
    """Profile. Without --use-pytorch-profiler this marks the range for nsys, which needs CUDA."""

    profile_step_start: int = option(10, at_least=0)
    """First iteration to profile."""

    profile_step_end: int = option(12, at_least=1)
    """Iteration to stop at."""

    use_pytorch_profiler: bool = False
    """Use PyTorch's profiler, and write its trace to --tensorboard-dir."""

    profile_ranks: tuple[int, ...] = option((0,), at_least=0)
    """Workers to profile."""
