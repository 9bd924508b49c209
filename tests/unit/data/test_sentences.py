from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.sentences import split_sentences

texts = st.text(st.sampled_from('ab AB.!?"\n\t)(1é。 '), max_size=60)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One is here. Two is there.", ["One is here.", "Two is there."]),
        ("Really? Yes! Good…  And on.", ["Really?", "Yes!", "Good…", "And on."]),
        ('He said "go." She went.', ['He said "go."', "She went."]),
        ("Dr. Who met Mr. J. Smith at 3.5 p.m. on Monday.", None),
        ("It costs 1.50 dollars, e.g. Tea.", None),
        ("see module.Function or os.Path", None),
        ("First part\n\nSecond part", ["First part", "Second part"]),
        ("one line\nthe same sentence", None),
        ("这是第一句。这是第二句。", ["这是第一句。", "这是第二句。"]),
        ("Épée. École.", ["Épée.", "École."]),
        ("The end. 42 follows.", ["The end.", "42 follows."]),
        ("", []),
        (" \n ", []),
    ],
)
def test_sentences_end_where_they_should(text: str, sentences: list[str] | None) -> None:
    assert split_sentences(text) == ([text] if sentences is None else sentences)


@given(texts)
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(s == s.strip() and s for s in sentences)


@given(texts)
def test_with_newlines_kept_nothing_is_lost(text: str) -> None:
    sentences = split_sentences(text, keep_newlines=True)
    if text.strip():
        assert "".join(sentences) == text
        assert all(s.strip() for s in sentences)
        assert [s.strip() for s in sentences] == split_sentences(text)
    else:
        assert sentences == []
