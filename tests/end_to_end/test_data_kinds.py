"""From text to training for each kind of sample: documents, pairs, and BERT's sentences."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.end_to_end.processes import ROOT, Job
from tools import preprocess_data, stdlib_corpus, train_tokenizer

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 96"
    " --adam-eps 1e-6 --num-workers 0 --distributed-backend gloo"
)
TRAINING = shlex.split("--micro-batch-tokens 150 --global-batch-size 6 --train-iters 5 --lr 3e-3")
UNEVEN = ["--flexpipe-plan", "0:2@0,1 | 2:6@2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, and this package's own source as documents, pairs and sentences."""
    directory = tmp_path_factory.mktemp("files")
    root = str(ROOT / "megatron_flex" / "schedule")
    corpus, pairs = str(directory / "corpus.jsonl"), str(directory / "pairs.jsonl")
    assert stdlib_corpus.main(["--root", root, "--output", corpus]) == 0
    assert stdlib_corpus.main(["--root", root, "--format", "pair", "--output", pairs]) == 0
    tokenizer = str(directory / "tokenizer.model")
    words = ["--input", corpus, "--vocab-size", "500", "--output", tokenizer]
    assert train_tokenizer.main(words) == 0
    common = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer]
    common += ["--workers", "1", "--output-prefix", str(directory / "data")]
    for more in (
        ["--input", corpus, "--append-eod"],
        ["--input", corpus, "--split-sentences"],
        ["--input", pairs, "--json-keys", "prompt", "completion", "--append-eod",
         "--append-eod-keys", "completion"],
    ):  # fmt: skip
        assert preprocess_data.main([*common, *more]) == 0
    return directory


def flags(files: Path, prefix: str, *more: str) -> list[str]:
    data = ["--data-path", str(files / prefix), "--split", "9,1,0"]
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer"]
    tokenizer += ["--tokenizer-model", str(files / "tokenizer.model")]
    return [*MODEL, *TRAINING, *data, *tokenizer, *more]


@pytest.mark.parametrize(
    ("prefix", "more"),
    [("data_text_document", ()), ("data", ("--sample-format", "pair", "--overlong", "split"))],
)
def test_gpt_trains_alike_on_documents_and_on_pairs(
    workers: WorkerPool, files: Path, prefix: str, more: tuple[str, ...]
) -> None:
    words = flags(files, prefix, *more, "--eval-interval", "5", "--eval-iters", "2")
    alone = runs.run(workers, 1, words)
    split = runs.run(workers, 3, [*words, *UNEVEN])
    runs.assert_same(split, alone)
    assert len(alone.history.validations) == 1


@pytest.mark.parametrize("more", [("--overlong", "split"), ("--bert-no-binary-head",)])
def test_bert_trains_alike_with_and_without_the_sentence_order_head(
    workers: WorkerPool, files: Path, more: tuple[str, ...]
) -> None:
    words = flags(files, "data_text_sentence", *more)
    alone = runs.run(workers, 1, words, "bert")
    split = runs.run(workers, 3, [*words, *UNEVEN], "bert")
    runs.assert_same(split, alone)
    names = {name for r in alone.history.iterations for name in r.losses}
    head = "--bert-no-binary-head" not in more
    assert names == ({"lm loss", "sop loss"} if head else {"lm loss"})
    # Documents of a single sentence are left out where their order is asked for, and counted.
    counts = [line for line in alone.printed if line.startswith("   left out:")]
    assert any("without a target" in line for line in counts) is head


def test_bert_trains_with_a_wordpiece_vocabulary(
    workers: WorkerPool, files: Path, tmp_path: Path
) -> None:
    vocabulary, corpus = str(tmp_path / "vocab.txt"), str(files / "corpus.jsonl")
    words = ["--input", corpus, "--vocab-size", "500", "--output", vocabulary]
    assert train_tokenizer.main([*words, "--model-type", "wordpiece"]) == 0
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocabulary]
    words = ["--input", corpus, "--split-sentences", "--workers", "1", *tokenizer]
    assert preprocess_data.main([*words, "--output-prefix", str(tmp_path / "data")]) == 0
    data = ["--data-path", str(tmp_path / "data_text_sentence"), "--split", "1,0,0"]
    run = runs.run(workers, 1, [*MODEL, *TRAINING, *data, *tokenizer], "bert")
    assert len(run.losses) == 5
    assert run.losses[-1][0] < run.losses[0][0]


def test_bert_resumes_bit_for_bit_and_on_other_workers(
    workers: WorkerPool, files: Path, tmp_path: Path
) -> None:
    words = [*flags(files, "data_text_sentence"), "--lr-decay-style", "constant"]
    whole = runs.run(workers, 3, [*words, *UNEVEN], "bert")
    saving = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    first = runs.run(workers, 3, [*words, *UNEVEN, *saving, "--exit-interval", "2"], "bert")
    rest = runs.run(workers, 3, [*words, *UNEVEN, "--load", str(tmp_path)], "bert")
    assert len(first.losses) == 2
    assert rest.losses == whole.losses[2:]
    runs.assert_equal_bits(rest, whole)
    other = runs.run(workers, 2, [*words, "--load", str(tmp_path)], "bert")
    runs.assert_same(other, whole, start=2)


def test_the_bert_entry_point_logs_both_losses(files: Path, tmp_path: Path) -> None:
    words = [*flags(files, "data_text_sentence"), *UNEVEN, "--log-interval", "5"]
    with Job(tmp_path).start("pretrain_bert.py", words, size=3) as job:
        assert job.wait() == [0, 0, 0], job.output
    (line,) = (x for x in job.text(2).splitlines() if "iteration        5/       5" in x)
    assert "| lm loss: " in line
    assert "| sop loss: " in line
