from __future__ import annotations

import gzip
import json
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_flex.data.encode import EncodeOptions
from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.pairs import PairSamples
from megatron_flex.data.preprocess import PreprocessOptions, preprocess
from tests.unit.data.killed import first_is_killed
from tools.preprocess_data import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def numbers(count: int) -> list[dict[str, object]]:
    """Documents ``0``, ``1 1``, ``2 2 2``, …"""
    return [{"text": " ".join([str(i)] * (i % 7 + 1))} for i in range(count)]


def run(source: str, prefix: Path, *words: str, workers: int = 1) -> int:
    flags = ["--input", source, "--output-prefix", str(prefix), *NULL, *words]
    return main([*flags, "--workers", str(workers)])


def read(prefix: Path, name: str = "text_document") -> list[list[int]]:
    documents = IndexedDocuments(f"{prefix}_{name}")
    lengths = documents.lengths(np.arange(documents.num_documents)).tolist()
    return [documents.read(i, 0, n).tolist() for i, n in enumerate(lengths)]


def test_one_document_a_line_in_order(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", numbers(20))
    assert run(source, tmp_path / "new" / "out", "--append-eod") == 0
    assert read(tmp_path / "new" / "out") == [[i] * (i % 7 + 1) + [1000] for i in range(20)]
    names = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert names == ["out_text_document.bin", "out_text_document.idx"]


def test_megatron_core_reads_what_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": ["1 2", "3"]}, {"text": "4"}])
    assert run(source, tmp_path / "out", "--append-eod", "--split-sentences") == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert [s.tolist() for s in (dataset[0], dataset[1], dataset[2])] == [
        [1, 2], [3, 1000], [4, 1000],
    ]  # fmt: skip
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert dataset.index.dtype == np.uint16


def test_flawed_lines_are_counted_and_not_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Situation 20: the first document is empty.
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"text": ""}\n{"text": "1 2"}\r\n{"text": "3"\n\n\xff\n{"other": 1}\n'
        b'{"text": 5}\n{"text": "4"}'
    )
    assert run(str(source), tmp_path / "out") == 0
    assert read(tmp_path / "out") == [[1, 2], [4]]
    report = capsys.readouterr().out
    assert "text: 2 documents, 3 tokens" in report
    assert "skipped: 6 lines" in report
    for note in (
        "byte-order mark removed", "CRLF line ending", "empty text", "broken JSON", "blank line",
        "invalid UTF-8", "no key 'text'", "key 'text' is not a string",
    ):  # fmt: skip
        assert f"  {note}: 1 (first in {source}, line " in report


def test_strict_stops_and_leaves_the_old_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.jsonl", numbers(3))
    assert run(good, tmp_path / "out") == 0
    before = {p.name: p.read_bytes() for p in tmp_path.glob("out*")}
    bad = write(tmp_path / "bad.jsonl", [{"text": "1"}, {"txt": "2"}])
    assert run(bad, tmp_path / "out", "--strict") == 1
    assert "bad.jsonl, line 2: no key 'text'" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in tmp_path.glob("out*")} == before


def test_pairs_stay_aligned(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [{"p": "1", "c": "2"}, {"p": "3", "c": ""}, {"p": "4"}, {"p": "5", "c": "6"}],
    )
    words = ["--json-keys", "p", "c", "--append-eod", "--append-eod-keys", "c"]
    assert run(source, tmp_path / "out", *words) == 0
    assert read(tmp_path / "out", "p_document") == [[1], [5]]
    assert read(tmp_path / "out", "c_document") == [[2, 1000], [6, 1000]]


def test_workers_and_ordered_partitions_give_the_very_same_files(tmp_path: Path) -> None:
    # Not a multiple of the partitions, and more chunks than are read ahead.
    source = write(tmp_path / "in.jsonl", numbers(951))
    assert run(source, tmp_path / "one", "--append-eod") == 0
    words = ["--append-eod", "--partitions", "2", "--keep-sequential-samples"]
    assert run(source, tmp_path / "four", *words, workers=4) == 0
    for ending in (".bin", ".idx"):
        one, four = (tmp_path / f"{n}_text_document{ending}" for n in ("one", "four"))
        assert one.read_bytes() == four.read_bytes()
    assert len(list(tmp_path.iterdir())) == 5  # nothing else is left


@pytest.mark.parametrize(("count", "words"), [(301, ()), (257, ("--partitions", "2"))])
def test_no_line_is_lost_between_workers(
    tmp_path: Path, count: int, words: tuple[str, ...]
) -> None:
    source = write(tmp_path / "in.jsonl", numbers(count))
    assert run(source, tmp_path / "out", *words, workers=2) == 0
    written = read(tmp_path / "out")
    assert sorted(written) == [[i] * (i % 7 + 1) for i in range(count)]
    assert words or written == sorted(written)


def test_partitions_take_lines_in_turn_as_in_megatron(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", numbers(7))
    assert run(source, tmp_path / "out", "--partitions", "3", workers=3) == 0
    assert [d[0] for d in read(tmp_path / "out")] == [0, 3, 6, 1, 4, 2, 5]


def test_several_and_packed_inputs_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [{"text": "2"}])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n'))
    assert run(str(tmp_path / "*.jsonl*"), tmp_path / "out") == 0
    assert read(tmp_path / "out") == [[1], [2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--partitions", "2"], "--workers 1 must be a multiple of --partitions 2"),
        (["--keep-newlines"], "without --split-sentences"),
        (["--append-eod-keys", "text"], "without --append-eod"),
        (["--append-eod", "--append-eod-keys", "x"], "x: not in --json-keys"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file"),
        (["--json-keys", "nothing"], "no document to write; skipped: 3 lines; no key 'nothing': 3"),
        (["--log-interval", "0"], "--log-interval"),
    ],
)
def test_what_cannot_be_done_is_one_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", numbers(3))
    assert run(source, tmp_path / "out", *words) == 1
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("preprocess_data:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_leaves_no_half_written_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", numbers(30))
    # The temporary .bin is a link to a device that is always full.
    os.symlink("/dev/full", tmp_path / f"out_text_document.part{os.getpid()}.bin")
    assert run(source, tmp_path / "out") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_pair_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    source = write(tmp_path / "[in].jsonl", [{"prompt": "1", "completion": "2 3"}])
    words = ("--json-keys", "prompt", "completion")
    assert run(source, tmp_path / "out", *words) == 0
    written = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    assert len(written) == 4
    write(Path(source), [{"prompt": "4", "completion": "5"}])
    # The second index cannot be written, when all of the first data set has been.
    os.mkdir(tmp_path / f"out_completion_document.part{os.getpid()}.idx")
    assert run(source, tmp_path / "out", *words) == 1
    left = {path.name: path.read_bytes() for path in tmp_path.glob("out*") if path.is_file()}
    assert left == written


def test_a_worker_that_dies_is_an_error_not_a_wait(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", numbers(300))
    dying = PreprocessOptions(
        inputs=(source,),
        output_prefix=str(tmp_path / "out"),
        make_tokenizer=partial(os._exit, 3),
        vocab_size=10,
        encode=EncodeOptions(("text",)),
        workers=2,
    )
    with pytest.raises(DataError, match="a worker process ended with status 3; try fewer"):
        preprocess(dying)
    assert not list(tmp_path.glob("out*"))


def test_a_partition_whose_worker_is_killed_ends_the_others(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", numbers(6000))
    dying = PreprocessOptions(
        inputs=(source,),
        output_prefix=str(tmp_path / "out"),
        make_tokenizer=partial(first_is_killed, tmp_path / "mark"),
        vocab_size=10,
        encode=EncodeOptions(("text",)),
        workers=2,
        partitions=2,
    )
    began = time.monotonic()
    with pytest.raises(DataError, match=r"was killed by SIGKILL \(out of memory\?\)"):
        preprocess(dying)
    assert time.monotonic() - began < 30
    assert not list(tmp_path.glob("out*"))


PAIR = ["--json-keys", "prompt", "completion", "--append-eod"]


def pairs_of(prefix: Path) -> PairSamples:
    """The pairs as a training run reads them."""
    names = (f"{prefix}_{key}_document" for key in ("prompt", "completion"))
    prompts, completions = map(IndexedDocuments, names)
    return PairSamples(prompts, completions)


def test_a_prompt_gets_no_end_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "1 2", "completion": "3"}] * 3)
    assert run(source, tmp_path / "out", *PAIR) == 0
    assert read(tmp_path / "out", "prompt_document") == [[1, 2]] * 3
    assert read(tmp_path / "out", "completion_document") == [[3, 1000]] * 3
    assert "warning" not in capsys.readouterr().err
    pairs = pairs_of(tmp_path / "out")
    row = pairs.read(0, 0, 0, 3, inputs=True, targets=True)
    assert row.tokens is not None
    assert row.labels is not None
    assert (row.tokens.tolist(), row.labels.tolist()) == ([1, 2, 3], [2, 3, 1000])
    assert pairs.ended_prompts(1000) is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prompt_that_ends_in_the_end_token_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    lines: list[dict[str, object]] = [{"prompt": "1", "completion": "3"} for _ in range(5)]
    lines[2]["prompt"] = "1 1000"
    source = write(tmp_path / "in.jsonl", lines)
    assert run(source, tmp_path / "out", *PAIR, workers=workers) == 0
    assert "warning: 'prompt' ends in the end token" in capsys.readouterr().err
    pairs = pairs_of(tmp_path / "out")
    assert str(pairs.ended_prompts(1000)).startswith("1 of 5 prompts in ")
    assert run(source, tmp_path / "out", *PAIR, "--strict", workers=workers) == 1
    assert "line 3: 'prompt' ends in the end token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "more", "warned"),
    [
        (("prompt", "completion"), ("prompt", "completion"), "'prompt' ends in the end token"),
        (("p", "c"), ("c",), ""),
        (("p", "c"), ("p", "c"), ""),  # two texts, for all that is known
    ],
)
def test_end_tokens_that_are_asked_for_are_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys: tuple[str, str],
    more: tuple[str, ...],
    warned: str,
) -> None:
    source = write(tmp_path / "in.jsonl", [{keys[0]: "1", keys[1]: "2"}])
    words = ["--json-keys", *keys, "--append-eod", "--append-eod-keys", *more]
    assert run(source, tmp_path / "out", *words) == 0
    for key, token in zip(keys, (1, 2), strict=True):
        expected = [token, 1000] if key in more else [token]
        assert read(tmp_path / "out", f"{key}_document") == [expected]
    error = capsys.readouterr().err
    assert (warned in error) if warned else ("warning" not in error)
