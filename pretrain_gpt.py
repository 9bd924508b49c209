#!/usr/bin/env python3
"""Pre-train or fine-tune a GPT. Flags are Megatron-LM's; docs/flags.md lists them all.

torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --pipeline-model-parallel-size 4 ...
"""

from __future__ import annotations

from megatron_flex.entry import pretrain_main

if __name__ == "__main__":
    pretrain_main("gpt")
