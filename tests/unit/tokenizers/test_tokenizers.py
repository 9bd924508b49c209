from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.tokenizers.base import TokenizerError
from megatron_flex.tokenizers.build import TYPES, build_tokenizer
from megatron_flex.tokenizers.null import NullTokenizer
from megatron_flex.tokenizers.sentence_piece import SentencePieceTokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs", "¿qué?"]
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cafe", "[", "]",
         "mask", "café", "Un", ",", "中", "文", "#", "#un")  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small tokenizer files of all kinds."""
    directory = tmp_path_factory.mktemp("tokenizers")
    for name, symbols in (("plain", []), ("special", ["<CLS>", "<SEP>", "<EOD>", "<MASK>"])):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT * 3),
            model_prefix=str(directory / name),
            vocab_size=340,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            control_symbols=symbols,
            minloglevel=2,
        )
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        TEXT * 3, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(directory))
    bpe.save(str(directory / "tokenizer.json"))
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return directory


def test_null_tokenizer_reads_ids_and_has_one_id_more() -> None:
    tokenizer = NullTokenizer(7)
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 7)
    assert tokenizer.encode("1 5  3\n") == [1, 5, 3]
    assert tokenizer.decode([1, 5]) == "1 5"
    assert tokenizer.encode("") == []
    for text, message in (
        ("1 8", "token ids from 1 to 8, but --vocab-size allows 0 to 7"),
        ("-1", "token ids from -1 to -1, but"),
        ("1 x", "NullTokenizer takes texts of token ids: .*'x'"),
    ):
        with pytest.raises(TokenizerError, match=message):
            tokenizer.encode(text)


def test_sentencepiece_gets_the_special_tokens_that_it_lacks(files: Path) -> None:
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(files / "plain.model")
    ).get_piece_size()
    tokenizer = SentencePieceTokenizer(str(files / "plain.model"))
    # In Megatron's order; <s> and </s> are in the model, the padding piece is not.
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.pad) == tuple(
        range(pieces, pieces + 5)
    )
    assert tokenizer.vocab_size == pieces + 5
    assert tokenizer.encode("fox<EOD>dog</s>") == [
        *tokenizer.encode("fox"), tokenizer.eod, *tokenizer.encode("dog"), 2,
    ]  # fmt: skip
    assert "<EOD>" in tokenizer.decode(tokenizer.encode("fox<EOD>dog"))


def test_sentencepiece_uses_the_special_tokens_that_it_has(files: Path) -> None:
    tokenizer = SentencePieceTokenizer(str(files / "special.model"))
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (3, 4, 5, 6)
    assert tokenizer.vocab_size == tokenizer.pad + 1


def test_gpt_sentencepiece_ends_documents_with_the_models_own_token(files: Path) -> None:
    tokenizer = build_tokenizer(
        "GPTSentencePieceTokenizer", tokenizer_model=str(files / "plain.model")
    )
    assert tokenizer.eod == 2
    assert tokenizer.mask is tokenizer.pad is None
    assert tokenizer.decode(tokenizer.encode("the lazy fox")) == "the lazy fox"


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30))
def test_byte_level_bpe_loses_nothing(files: Path, text: str) -> None:
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(files / "vocab.json"),
        merge_file=str(files / "merges.txt"),
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_gpt2_end_of_text_is_added_not_found_in_texts(files: Path) -> None:
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(files / "vocab.json"),
        merge_file=str(files / "merges.txt"),
    )
    assert tokenizer.eod == 0
    assert tokenizer.vocab_size == len(json.loads((files / "vocab.json").read_text()))
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")


def test_a_tokenizer_json_or_its_directory_is_read(files: Path, tmp_path: Path) -> None:
    by_file = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(files / "tokenizer.json"))
    by_directory = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(files))
    assert by_file.encode("the fox") == by_directory.encode("the fox")
    assert by_file.eod == 0
    (tmp_path / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "the"}, "pad_token": "o", "model_max_length": 5})
    )
    named = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert named.eod == named.encode("the")[0] != 0
    assert named.pad == named.encode("o")[0]


def test_added_tokens_have_ids_and_nothing_is_added_to_texts(files: Path, tmp_path: Path) -> None:
    plain = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    size = plain.get_vocab_size()
    plain.add_tokens(["<added>"])
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert tokenizer.encode("<added>") == [size]
    assert tokenizer.vocab_size == size + 1


def test_special_tokens_are_read_from_both_files(files: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    maps = {"special_tokens_map.json": {"eos_token": "q", "mask_token": {"content": "m"}},
            "tokenizer_config.json": {"sep_token": {"content": "s"}, "cls_token": "c"}}  # fmt: skip
    for name, content in maps.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    vocabulary = json.loads((files / "vocab.json").read_text())
    assert (found.eod, found.mask) == (vocabulary["q"], vocabulary["m"])
    assert (found.sep, found.cls) == (vocabulary["s"], vocabulary["c"])
    assert found.pad is None


@pytest.mark.parametrize(
    ("lower_case", "text", "words"),
    [
        (True, "Unaffable CAFÉ", ["un", "##aff", "##able", "cafe"]),
        (False, "Unaffable café", ["Un", "##aff", "##able", "café"]),
        (True, "中文,un", ["中", "文", ",", "un"]),
        (True, "[MASK]", ["[", "mask", "]"]),
        (True, "un" + "x" * 300, ["[UNK]"]),
    ],
)
def test_word_pieces_are_those_of_the_original_bert(
    files: Path, lower_case: bool, text: str, words: list[str]
) -> None:
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    tokenizer = build_tokenizer(kind, vocab_file=str(files / "vocab.txt"))
    assert tokenizer.encode(text) == [WORDS.index(word) for word in words]


def test_word_pieces_know_their_special_tokens_and_continuations(files: Path) -> None:
    tokenizer = build_tokenizer("BertWordPieceCase", vocab_file=str(files / "vocab.txt"))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    # [BOS] and [EOS] come behind the vocabulary, as in Megatron.
    assert (WORDS[17], WORDS[18]) == ("#", "#un")
    assert tokenizer.vocab_size == len(WORDS) + 2
    assert tokenizer.eod == len(WORDS) + 1
    assert tokenizer.continuation is not None
    assert tokenizer.continuation.nonzero()[0].tolist() == [6, 7]
    assert len(tokenizer.continuation) == tokenizer.vocab_size


@pytest.mark.parametrize("kind", TYPES)
def test_a_missing_flag_or_file_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"{kind} needs --"):
        build_tokenizer(kind)
    if kind != "NullTokenizer":
        nowhere = str(tmp_path / "nowhere")
        with pytest.raises(TokenizerError, match=r"nowhere: no such file"):
            build_tokenizer(kind, tokenizer_model=nowhere, vocab_file=nowhere, merge_file=nowhere)


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("nothing of the kind\n")
    for kind in TYPES[:-1]:
        with pytest.raises(TokenizerError, match=r"--(tokenizer-model|vocab-file) .*wrong"):
            build_tokenizer(
                kind, tokenizer_model=str(wrong), vocab_file=str(wrong), merge_file=str(wrong)
            )
    with pytest.raises(TokenizerError, match="TikTokenizer is not known"):
        build_tokenizer("TikTokenizer")


def test_a_tokenizer_needs_no_torch() -> None:
    import subprocess

    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_flex.tokenizers.build import build_tokenizer\n"
        "from megatron_flex.tokenizers import hugging_face, sentence_piece\n"
        "from megatron_flex.data import encode\n"
        "print(build_tokenizer('NullTokenizer', vocab_size=3).vocab_size)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr
