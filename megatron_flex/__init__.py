"""megatron_flex: pipeline training of language models with a plan per iteration."""

__version__ = "0.1.0"
