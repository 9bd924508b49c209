"""What ``pretrain_gpt.py`` and ``pretrain_bert.py`` share: flags first, heavy imports after."""

from __future__ import annotations

from typing import NoReturn

from megatron_flex.arguments import parse
from megatron_flex.config.config import Architecture
from megatron_flex.runtime.launch import run


def pretrain_main(architecture: Architecture) -> NoReturn:
    """Read the command line, train, and end the process."""

    def main() -> None:
        config = parse(architecture=architecture)
        # torch and megatron-core take seconds to import: a wrong flag is said before.
        from megatron_flex.training import pretrain

        pretrain(config)

    run(main)
