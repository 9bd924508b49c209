"""JSONL to ``.bin``/``.idx``, in several processes: what ``tools/preprocess_data.py`` does."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from megatron_flex.data.bar import progress_bar
from megatron_flex.data.chat_encode import CHAT, ChatOptions, make_encoder
from megatron_flex.data.encode import Encoded, EncodeOptions, Encoder, make_lines
from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed_writer import IndexedWriter
from megatron_flex.data.jsonl import RawLine, read_lines
from megatron_flex.processes import ProcessDied, Processes
from megatron_flex.tokenizers.base import Tokenizer

_CHUNK = 64  # lines that go to a worker at once
_AHEAD = 4  # chunks for each worker that are read ahead: bounds memory
_LOOK = 0.5  # seconds between looks whether another partition has failed


@dataclass(frozen=True)
class PreprocessOptions:
    """What to do; fields are named as the flags.

    ``make_tokenizer`` runs in each worker process, so it must be picklable. ``chat`` says how lines
    are conversations; without it they are texts.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    make_tokenizer: Callable[[], Tokenizer]
    vocab_size: int
    encode: EncodeOptions
    chat: ChatOptions | None = None
    workers: int = 1
    partitions: int = 1
    keep_sequential_samples: bool = False
    log_interval: int = 1000

    @property
    def make_encoder(self) -> Callable[[], Encoder]:
        """Makes what turns lines into documents, in each worker process."""
        # No method: workers would import this module, and PyTorch with it.
        return partial(make_encoder, self.make_tokenizer, self.encode, self.chat)

    def prefix(self, key: str, partition: int | None = None) -> str:
        """Where the documents of ``key`` go: ``{prefix}_{key}_{document|sentence}``.

        Those of a partition go where nobody has a data set of his own, and only for a while.
        """
        level = "sentence" if self.encode.split_sentences else "document"
        part = "" if partition is None else f".partition{partition}"
        return f"{self.output_prefix}_{key}_{level}{part}"


@dataclass
class Report:
    """What was written and what was not.

    ``notes`` counts what was odd, ``first`` has file and line where it was met first; ``counted``
    is the number of tokens of conversations that the loss is on.
    """

    lengths: dict[str, array[int]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[str, int]] = field(default_factory=dict)
    skipped: int = 0
    counted: int = 0

    @property
    def num_documents(self) -> int:
        """Documents written, of each key."""
        return len(next(iter(self.lengths.values()), ()))

    def add(self, other: Report) -> None:
        """Add the report of another partition."""
        self.skipped += other.skipped
        self.counted += other.counted
        for note, count in other.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count
            self.first[note] = min(other.first[note], self.first.get(note, other.first[note]))
        for key, lengths in other.lengths.items():
            self.lengths.setdefault(key, array("q")).extend(lengths)

    def lines(self) -> Iterator[str]:
        """The report for people, line by line."""
        for key, lengths in self.lengths.items():
            tokens = np.frombuffer(lengths, dtype=np.int64)
            if len(tokens):
                p50, p99 = np.percentile(tokens, (50, 99))
                yield (
                    f"{key}: {len(tokens)} documents, {tokens.sum()} tokens; tokens a document:"
                    f" mean {tokens.mean():.0f}, median {p50:.0f}, 99 % up to {p99:.0f}, longest"
                    f" {tokens.max()}"
                )
                if key == CHAT:
                    share = 100 * self.counted / max(1, int(tokens.sum()))
                    yield f"the loss is on {self.counted} of these tokens ({share:.1f} %)"
        yield f"skipped: {self.skipped} lines"
        for note, count in sorted(self.notes.items()):
            path, number = self.first[note]
            yield f"  {note}: {count} (first in {path}, line {number})"


def preprocess(options: PreprocessOptions) -> Report:
    """Tokenize all inputs and write the data sets, all of them or none.

    Raises:
        DataError: unreadable input, nothing to write, a flaw with ``strict``, or a dead worker.
        OSError: the output cannot be written.
    """
    if options.workers < 1 or options.partitions < 1 or options.workers % options.partitions:
        raise DataError(
            f"--workers {options.workers} must be a multiple of --partitions {options.partitions}"
        )
    for path in options.inputs:
        if not Path(path).is_file():
            raise DataError(f"--input {path}: no such file")
    if options.partitions == 1:
        return _partition(options, None, 0, threading.Event())
    block = 0
    if options.keep_sequential_samples:
        total = sum(1 for path in options.inputs for _ in read_lines(path))
        block = -(-total // options.partitions)
    try:
        return _merge(options, _run_partitions(options, block))
    finally:
        for number in range(options.partitions):
            for key in options.encode.keys:
                for ending in (".bin", ".idx"):
                    Path(options.prefix(key, number) + ending).unlink(missing_ok=True)


def _run_partitions(options: PreprocessOptions, block: int) -> Report:
    """Each partition writes in a thread of its own; its workers, which tokenize, are processes."""
    report, ended = Report(), threading.Event()
    with ThreadPoolExecutor(options.partitions) as pool:
        futures = [
            pool.submit(_partition, options, number, block, ended)
            for number in range(options.partitions)
        ]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            ended.set()  # whichever fails first ends the others
        for future in futures:
            report.add(future.result())
    if not report.num_documents:
        raise _nothing(report)
    return report


def _merge(options: PreprocessOptions, report: Report) -> Report:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(options.prefix(key), options.vocab_size))
            for key in options.encode.keys
        ]
        for key, writer in zip(options.encode.keys, writers, strict=True):
            for number in range(options.partitions):
                writer.add_files(options.prefix(key, number))
        _commit(writers)
    return report


def _commit(writers: Collection[IndexedWriter]) -> None:
    """Give all files their names once all are whole: data sets of one run belong together."""
    for writer in writers:
        writer.finish()
    for writer in writers:
        writer.commit()


def _partition(
    options: PreprocessOptions, partition: int | None, block: int, ended: threading.Event
) -> Report:
    """Handle one share of the lines: every n-th, or the block of ``block`` lines.

    ``partition`` is ``None`` where there is one only. Gives up where another has ``ended``.
    """
    report, number = Report(), partition or 0
    size = sum(Path(path).stat().st_size for path in options.inputs)
    lines = _share(options, number, block)
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(
                IndexedWriter(options.prefix(key, partition), options.vocab_size)
            )
            for key in options.encode.keys
        }
        bar = stack.enter_context(progress_bar(size, "tokenize", unit="B", position=number))
        reported = 0
        for encoded in stack.enter_context(closing(_encode(options, lines, ended))):
            _go_on(ended)
            for documents in encoded.documents:
                for key, document in documents.items():
                    writers[key].add(document.ids, document.lengths)
                    report.counted += sum(document.lengths[1::2]) if key == CHAT else 0
            report.add(Report(notes=encoded.notes, first=encoded.first, skipped=encoded.skipped))
            bar.update(encoded.position - bar.n)
            written = len(writers[options.encode.keys[0]].lengths)
            if written // options.log_interval > reported:
                reported = written // options.log_interval
                bar.set_postfix(documents=written, skipped=report.skipped, refresh=False)
        bar.update(size - bar.n)
        if partition is None and not writers[options.encode.keys[0]].lengths:
            raise _nothing(report)
        _commit(writers.values())
    report.lengths = {key: writer.lengths for key, writer in writers.items()}
    return report


def _share(options: PreprocessOptions, number: int, block: int) -> Iterator[RawLine]:
    """The lines of one partition; positions count over all inputs."""
    sizes = [Path(path).stat().st_size for path in options.inputs]
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    everything = chain.from_iterable(
        (
            RawLine(line.path, line.number, line.content, line.position + offset)
            for line in read_lines(path)
        )
        for path, offset in zip(options.inputs, before, strict=True)
    )
    if block:
        return islice(everything, number * block, (number + 1) * block)
    return islice(everything, number, None, options.partitions)


def _encode(
    options: PreprocessOptions, lines: Iterator[RawLine], ended: threading.Event
) -> Generator[Encoded, None, None]:
    """Encoded lines in their order, here or in worker processes."""
    chunks = iter(lambda: list(islice(lines, _CHUNK)), [])
    workers = options.workers // options.partitions
    if options.workers == 1:
        yield from map(options.make_encoder().lines, chunks)
        return
    with Processes(workers, partial(make_lines, options.make_encoder)) as processes:
        waiting: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            waiting.append(processes.submit(chunk))
            if len(waiting) >= workers * _AHEAD:
                yield _result(waiting.popleft(), ended)
        while waiting:
            yield _result(waiting.popleft(), ended)


def _result(future: Future[Encoded], ended: threading.Event) -> Encoded:
    while not wait([future], _LOOK).done:
        _go_on(ended)
    try:
        return future.result()
    except ProcessDied as error:
        raise DataError(f"{error}; try fewer --workers, which need less memory") from error


def _go_on(ended: threading.Event) -> None:
    if ended.is_set():
        raise DataError("another partition failed")


def _nothing(report: Report) -> DataError:
    return DataError("no document to write; " + "; ".join(line.strip() for line in report.lines()))
