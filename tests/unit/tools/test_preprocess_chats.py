"""tools/preprocess_data.py on conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flex.data.chat import ChatSamples
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.unit.data.chats import template, write_tokenizer
from tools.preprocess_data import main

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template("llama-3"))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def run(tokenizer: Path, source: Path | str, prefix: Path, *words: str, workers: int = 1) -> int:
    flags = ["--input", str(source), "--output-prefix", str(prefix)]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return main([*flags, "--workers", str(workers), *words])


def answers(tokenizer: Path, prefix: Path) -> list[str]:
    """What counts of each conversation, as a training run reads it."""
    made = ChatSamples(IndexedDocuments(f"{prefix}_chat_document"))
    lengths = made.lengths(np.arange(made.selection.size)).tolist()
    texts = []
    for i, length in enumerate(lengths):
        row = made.read(i, 0, 0, length, inputs=True, targets=True)
        assert row.labels is not None
        assert row.loss_mask is not None
        said = row.labels[row.loss_mask > 0].tolist()
        texts.append(HuggingFaceTokenizer(str(tokenizer)).decode(said))
    return texts


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"instruction": "hi", "input": "", "output": "hello"},
        {"prompt": "hi", "completion": "hello"},
    ],
)
def test_the_form_is_found(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]
) -> None:
    source = write(tmp_path / "in.jsonl", [record] * 3)
    assert run(tokenizer, source, tmp_path / "out") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|eot_id|>"] * 3
    out = capsys.readouterr()
    assert "tokenizer_config.json" in out.out.splitlines()[0]
    assert "chat: 3 documents" in out.out
    assert f"--sample-format chat --data-path {tmp_path}/out_chat_document" in out.out
    assert "note" not in out.err


def test_lines_of_several_forms_are_read_unless_one_is_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[str, Any]] = [
        {"messages": MESSAGES},
        {"instruction": "a", "output": "b"},
        {"prompt": "c", "completion": "d"},
        {"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "f"}]},
    ]
    source = write(tmp_path / "in.jsonl", records)
    assert run(tokenizer, source, tmp_path / "out") == 0
    assert answers(tokenizer, tmp_path / "out") == [f"{x}<|eot_id|>" for x in ("hello", *"bdf")]
    assert run(tokenizer, source, tmp_path / "out", "--chat-format", "messages") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|eot_id|>"]
    assert "no key 'messages': 3" in capsys.readouterr().out


def test_a_template_of_the_users_and_the_loss_on_all(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"messages": MESSAGES}])
    (tmp_path / "mine.jinja").write_text(template("chatml"))
    given = ("--chat-template", str(tmp_path / "mine.jinja"))
    assert run(tokenizer, source, tmp_path / "out", *given, "--append-eod") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|im_end|><|endoftext|>"]
    assert run(tokenizer, source, tmp_path / "out", "--loss-on", "all") == 0
    (text,) = answers(tokenizer, tmp_path / "out")
    assert text.startswith("<|start_header_id|>user")  # the very first token is no label
    assert "(100.0 %)" in capsys.readouterr().out


def test_without_a_template_it_is_chatml_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = write_tokenizer(tmp_path / "none")
    source = write(tmp_path / "in.jsonl", [{"messages": MESSAGES}] * 2)
    assert run(none, source, tmp_path / "out") == 0
    assert answers(none, tmp_path / "out") == ["hello<|im_end|>"] * 2
    error = capsys.readouterr().err
    assert error.count("note: the tokenizer has no chat template, so it is ChatML") == 1


def test_answers_that_begin_with_a_header_are_told_of(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"messages": MESSAGES}])
    (tmp_path / "old.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert (
        run(tokenizer, source, tmp_path / "out", "--chat-template", str(tmp_path / "old.jinja"))
        == 0
    )
    assert answers(tokenizer, tmp_path / "out") == ["assistant: hello\n"]
    assert "has no generation prompt: 'assistant: '" in capsys.readouterr().err


def test_workers_give_the_same_files_and_flaws_are_counted_with_their_place(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[str, Any]] = [
        {"messages": [*MESSAGES[:1], {"role": "assistant", "content": f"answer {i}"}]}
        for i in range(200)
    ]
    records[70] = {"messages": MESSAGES[:1]}
    records[140] = {"messages": MESSAGES[:1]}
    records[150] = {"text": "a"}
    source = write(tmp_path / "in.jsonl", records)
    assert run(tokenizer, source, tmp_path / "one") == 0
    report = capsys.readouterr().out
    assert "skipped: 3 lines" in report
    assert f"the assistant says nothing: 2 (first in {source}, line 71)" in report
    assert f"no key 'messages': 1 (first in {source}, line 151)" in report
    assert run(tokenizer, source, tmp_path / "two", workers=2) == 0
    for ending in ("bin", "idx"):
        one, two = (tmp_path / f"{n}_chat_document.{ending}" for n in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    capsys.readouterr()
    assert run(tokenizer, source, tmp_path / "one", "--strict") == 1
    assert "in.jsonl, line 71: the assistant says nothing" in capsys.readouterr().err


def test_rows_of_parquet_are_lines(tokenizer: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"messages": [MESSAGES] * 5, "id": list(range(5))})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    assert run(tokenizer, tmp_path / "in.parquet", tmp_path / "out") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|eot_id|>"] * 5
    table = pyarrow.table({"text": ["a", "b", None]})
    parquet.write_table(table, tmp_path / "text.parquet")
    assert run(tokenizer, tmp_path / "text.parquet", tmp_path / "out") == 0
    assert IndexedDocuments(f"{tmp_path}/out_text_document").num_documents == 2


def test_items_of_a_json_array_are_lines(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "alpaca.json"
    records = [{"instruction": "hi", "input": "", "output": "hello"}] * 3
    source.write_text(json.dumps([*records, {"instruction": "\ud83d", "output": "a"}], indent=2))
    assert run(tokenizer, source, tmp_path / "out") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|eot_id|>"] * 3
    assert f"invalid UTF-8: 1 (first in {source}, line 4)" in capsys.readouterr().out
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(tokenizer, source, tmp_path / "out") == 0
    assert answers(tokenizer, tmp_path / "out") == ["hello<|eot_id|>"] * 3
    source.write_text('[{"instruction": "hi"')
    assert run(tokenizer, source, tmp_path / "out") == 1
    assert "alpaca.json: cannot read it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "words", "message"),
    [
        ([{"a": 1}], ("--sample-format", "chat"), "its first lines have the keys a. Conv"),
        ([{"messages": MESSAGES, "prompt": "a", "completion": "b"}], (),
         "may be any of messages, prompt-completion"),
        ([{"messages": MESSAGES}], ("--json-keys", "a", "--chat-format", "messages"),
         "--chat-format is for conversations"),
        ([{"messages": MESSAGES}], ("--json-keys", "a", "--sample-format", "chat"),
         "--json-keys is for texts"),
        ([{"messages": MESSAGES}], ("--split-sentences",), "--split-sentences is not for"),
        ([{"messages": MESSAGES}], ("--chat-template", "nowhere"), "--chat-template nowhere"),
        ([{"messages": MESSAGES[:1]}], (), "no document to write"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_clear_message(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    records: list[dict[str, Any]], words: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    source = write(tmp_path / "in.jsonl", records)
    assert run(tokenizer, source, tmp_path / "out", *words) == 1
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("preprocess_data:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.glob("out*"))


def test_a_parquet_file_that_is_none_is_one_message(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_bytes(b"nothing")
    assert run(tokenizer, tmp_path / "in.parquet", tmp_path / "out") == 1
    assert "in.parquet: cannot read it" in capsys.readouterr().err


def test_markers_that_a_tokenizer_cannot_write_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hi", "hello", "assistant", "user"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "mine.jinja").write_text(template("chatml"))
    source = write(tmp_path / "in.jsonl", [{"messages": MESSAGES}])
    argv = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1",
            "--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(tmp_path / "vocab.txt"),
            "--chat-template", str(tmp_path / "mine.jinja")]  # fmt: skip
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert "warning: the tokenizer cannot write '<|im_end|>' of the chat template" in err
    assert "cannot write '<|im_start|>assistant'" in err
