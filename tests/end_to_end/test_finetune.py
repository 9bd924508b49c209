"""examples/finetune: from a Hugging Face directory and conversations to one that is trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples.finetune import chitchat
from megatron_flex.data.chat import ChatSamples
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.paths import Split, split_bounds
from megatron_flex.telemetry import jsonl
from tests.end_to_end.processes import ROOT, Job
from tests.unit.checkpoint.hugging_face import make
from tests.unit.data.chats import template, write_tokenizer
from tools import preprocess_data
from tools.checkpoint import convert

SCRIPT = ROOT / "examples" / "finetune" / "finetune.sh"
LIMIT, SPLIT = 200, "80,20,0"

# Stands in for python and torchrun: writes what it was started with.
PROGRAM = r"""#!/usr/bin/env bash
exec /usr/bin/env python3 -S -c '
import json, os, sys
with open(os.environ["RECORD"], "a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\n")
if "--save-dir" in sys.argv:
    os.makedirs(sys.argv[sys.argv.index("--save-dir") + 1])
' "${0##*/}" "$@"
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real dialogues, as the script of the example writes them."""
    pytest.importorskip("chitchat_dataset")
    path = tmp_path_factory.mktemp("chitchat") / "all.jsonl"
    assert chitchat.main(["--output", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def chats(everything: Path) -> Path:
    """Some of them."""
    path = everything.with_name("chats.jsonl")
    path.write_text("".join(everything.read_text().splitlines(keepends=True)[:60]))
    return path


def test_who_speaks_first_is_the_user_and_messages_in_a_row_are_one() -> None:
    def sent(*parts: tuple[str, str]) -> list[dict[str, str]]:
        return [{"sender": sender, "text": text} for sender, text in parts]

    dialogue = {"messages": [sent(("b", "hi "), ("b", " ")), sent(("a", "1"), ("a", "2")),
                             sent(("a", "3")), sent(("b", "bye"))]}  # fmt: skip
    assert chitchat.conversation(dialogue) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "1\n2\n3"},
        {"role": "user", "content": "bye"},
    ]
    assert chitchat.conversation({"messages": [sent(("a", "hello?"))]}) is None


def test_all_dialogues_with_an_answer_are_written(everything: Path) -> None:
    lines = [json.loads(line) for line in everything.open()]
    assert len(lines) == 4017
    for line in lines:
        roles = [m["role"] for m in line["messages"]]
        assert roles[:2] == ["user", "assistant"]
        assert all(a != b for a, b in pairwise(roles))


def script(
    model: Path, chats: Path, run: Path, programs: Path, *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with programs that write down how they were started."""
    programs.mkdir(exist_ok=True)
    for name in ("python", "torchrun"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True, exist_ok=True)
    tracker.write_text("6\n")  # as if the run had been
    record = programs / "record"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)}
    environment |= {"TRAIN_ITERS": "6", "PREPROCESS_WORKERS": "1", "BACKEND": "gloo", **variables}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(model), str(chats), str(run), *more],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    shutil.rmtree(tracker.parent)
    return done


def commands(
    model: Path, chats: Path, run: Path, programs: Path, *more: str, **variables: str
) -> list[list[str]]:
    """What the script starts, in order."""
    done = script(model, chats, run, programs, *more, **variables)
    assert done.returncode == 0, done.stderr
    (run / "model").rename(programs / "model")
    return [json.loads(line) for line in (programs / "record").open()]


def their_loss(directory: Path, prefix: Path) -> float:
    """transformers' mean loss of what counts in the validation data, one sample at a time."""
    documents = IndexedDocuments(str(prefix))
    start, stop = split_bounds(SPLIT, documents.num_documents)[Split.VALID]
    samples = ChatSamples(documents, start, stop, max_length=LIMIT)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    total, count = 0.0, 0
    for i in range(samples.selection.size):
        (length,) = samples.lengths(np.array([i])).tolist()
        row = samples.read(i, 0, 0, length, inputs=True, targets=True)
        assert row.tokens is not None
        assert row.labels is not None
        assert row.loss_mask is not None
        with torch.no_grad():
            logits = model(torch.from_numpy(row.tokens)[None]).logits[0].double()
        counts = torch.from_numpy(row.loss_mask) > 0
        labels = torch.from_numpy(row.labels)[counts]
        total += float(torch.nn.functional.cross_entropy(logits[counts], labels, reduction="sum"))
        count += len(labels)
    return total / count


@pytest.mark.parametrize(("name", "style"), [("llama 3", "llama-3"), ("qwen2, tied", "qwen-2.5")])
def test_a_model_is_taught_to_chat_and_exported(
    chats: Path, tmp_path: Path, name: str, style: str
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    make(name, vocab_size=420, max_position_embeddings=256).save_pretrained(model)
    write_tokenizer(model, template(style))
    prepare, train, export = commands(
        model, chats, run, tmp_path / "programs", "--num-workers", "0", SPLIT=SPLIT, WORKERS="2",
        SEQ_LENGTH=str(LIMIT), GLOBAL_BATCH_SIZE="8", EVAL_INTERVAL="3", LR="3e-3",
    )  # fmt: skip
    assert prepare[:2] == ["python", "tools/preprocess_data.py"]
    assert preprocess_data.main(prepare[2:]) == 0
    assert train[:5] == ["torchrun", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py"]
    assert {"--flexpipe", "--load-hf"} <= set(train)
    with Job(tmp_path / "job").start(train[4], train[5:], size=2) as job:
        assert job.wait(120) == [0, 0], job.output
    assert export[:2] == ["python", "tools/checkpoint/convert.py"]
    assert convert.main(export[2:]) == 0
    records = jsonl.read(run / "log.jsonl")
    losses = [r["lm loss"] for r in records if r["event"] == "validation"]
    assert len(losses) == 2
    prefix = run / "data_chat_document"
    assert losses[-1] < their_loss(model, prefix) - 0.1
    assert their_loss(run / "model", prefix) == pytest.approx(losses[-1], rel=1e-5)
    plain = transformers.PreTrainedTokenizerFast
    before, after = (plain.from_pretrained(path) for path in (model, run / "model"))
    asked = [{"role": "user", "content": "How are  you?\n"}]
    words = {"add_generation_prompt": True, "return_dict": False}
    assert after.apply_chat_template(asked, **words) == before.apply_chat_template(asked, **words)
    end = after.convert_tokens_to_ids("<|eot_id|>" if style == "llama-3" else "<|im_end|>")
    ends = json.loads((run / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert end in (ends if isinstance(ends, list) else [ends])


def test_a_model_without_a_template_gets_chatml_with_its_weights(
    chats: Path, tmp_path: Path
) -> None:
    model, run = write_tokenizer(tmp_path / "model"), tmp_path / "run"
    (model / "config.json").write_text("{}")
    prepare, _, export = commands(model, chats, run, tmp_path / "programs")
    for words in (prepare, export):
        given = words[words.index("--chat-template") + 1]
        assert given == "examples/finetune/chatml.jinja"
    assert (ROOT / given).read_text() == template("chatml")


def test_data_of_other_conversations_and_too_long_samples_are_refused(tmp_path: Path) -> None:
    model, run, programs = write_tokenizer(tmp_path / "model"), tmp_path / "run", tmp_path / "bin"
    (model / "config.json").write_text('{"hidden_size": 8, "max_position_embeddings": 64}')
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("{}")
    other.write_text("{} ")
    refused = script(model, one, run, programs, SEQ_LENGTH="65")
    assert refused.returncode == 2
    assert f"SEQ_LENGTH=65 is more than the 64 positions of {model}: lower it" in refused.stderr
    _, train, _ = commands(model, one, run, programs)
    assert train[train.index("--seq-length") + 1] == "64"
    (run / "data_chat_document.idx").write_text("as if it had been written")
    refused = script(model, other, run, programs)
    assert refused.returncode == 2
    assert f"{run} has data that were made from another file" in refused.stderr
    (programs / "record").unlink()
    shutil.rmtree(programs / "model")
    assert len(commands(model, one, run, programs)) == 2, "data are made once"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give three words: MODEL CHATS RUN"),
        (("nowhere", "a", "b"), "nowhere has no config.json"),
        ((".", "a", "b"), "has no config.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(words: tuple[str, ...], message: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
