"""Splitting text into sentences by rule, without downloads (``--split-sentences``).

Megatron-LM's tool loads a Punkt model from NLTK's server. The rules here are plain: a sentence ends
at ``.``, ``!`` or ``?`` before white space and something that can begin a sentence, unless the word
is a known abbreviation or an initial; and at a blank line.
"""

from __future__ import annotations

import re

_BORDER = re.compile(
    r"""
    (?: [.!?\u2026]+ ["'\u201d\u2019)\]]*   # end marks and closing quotes
        (?P<gap> \s+ )
        (?= ["'\u201c\u2018(\[]* [^\Wa-z_] | [-*\u2022#>] )  # not lower case
      | (?P<blank> [^\S\n]* \n \s* \n \s* )  # an empty line
      | [\u3002\uff01\uff1f]+ ["\u201d\u2019)\]]* (?P<wide> \s* )  # CJK end marks
    )
    """,
    re.VERBOSE,
)
_ABBREVIATIONS = (
    " mr mrs ms dr prof jr st vs etc inc ltd co corp e.g i.e cf al fig figs eq eqs sec no nos vol"
    " pp ed eds approx dept est gen gov sen rep rev capt col lt sgt jan feb mar apr jun jul aug sep"
    " sept sr oct nov dec "
)
_LAST_WORD = re.compile(r"[\w.]*\w$")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """The sentences of a text, none of them blank.

    Without ``keep_newlines`` white space around sentences is dropped; with it, the white space
    after a sentence stays with it, and the sentences joined give the text.
    """
    pieces = []
    start = 0
    for match in _BORDER.finditer(text):
        if match["gap"] is not None and match[0][0] == "." and _abbreviated(text, match.start()):
            continue
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    if not keep_newlines:
        return [piece.strip() for piece in pieces if piece.strip()]
    joined: list[str] = []
    for piece in pieces:  # a blank piece cannot stand alone
        if joined and not (piece.strip() and joined[-1].strip()):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined if any(s.strip() for s in joined) else []


def _abbreviated(text: str, period: int) -> bool:
    """Whether the word before the full stop at ``period`` is an abbreviation or an initial."""
    found = _LAST_WORD.search(text, max(0, period - 16), period)
    if found is None:
        return False
    word = found[0].lower()
    return f" {word} " in _ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")
