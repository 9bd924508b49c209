"""``--profile``: marks some iterations for nsys, or records them with PyTorch's profiler."""

from __future__ import annotations

from typing import Any

import torch

from megatron_flex.config.profiling import ProfilingOptions
from megatron_flex.telemetry.sink import TelemetryError


class Profiler:
    """Call :meth:`before` at the start of each iteration, and :meth:`close` at the end of the run.

    PyTorch's profiler writes a trace that TensorBoard shows to ``directory``.

    Raises:
        TelemetryError: ranges are marked for nsys, and there is no CUDA.
    """

    def __init__(self, options: ProfilingOptions, rank: int, directory: str | None) -> None:
        self._active = options.profile and rank in options.profile_ranks
        self._steps = (options.profile_step_start, options.profile_step_end)
        self._profiler: Any = None
        self._running = False
        if self._active and options.use_pytorch_profiler:
            assert directory is not None, "arguments were checked"
            self._profiler = torch.profiler.profile(
                on_trace_ready=torch.profiler.tensorboard_trace_handler(
                    directory, worker_name=f"rank{rank}"
                ),
                record_shapes=True,
            )
        elif self._active and not torch.cuda.is_available():
            raise TelemetryError("--profile marks a range for nsys, which needs CUDA: add"
                                 " --use-pytorch-profiler")  # fmt: skip

    def before(self, iteration: int) -> None:
        """Start or stop; ``iteration`` is the number of iterations trained so far, as in
        Megatron-LM."""
        if not self._active:
            return
        if iteration == self._steps[0] and not self._running:
            self._start()
        elif iteration == self._steps[1]:
            self.close()

    def close(self) -> None:
        """Stop, and write the trace, if iterations are still being recorded."""
        if not self._running:
            return
        self._running = False
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())

    def _start(self) -> None:
        self._running = True
        if self._profiler is not None:
            self._profiler.__enter__()
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
