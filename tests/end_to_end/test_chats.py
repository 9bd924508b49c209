"""From a file of conversations to training: what the assistant says counts, however it is cut."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_flex.data.chat import ChatSamples
from megatron_flex.data.indexed import IndexedDocuments
from tests.close import assert_numbers_close
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.end_to_end.processes import Job
from tests.oracles import chat as oracle
from tests.unit.data.chats import template, write_tokenizer
from tools import preprocess_data

LIMIT = 160
FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4"
    f" --seq-length {LIMIT} --adam-eps 1e-6 --num-workers 0 --distributed-backend gloo"
    " --tokenizer-type HuggingFaceTokenizer --split 9,1,0 --sample-format chat"
    " --global-batch-size 6 --train-iters 3 --lr 3e-3 --log-interval 1"
)
PACKED = ["--micro-batch-tokens", "200"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template, and the data set that was made with it."""
    directory = tmp_path_factory.mktemp("chats")
    tokenizer = write_tokenizer(directory / "tokenizer", template("llama-3"))
    draw = random.Random(5)
    with (directory / "chats.jsonl").open("w") as stream:
        for _ in range(60):
            longest = draw.choice((2, 2, 9, 60))
            messages, _ = oracle.random_conversation(draw, calls=False, longest=longest)
            stream.write(json.dumps({"messages": messages}) + "\n")
    words = ["--input", str(directory / "chats.jsonl"), "--output-prefix", str(directory / "data")]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    assert preprocess_data.main([*words, "--workers", "1"]) == 0
    return directory


def flags(files: Path, *more: str) -> list[str]:
    data = ["--data-path", str(files / "data_chat_document")]
    return [*FLAGS, *data, "--tokenizer-model", str(files / "tokenizer"), *more]


def test_the_data_are_of_all_kinds(files: Path) -> None:
    documents = IndexedDocuments(str(files / "data_chat_document"))
    counts = ChatSamples(documents, max_length=LIMIT).selection.counts
    assert counts.truncated > 3, "cut after an answer"
    assert counts.dropped > 0, "no answer ends in time"
    lengths = ChatSamples(documents, max_length=LIMIT).lengths(np.arange(counts.samples))
    assert lengths.max() > 4 * lengths.min()


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (1, PACKED),
        (1, [*PACKED, "--flexpipe-slice-tokens", "40"]),
        (2, [*PACKED, "--pipeline-model-parallel-size", "2", "--flexpipe-slice-tokens", "30"]),
        (3, [*PACKED, "--flexpipe-plan", "0:2@0,1 | 2:6@2"]),
        (2, ["--flexpipe", "--flexpipe-slice-tokens", "auto"]),
    ],
    ids=["packed", "slices", "pipeline of slices", "uneven", "flexpipe"],
)
def test_losses_are_those_of_one_sample_at_a_time(
    workers: WorkerPool, files: Path, size: int, more: list[str]
) -> None:
    evaluated = ["--eval-interval", "3", "--eval-iters", "1"]
    alone = runs.run(workers, 1, flags(files, "--micro-batch-size", "1", *evaluated))
    made = runs.run(workers, size, flags(files, *more, *evaluated))
    runs.assert_same(made, alone)
    pairs = zip(made.history.validations, alone.history.validations, strict=True)
    for here, there in pairs:
        assert_numbers_close(list(here.losses.values()), list(there.losses.values()), 3e-7, "eval")


def test_texts_would_count_in_full_and_that_is_said(workers: WorkerPool, files: Path) -> None:
    words = flags(files, *PACKED, "--sample-format", "text")
    alone = runs.run(workers, 1, words)
    assert any("give --sample-format chat" in text for text in alone.printed)


def test_two_workers_train_on_chats_with_flexpipe(files: Path, tmp_path: Path) -> None:
    with Job(tmp_path).start("pretrain_gpt.py", flags(files, "--flexpipe"), size=2) as job:
        assert job.wait(120) == [0, 0], job.output
    assert "iteration        3/       3" in job.output
