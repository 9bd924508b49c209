"""Where simulated lengths come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_flex.data.errors import DataError
from megatron_flex.simulator.sources import LARGEST, Listed, Mixture, extremes, read_csv


def test_batches_are_known_by_their_number() -> None:
    source = Mixture(16, seed=3)
    assert source.batch(5) == Mixture(16, seed=3).batch(5)
    assert source.batch(5) != source.batch(6)
    assert Mixture(32, seed=3).batch(0) == (*source.batch(0), *source.batch(1))
    assert Mixture(16, seed=4).batch(5) != source.batch(5)


def test_a_share_of_the_samples_is_long() -> None:
    long = [n for k in range(50) for n in Mixture(40, share=0.25, median=9000).batch(k)]
    short = [n for k in range(50) for n in Mixture(40).batch(k)]
    changed = sum(a != b for a, b in zip(long, short, strict=True)) / len(long)
    assert changed == pytest.approx(0.25, abs=0.05)
    others = [a for a, b in zip(long, short, strict=True) if a != b]
    assert np.median(others) == pytest.approx(9000, rel=0.15)


def test_longer_samples_are_cut_off() -> None:
    assert max(Mixture(500, longest=300).batch(0)) == 300
    assert max(Listed(np.array([5, 900]), 2, longest=300).batch(0)) == 300


def test_every_epoch_has_every_sample() -> None:
    source = Listed(np.arange(1, 13), 4, seed=1)
    epochs = [tuple(n for k in range(3 * e, 3 * e + 3) for n in source.batch(k)) for e in range(2)]
    assert [sorted(e) for e in epochs] == [list(range(1, 13))] * 2
    assert epochs[0] != epochs[1]


def test_lengths_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("10\n\n20\n")
    (tmp_path / "b").write_text("name,length\nx,7\ny,8\n")
    assert read_csv(tmp_path / "a").tolist() == [10, 20]
    assert read_csv(tmp_path / "b").tolist() == [7, 8]
    # As spreadsheets write it, with a number that no sample has.
    text = '"name","length"\r\n"x, y",7\r\nz,99999999999999999999\r\n'
    (tmp_path / "c").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_csv(tmp_path / "c").tolist() == [7, LARGEST]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\nten\n", "line 2: expected a whole number: 'ten'"),
        ("name,size\nx,7\n", r"none of its columns is named length: \['name', 'size'\]"),
        ("length\n", "has no lengths"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(DataError, match=message):
        read_csv(tmp_path / "a")


def test_wrong_sources_are_refused() -> None:
    with pytest.raises(DataError, match=r"between 0 and 1, not 1\.5"):
        Mixture(4, share=1.5)
    with pytest.raises(DataError, match="each of at least 1 token"):
        Listed(np.array([3, 0]), 2)


def test_extremes_are_the_largest_first() -> None:
    source = Mixture(8)
    longest = [max(source.batch(k)) for k in range(30)]
    found = extremes(source, 30, max, 3)
    assert [longest[k] for k in found] == sorted(longest, reverse=True)[:3]
