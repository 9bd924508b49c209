"""Freed memory of the host is taken again."""

from __future__ import annotations

import subprocess
import sys

PAGES = """
import resource, sys, torch
from megatron_flex.runtime.host_allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(16):  # until the free parts lie as aligned tensors need them
    pages()
print(pages())
"""


def pages(word: str) -> int:
    """Pages that the system makes for another tensor of 64 MB."""
    done = subprocess.run(
        [sys.executable, "-c", PAGES, word], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_large_tensors_take_the_memory_that_others_have_freed() -> None:
    assert pages("keep") < 100
    assert pages("as it comes") > 100  # else this test shows nothing
