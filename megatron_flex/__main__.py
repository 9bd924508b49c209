"""``python -m megatron_flex COMMAND``, also as ``torchrun -m megatron_flex pretrain-gpt``."""

from __future__ import annotations

from megatron_flex.commands import main

if __name__ == "__main__":
    main()
