"""State and special tokens in the files of Hugging Face tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megatron_flex.data.encode import EncodeOptions, Encoder
from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.build import build_tokenizer
from tools.preprocess_data import main

DATA = Path(__file__).parents[2] / "data"
WITH_TRUNCATION = DATA / "tokenizer_with_truncation"
WITHOUT_ITS_EOS = DATA / "tokenizer_without_its_eos"
KEYS = {"eos_token": "eod", "pad_token": "pad", "cls_token": "cls", "sep_token": "sep",
        "mask_token": "mask"}  # fmt: skip


def load(directory: Path) -> Tokenizer:
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(directory))


def texts(directory: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (directory / "in.jsonl").read_text().splitlines()]


def preprocess(directory: Path, out: Path) -> list[list[int]]:
    """The documents that tools/preprocess_data.py makes of ``in.jsonl``."""
    words = ["--input", str(directory / "in.jsonl"), "--output-prefix", str(out), "--append-eod",
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(directory),
             "--workers", "1"]  # fmt: skip
    assert main(words) == 0
    written = IndexedDocuments(f"{out}_text_document", load(directory).vocab_size)
    lengths = written.lengths(np.arange(written.num_documents)).tolist()
    return [written.read(i, 0, n).tolist() for i, n in enumerate(lengths)]


def changed(source: Path, to: Path, **fields: Any) -> Path:
    """A copy of ``source`` whose ``tokenizer.json`` has other ``fields``."""
    content = json.loads((source / "tokenizer.json").read_text())
    (to / "tokenizer.json").write_text(json.dumps({**content, **fields}))
    return to


def configured(to: Path, **content: Any) -> Path:
    """A copy of the tokenizer with 320 tokens, with another ``tokenizer_config.json``."""
    shutil.copy(WITHOUT_ITS_EOS / "tokenizer.json", to)
    (to / "tokenizer_config.json").write_text(json.dumps(content))
    return to


def decoder(ids: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {str(number): {"content": name, "special": True} for name, number in ids.items()}


# ---- stored state ----------------------------------------------------------------------------


def test_stored_truncation_and_padding_are_not_obeyed(tmp_path: Path) -> None:
    tokenizer = load(WITH_TRUNCATION)
    documents = preprocess(WITH_TRUNCATION, tmp_path / "d")
    assert [tokenizer.decode(d[:-1]) for d in documents] == texts(WITH_TRUNCATION)
    assert [d[-1] for d in documents] == [1, 1, 1]
    lengths = [len(d) for d in documents]
    assert max(lengths) > 17  # one more than the file says, with the end token
    assert tokenizer.decode(tokenizer.encode("river")) == "river"  # not padded
    plain = load(changed(WITH_TRUNCATION, tmp_path, truncation=None, padding=None))
    assert [d[:-1] for d in documents] == [plain.encode(t) for t in texts(WITH_TRUNCATION)]


def test_a_stored_template_is_not_obeyed(tmp_path: Path) -> None:
    twice = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
        "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"],
        "special_tokens": {},
    }
    text = texts(WITH_TRUNCATION)[0]
    tokenizer = load(changed(WITH_TRUNCATION, tmp_path, post_processor=twice))
    assert tokenizer.encode(text) == load(WITH_TRUNCATION).encode(text)


def test_stored_dropout_is_not_obeyed(tmp_path: Path) -> None:
    content = json.loads((WITH_TRUNCATION / "tokenizer.json").read_text())
    model = {**content["model"], "dropout": 0.9}
    text = texts(WITH_TRUNCATION)[0]
    tokenizer = load(changed(WITH_TRUNCATION, tmp_path, model=model))
    assert tokenizer.encode(text) == load(WITH_TRUNCATION).encode(text)


# ---- special tokens --------------------------------------------------------------------------


def test_an_end_token_that_only_the_configuration_knows_has_its_id(tmp_path: Path) -> None:
    tokenizer = load(WITHOUT_ITS_EOS)
    assert (tokenizer.eod, tokenizer.vocab_size) == (320, 321)
    documents = preprocess(WITHOUT_ITS_EOS, tmp_path / "d")
    assert [d[-1] for d in documents] == [320, 320, 320]
    assert [tokenizer.decode(d[:-1]) for d in documents] == texts(WITHOUT_ITS_EOS)
    assert tokenizer.encode("<|im_end|>") == [320]
    assert tokenizer.decode([320]) == "<|im_end|>"


@pytest.mark.parametrize("key", KEYS)
def test_every_special_token_is_taken_from_the_decoder_or_is_an_error(
    key: str, tmp_path: Path
) -> None:
    # The vocabulary has <s> and </s>; neither stands in for a token that has no id.
    ids = decoder({"<other>": 320, "<wanted>": 321})
    tokenizer = load(configured(tmp_path, **{key: "<wanted>"}, added_tokens_decoder=ids))
    assert getattr(tokenizer, KEYS[key]) == 321
    assert tokenizer.vocab_size == 322
    named = configured(tmp_path, **{key: {"content": "missing"}}, added_tokens_decoder=ids)
    with pytest.raises(TokenizerError, match=f"{key} in .* is 'missing', which neither"):
        load(named)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (decoder({"<one>": 319}), "gives '<one>' the id 319, but in tokenizer.json '.*' has it"),
        ({"5": {"content": "</s>"}}, "gives '</s>' the id 5, but in tokenizer.json its id is 1"),
        (
            decoder({"<one>": 320, "<two>": 322}),
            "gives '<two>' the id 322, but the next free id .* is 321",
        ),
        ({"x": {"content": "a"}}, "'x' is no token id"),
        ({"320": {"special": True}}, "cannot be read"),
        ({"320": "a"}, "cannot be read"),
        ([320], "cannot be read"),
    ],
)
def test_a_decoder_that_contradicts_the_vocabulary_is_refused(
    ids: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(configured(tmp_path, added_tokens_decoder=ids))


def test_a_token_that_is_said_to_be_none_is_none(tmp_path: Path) -> None:
    assert load(configured(tmp_path)).eod == 1
    assert load(configured(tmp_path, eos_token=None)).eod is None


def test_of_several_usual_names_none_is_taken(tmp_path: Path) -> None:
    shutil.copy(WITHOUT_ITS_EOS / "tokenizer.json", tmp_path)
    both = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    both.add_special_tokens(["<|endoftext|>"])
    both.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.eod is None
    with pytest.raises(DataError, match="name eos_token in"):
        Encoder(tokenizer, EncodeOptions(("text",), eod_keys=("text",)))


def test_a_usual_name_that_is_not_marked_as_special_is_not_taken(tmp_path: Path) -> None:
    shutil.copy(WITHOUT_ITS_EOS / "tokenizer.json", tmp_path)
    assert load(tmp_path).eod == 1
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    assert (
        load(changed(WITHOUT_ITS_EOS, tmp_path, added_tokens=content["added_tokens"])).eod is None
    )
    assert load(changed(WITHOUT_ITS_EOS, tmp_path, added_tokens=[])).eod is None
