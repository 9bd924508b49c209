"""How megatron-core is imported, wherever its first import may be."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_BOARD = "torch.utils.tensorboard"


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Import megatron-core without its warnings, the compiler and TensorBoard.

    It warns that it falls back to torch's norms where Apex is missing, and decorates its fused
    functions with ``torch.compile``, which loads the compiler: seconds and 70 MB for each worker.
    No such function is used here, so they stay as they are written. And its timers, which are not
    used either, would write to TensorBoard if it were there.
    """

    def as_written(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    compile_, torch.compile = torch.compile, as_written
    hidden = _BOARD not in sys.modules
    if hidden:
        sys.modules[_BOARD] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_
        if hidden:
            del sys.modules[_BOARD]
