"""A tokenizer whose process is killed, and one that takes a minute. They import next to nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron_flex.tokenizers.base import Tokenizer
from megatron_flex.tokenizers.null import NullTokenizer


class Slow(NullTokenizer):
    """Would take a minute for some thousand texts."""

    def encode(self, text: str) -> list[int]:
        """After a while."""
        time.sleep(0.02)
        return super().encode(text)


def first_is_killed(mark: Path) -> Tokenizer:
    """A slow tokenizer, but in the first process that asks."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return Slow(1000)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
