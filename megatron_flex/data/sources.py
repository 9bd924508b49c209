"""From the data flags to a source of batches for each split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.data.batches import BatchSource
from megatron_flex.data.bert import BertSamples
from megatron_flex.data.blend import BlendOrder
from megatron_flex.data.chat import ChatSamples
from megatron_flex.data.documents import Documents
from megatron_flex.data.errors import DataError
from megatron_flex.data.gpt import GptSamples
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.masking import BertVocabulary
from megatron_flex.data.mock import MockDocuments
from megatron_flex.data.order import EpochOrder, Order
from megatron_flex.data.pairs import PairSamples
from megatron_flex.data.paths import LEGACY_SPLIT, Blend, Split, parse_blend, split_bounds
from megatron_flex.data.samples import Overlong, Samples

_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from. Fields are named as the flags.

    Attributes:
        data_path: words of ``--data-path``, split by ``split``.
        train_data_path, valid_data_path, test_data_path: the same for each split, instead.
        split: proportions of train, valid and test; ``None`` is Megatron's ``969, 30, 1``.
        mock_data: no files; see :mod:`megatron_flex.data.mock`.
        mmap_bin_files: map the ``.bin`` files into memory.
        sample_format: ``text`` (next token), ``pair`` (prompt and completion), ``chat``, ``bert``.
        pair_keys: names of the two data sets of a pair: ``{prefix}_{key}_document``.
        vocab_size: of the tokenizer, unpadded.
        max_sample_length: most input tokens of a sample; ``None`` for no limit.
        overlong: what to do with longer samples.
        bert: special tokens; needed for ``bert``.
        bert_binary_head: with a sentence-order target.
        mask_prob: share of masked tokens.
        seed: ``--seed``.
    """

    vocab_size: int
    seed: int = 1234
    data_path: tuple[str, ...] = ()
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split: str | None = None
    mock_data: bool = False
    mmap_bin_files: bool = True
    sample_format: Literal["text", "pair", "chat", "bert"] = "text"
    pair_keys: tuple[str, str] = ("prompt", "completion")
    max_sample_length: int | None = None
    overlong: Overlong = Overlong.TRUNCATE
    bert: BertVocabulary | None = None
    bert_binary_head: bool = True
    mask_prob: float = 0.15

    def blends(self) -> tuple[Blend | None, Blend | None, Blend | None] | Blend | None:
        """One blend to split, or one for each split; ``None`` for mock data.

        Raises:
            DataError: no data, or contradictory flags.
        """
        each = (self.train_data_path, self.valid_data_path, self.test_data_path)
        if sum((self.mock_data, bool(self.data_path), any(each))) != 1:
            raise DataError(
                f"give one source of data: --data-path, or {', '.join(_FLAGS)}, or --mock-data"
            )
        if any(each) and self.split is not None:
            raise DataError("--split divides --data-path; it has no effect on paths per split")
        if self.mock_data:
            return None
        if self.data_path:
            return parse_blend(self.data_path)
        train, valid, test = (
            parse_blend(words, flag) if words else None
            for words, flag in zip(each, _FLAGS, strict=True)
        )
        return train, valid, test


class DataSets:
    """All data of a run; files are opened once, also when several splits use them.

    Raises:
        DataError: contradictory flags at construction; bad files at first use.
    """

    def __init__(self, config: DataConfig) -> None:
        if config.sample_format == "bert" and config.bert is None:
            raise DataError("BERT needs a tokenizer with [CLS], [SEP] and [MASK] tokens")
        self._config = config
        self._blends = config.blends()
        self._open: dict[str, Documents] = {}

    def source(self, split: Split, *, repeat: bool = True) -> BatchSource | None:
        """The source of one split; ``None`` when no document belongs to it.

        Args:
            split: which.
            repeat: epochs follow each other for ever; else each sample comes once, in a
                shuffled order, and weights of a blend play no part.
        """
        config, blends = self._config, self._blends
        blend = blends[split] if isinstance(blends, tuple) else blends
        if blend is None and not config.mock_data:
            return None
        whole = isinstance(blends, tuple)
        prefixes = blend.prefixes if blend is not None else ("",)
        sets = [self._samples(prefix, None if whole else split) for prefix in prefixes]
        empty = [p for p, s in zip(prefixes, sets, strict=True) if s is None]
        present = [s for s in sets if s is not None]
        if not present:
            return None
        if empty:
            raise DataError(
                f"--split {self._split} leaves no document of {', '.join(empty)} for"
                f" {split.name.lower()}; take that data set out of the blend or change --split"
            )
        sizes = tuple(s.selection.size for s in present)
        seed = config.seed + split  # other shuffles than those of the other splits
        order: Order = EpochOrder(sizes, seed, repeat)
        if repeat and blend is not None and blend.weights is not None and len(present) > 1:
            order = BlendOrder(sizes, blend.weights, seed)
        return BatchSource(present, order)

    def nothing_for(self, split: Split, why: str) -> DataError:
        """The error where :meth:`source` has nothing for a split that is needed.

        Args:
            split: which.
            why: what needs it, the beginning of a sentence.
        """
        name, blends = split.name.lower(), self._blends
        if isinstance(blends, tuple):
            return DataError(f"{why}, but no data path is given for {name}: give one")
        prefixes = blends.prefixes if blends is not None else ("",)
        count = sum(self._of_prefix(prefix)[0].num_documents for prefix in prefixes)
        return DataError(
            f"{why}, but --split {self._split} leaves none of the {count} documents for {name}:"
            " raise that share"
        )

    @property
    def _split(self) -> str:
        return LEGACY_SPLIT if self._config.split is None else self._config.split

    def _documents(self, prefix: str) -> Documents:
        config = self._config
        if prefix not in self._open:
            self._open[prefix] = (
                MockDocuments(config.vocab_size, config.seed)
                if config.mock_data
                else IndexedDocuments(prefix, config.vocab_size, mmap=config.mmap_bin_files)
            )
        return self._open[prefix]

    def _of_prefix(self, prefix: str) -> list[Documents]:
        """The documents of a prefix; for pairs, those of prompt and completion."""
        config = self._config
        pair = config.sample_format == "pair" and not config.mock_data
        names = [f"{prefix}_{key}_document" for key in config.pair_keys] if pair else [prefix]
        return [self._documents(name) for name in names]

    def _samples(self, prefix: str, split: Split | None) -> Samples | None:
        config = self._config
        documents = self._of_prefix(prefix)
        count = documents[0].num_documents
        start, stop = (0, count) if split is None else split_bounds(self._split, count)[split]
        if start == stop:
            return None
        limits = (config.max_sample_length, config.overlong)
        if config.sample_format == "bert":
            assert config.bert is not None
            return BertSamples(
                documents[0], config.bert, config.seed, binary_head=config.bert_binary_head,
                mask_prob=config.mask_prob, start=start, stop=stop,
                max_length=limits[0], overlong=limits[1],
            )  # fmt: skip
        if len(documents) == 2:
            return PairSamples(
                documents[0], documents[1], start, stop, max_length=limits[0], overlong=limits[1]
            )
        if config.sample_format == "chat":
            return ChatSamples(documents[0], start, stop, max_length=limits[0], overlong=limits[1])
        return GptSamples(documents[0], start, stop, max_length=limits[0], overlong=limits[1])
