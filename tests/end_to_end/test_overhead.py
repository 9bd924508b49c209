"""The benchmark of the executor's overhead: its arms train alike, whatever they take."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks import overhead

SMALL = "--iterations 2 --layers 1 --hidden 32 --batch 4 --tokens 96 --longest 64 --vocab 90"


def test_all_arms_have_the_losses_of_the_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(shlex.split(SMALL))  # exits with an error where losses differ
    printed = capsys.readouterr().out
    for arm in ("by hand", "executor", "iteration", "padded"):
        assert re.search(rf"^{arm} +\d+\.\d +\d+ +\d+\.\d+ +\d+\.\d+$", printed, re.M), printed
    assert "packing against padding to the batch maximum" in printed


def test_an_arm_that_trains_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    update = overhead.ByHand.__call__

    def forgetful(self, batch, packed, parts):  # type: ignore[no-untyped-def]
        return update(self, batch, packed[1:] or packed, parts)

    monkeypatch.setattr(overhead.ByHand, "__call__", forgetful)
    with pytest.raises(SystemExit, match="has loss"):
        overhead.main(shlex.split(SMALL))
