"""Progress where nobody watches a terminal."""

from __future__ import annotations

import pytest

from megatron_flex.data import bar


def test_a_line_at_a_time_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bar, "INTERVAL", 0.0)
    with bar.progress_bar(4, "measure", unit=" runs") as shown:
        for _ in range(4):
            shown.update(1)
    text = capsys.readouterr().err
    assert "\r" not in text
    assert [line.partition(",")[0] for line in text.splitlines()] == [
        f"measure: {percent:3d}% of 4 runs" for percent in (0, 25, 50, 75, 100)
    ]


@pytest.mark.parametrize(("seconds", "lines"), [(1, 0), (3, 0), (13, 2), (25, 3)])
def test_what_is_short_says_nothing(
    seconds: int, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(bar.tqdm, "monitor_interval", 0)
    for _ in bar.shown(range(seconds), "parse", unit=" files"):
        clock[0] += 1
    text = capsys.readouterr().err
    assert len(text.splitlines()) == lines, text
    assert f"parse: 100% of {seconds} files" in text or not lines


def test_between_its_beginning_and_its_end_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with bar.progress_bar(1000, "measure") as shown:
        for _ in range(1000):
            shown.update(1)
    assert len(capsys.readouterr().err.splitlines()) == 2
