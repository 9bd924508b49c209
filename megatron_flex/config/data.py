"""Flags of the data set and of how micro-batches are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which documents are read, and how samples and micro-batches are made of them."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files, which --split divides: one prefix, several, or pairs of weight
    and prefix."""

    data_args_path: str | None = None
    """File that holds what --data-path would."""

    train_data_path: tuple[str, ...] = ()
    """Prefixes for training only, in the form of --data-path."""

    valid_data_path: tuple[str, ...] = ()
    """Prefixes for validation only, in the form of --data-path."""

    test_data_path: tuple[str, ...] = ()
    """Prefixes for the test only, in the form of --data-path."""

    per_split_data_args_path: str | None = None
    """JSON file with keys train, valid and test that holds what --train-data-path and its like
    would."""

    split: str | None = None
    """Shares of training, validation and test documents in --data-path, such as 90,5,5. Not set:
    969, 30, 1."""

    mock_data: bool = False
    """Draw documents at random, with lengths like those of an instruction-tuning mixture, instead
    of reading files."""

    num_workers: int = option(2, at_least=0)
    """Threads of each worker that read the tokens of coming micro-batches while it computes; 0
    reads in between."""

    mmap_bin_files: bool = option(True, flags=("--no-mmap-bin-files",))
    """Read .bin files with ordinary reads instead of mapping them into memory."""

    sample_format: Literal["text", "pair", "chat"] = option("text", own=True)
    """What a sample is: a document; a prompt with its completion, of which only the completion
    counts in the loss; or a conversation, written by tools/preprocess_data.py --sample-format chat,
    of which what the assistant says counts."""

    pair_keys: tuple[str, str] = option(("prompt", "completion"), own=True)
    """Names of the two data sets of a pair, in {prefix}_{name}_document."""

    mask_prob: float = option(0.15, above=0, below=1)
    """BERT: probability that a token is masked."""

    max_sample_length: int = option(derived="seq-length", own=True, at_least=1)
    """Length of the longest sample, in tokens."""

    overlong: Literal["truncate", "split", "drop", "error"] = option("truncate", own=True)
    """What to do with a longer document: keep its beginning, make several samples of it, leave
    it out, or stop before training. The number of such documents is reported; a loss of 1 % of the
    tokens or more is a warning. Of a pair that is split only the first samples have its prompt. A
    conversation is cut after an answer, and never split."""

    micro_batch_tokens: int | None = option(None, own=True, at_least=1)
    """Cut micro-batches by cost, with at most this many tokens in each (or one sample), packed
    without padding; with slices (--flexpipe-slice-tokens auto), as dear as one sample of so many
    tokens. Either this or --micro-batch-size; with --flexpipe neither, and the planner chooses."""
