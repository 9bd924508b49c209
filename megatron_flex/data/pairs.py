"""Pairs of prompt and completion: the loss is on the completion only.

On disk a pair is one document in each of two Megatron data sets, ``{prefix}_prompt_document`` and
``{prefix}_completion_document``, as ``tools/preprocess_data.py --json-keys prompt completion``
writes them. So lengths *and* the number of targets are known from the two indices alone.
"""

from __future__ import annotations

import numpy as np

from megatron_flex.data.documents import Documents
from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray
from megatron_flex.data.samples import Overlong, Row, select

_LOOKED_AT = 1000  # prompts whose last token is read


class PairSamples:
    """Samples ``t = prompt + completion``: inputs ``t[:-1]``, labels ``t[1:]``.

    The loss mask is one where the label is a completion token (the very first token of a sample is
    never a label). Arguments and errors as :class:`megatron_flex.data.gpt.GptSamples`; truncation
    cuts the end, and a pair whose completion is cut off altogether has no target. With
    ``Overlong.SPLIT`` a pair is as many samples as it needs, each with the next ``max_length``
    inputs, from the first with a target on: each token of a completion is a label once, and only
    the first samples have (the end of) the prompt.
    """

    num_losses = 1

    def __init__(
        self,
        prompts: Documents,
        completions: Documents,
        start: int = 0,
        stop: int | None = None,
        *,
        max_length: int | None = None,
        overlong: Overlong = Overlong.TRUNCATE,
    ) -> None:
        if prompts.num_documents != completions.num_documents:
            raise DataError(
                f"'{prompts.name}' has {prompts.num_documents} documents and '{completions.name}'"
                f" {completions.num_documents}: a pair is the same document of both; write both in"
                " one run of tools/preprocess_data.py"
            )
        self._prompts, self._completions = prompts, completions
        self._limit = np.iinfo(np.int64).max if max_length is None else max_length
        self._cut = overlong is Overlong.TRUNCATE
        self._split = overlong is Overlong.SPLIT
        stop = prompts.num_documents if stop is None else stop
        name = f"{prompts.name} + {completions.name}"
        self.selection = select(
            name, start, stop, self._measure, max_length, overlong, divide=self._divide,
            may_lose_targets=self._cut,
        )  # fmt: skip

    def lengths(self, index: IntArray) -> IntArray:
        """Input tokens of each sample, ``[n]`` int64."""
        starts, stops, _ = self._places(index)
        return stops - starts

    def loss_tokens(self, index: IntArray) -> IntArray:
        """Completion tokens that are labels, ``[n, 1]`` int64."""
        starts, stops, prompts = self._places(index)
        # Labels are tokens start + 1 .. stop; those from the end of the prompt on count.
        return (stops - np.maximum(starts, np.maximum(prompts, 1) - 1))[:, None]

    def read(
        self, index: int, number: int, start: int, stop: int, *, inputs: bool, targets: bool
    ) -> Row:
        """Tokens ``[start, stop)`` of a sample and their targets (``number`` plays no part)."""
        document = int(self.selection.documents(np.array([index]))[0])
        (begin,), _, (prompt,) = (a.tolist() for a in self._places(np.array([index])))
        start, stop = start + begin, stop + begin
        end = stop + 1 if targets else stop
        if not (inputs or targets):
            return Row()
        parts = []
        if start < prompt:
            parts.append(self._prompts.read(document, start, min(end, prompt)))
        if end > prompt:
            parts.append(self._completions.read(document, max(start - prompt, 0), end - prompt))
        tokens = np.concatenate(parts)
        if not targets:
            return Row(tokens=tokens)
        return Row(
            tokens=tokens[:-1] if inputs else None,
            labels=tokens[1:],
            loss_mask=(np.arange(start + 1, end) >= prompt).astype(np.float32),
        )

    def ended_prompts(self, eod: int) -> str | None:
        """A sentence if prompts end in the end token ``eod``, by a look at some of them."""
        count = min(_LOOKED_AT, self.selection.size)
        index = np.unique(np.linspace(0, self.selection.size - 1, count).astype(np.int64))
        documents = self.selection.documents(index)
        lengths = self._prompts.lengths(documents)
        ended = sum(
            int(self._prompts.read(document, length - 1, length)[0]) == eod
            for document, length in zip(documents.tolist(), lengths.tolist(), strict=True)
            if length
        )
        if not ended:
            return None
        return (
            f"{ended} of {len(index)} prompts in {self._prompts.name} end in the end token {eod},"
            " which stands between prompt and completion: write them without it"
            " (tools/preprocess_data.py --append-eod-keys with the completion's key only)"
        )

    def _places(self, index: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """For each sample: first input and one after the last, counted in the whole pair; and the
        tokens of the prompt."""
        documents = self.selection.documents(index)
        lengths, _ = self._measure(documents)
        prompts = self._prompts.lengths(documents)
        starts = self.selection.parts(index) * self._limit
        if self._split:
            starts += self._without(documents)
        return starts, np.minimum(lengths, starts + self._limit), prompts

    def _without(self, documents: IntArray) -> IntArray:
        """Input tokens of each pair before the first sample with a target."""
        lengths, _ = self._measure(documents)
        first = np.maximum(self._prompts.lengths(documents), 1) - 1  # the input of the first label
        return np.where(lengths > self._limit, first // self._limit * self._limit, 0)

    def _divide(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        without = self._without(documents)
        return -(-(self._measure(documents)[0] - without) // self._limit), without

    def _measure(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        prompts = self._prompts.lengths(documents)
        lengths = prompts + self._completions.lengths(documents) - 1
        used = np.minimum(lengths, self._limit) if self._cut else lengths
        # Labels are tokens 1 .. used; those from the end of the prompt on count.
        return lengths, np.maximum(used + 1 - np.maximum(prompts, 1), 0)
