from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data import bar
from megatron_flex.data.errors import DataError
from megatron_flex.tokenizers.build import build_tokenizer
from tools import train_tokenizer
from tools.train_tokenizer import main

TEXT = "def f(x):\n    return x + 1\n\n\nclass C:\n\tpass  # tab, and two blanks  \n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    lines = [json.dumps({"text": TEXT.replace("x", f"value_{i}")}) for i in range(200)]
    path.write_text("\n".join([*lines, "broken"]) + "\n")
    return path


@pytest.fixture(scope="module")
def model(corpus: Path) -> str:
    output = corpus.with_suffix(".model")
    words = ["--input", str(corpus), "--output", str(output), "--vocab-size", "400"]
    assert main(words) == 0
    return str(output)


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_no_text_is_changed_by_encoding(model: str, text: str) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_source_code_keeps_its_white_space(model: str) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 1.5


def test_the_model_serves_gpt_and_bert(model: str) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=model)
    assert tokenizer.vocab_size == 400
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (
        3, 4, 5, 6, 7,
    )  # fmt: skip


def test_the_same_input_gives_the_same_file(corpus: Path, model: str, tmp_path: Path) -> None:
    again = tmp_path / "again.model"
    assert main(["--input", str(corpus), "--output", str(again), "--vocab-size", "400"]) == 0
    assert again.read_bytes() == Path(model).read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["again.model"]


@pytest.mark.parametrize("cased", [False, True])
def test_a_wordpiece_vocabulary_is_berts(corpus: Path, tmp_path: Path, cased: bool) -> None:
    output = tmp_path / "vocab.txt"
    words = ["--input", str(corpus), "--output", str(output), "--model-type", "wordpiece",
             "--vocab-size", "100", *(["--cased"] if cased else [])]  # fmt: skip
    assert main(words) == 0
    pieces = output.read_text().splitlines()
    assert len(pieces) == 100
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    kind = "BertWordPieceCase" if cased else "BertWordPieceLowerCase"
    tokenizer = build_tokenizer(kind, vocab_file=str(output))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.continuation is not None
    assert tokenizer.continuation.any()
    said = tokenizer.decode(tokenizer.encode("class C: return value_17"))
    assert said == ("class C : return value _ 17" if cased else "class c : return value _ 17")
    # In another process, where hashes are other ones.
    again = tmp_path / "again.txt"
    words[3] = str(again)
    done = subprocess.run([sys.executable, train_tokenizer.__file__, *words], check=False)
    assert done.returncode == 0
    assert again.read_bytes() == output.read_bytes()


def test_special_tokens_are_one_piece_each(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "special.model"
    words = ["--input", str(corpus), "--output", str(output), "--vocab-size", "400"]
    assert main([*words, "--special-tokens", "<|user|>", "<|tool|>"]) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(output))
    ids = tokenizer.encode("x<|user|>y<|tool|><|user|>")
    assert ids[1] == ids[-1] != ids[-2]
    assert tokenizer.decode(ids) == "x<|user|>y<|tool|><|user|>"
    assert len(ids) == 5


def test_long_inputs_are_sampled_evenly(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.model"
    words = ["--input", str(corpus), "--output", str(output), "--vocab-size", "340"]
    assert main([*words, "--max-characters", "6000"]) == 0
    assert sentencepiece.SentencePieceProcessor(model_file=str(output)).get_piece_size() == 340


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab-size", "100000"], "--vocab-size 100000"),
        (
            ["--vocab-size", "400", "--json-keys", "txt"],
            "no line has text in txt; its lines have texts in text: give one of them to",
        ),
        (["--model-type", "wordpiece", "--vocab-size", "4000"], "the texts give"),
        (["--model-type", "wordpiece", "--vocab-size", "10"], "raise it"),
        (["--model-type", "wordpiece", "--special-tokens", "<a>"], "is for SentencePiece"),
        (["--cased"], "--cased is for --model-type wordpiece"),
        (["--vocab-size", "400", "--special-tokens", "<EOD>"], "--special-tokens must differ"),
        (["--vocab-size", "400", "--special-tokens", "<a>", "<a>"], "--special-tokens must differ"),
        (["--max-characters", "0"], "--max-characters"),
    ],
)
def test_what_cannot_be_trained_is_one_clear_message(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    output = tmp_path / "m.model"
    assert main(["--input", str(corpus), "--output", str(output), *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_what_takes_longer_says_how_far_it_is(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bar, "INTERVAL", 0.0)
    monkeypatch.setattr(train_tokenizer, "SHORT", 0.0)
    texts = [f"the {i} quick brown foxes jump over {i * i} lazy dogs" for i in range(200)]
    content = train_tokenizer.train_shown(texts, 320, kind)
    assert content == train_tokenizer.train(texts, 320, kind)
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("train: 100% of 320 pieces")
    assert "trainer" not in said, "SentencePiece's own log stays away"
    log = tmp_path / "log"
    for line, pieces in (("", 0), ("Merged: freq=3 merges=7", 7), ("EM size=640 obj=1", 160)):
        log.write_text(f"I0000 {line}\n")
        assert train_tokenizer._pieces(str(log), 320) == pieces


def test_a_training_that_is_killed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tokenizer, "train", lambda *_, **__: os.kill(os.getpid(), 9))
    with pytest.raises(DataError, match="training ended with status -9; is there too little mem"):
        train_tokenizer.train_shown(["a text"], 320, "bpe")
