"""What a run says of the samples that were cut to slices."""

from __future__ import annotations

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.loop.measures import cut_of
from megatron_flex.telemetry.summary import Summary
from tests.unit.config import commands
from tests.unit.telemetry.records import record

CHAIN = [MicroBatch((Slice(7, a, a + 10, 30), Slice.all_of(8 + a, 5))) for a in (0, 10, 20)]
SHORT = [MicroBatch((Slice.all_of(n, 3), Slice.all_of(n + 1, 3))) for n in (60, 62)]


def said(*extras: dict[str, float]) -> list[str]:
    summary = Summary()
    for number, extra in enumerate(extras, 1):
        summary.iteration(record(number, extra=extra))
    return [x for x in summary.lines(commands.config(), None) if "slices" in x]


def test_a_cut_is_counted() -> None:
    numbers, notes = cut_of([*CHAIN, *SHORT])
    assert numbers == {"micro-batches": 5.0, "sliced-samples": 1.0, "slices": 3.0}
    assert notes == {"sliced": "1 in 3"}
    assert cut_of(SHORT) == ({"micro-batches": 2.0, "sliced-samples": 0.0, "slices": 0.0}, {})


def test_the_summary_says_what_slices_save() -> None:
    whole = {"sliced-samples": 0.0, "slices": 0.0}
    first = {"sliced-samples": 2.0, "slices": 5.0}
    planned = {
        **first, "predicted-uncorrected": 2.0, "predicted-without-slices": 3.0,
    }  # fmt: skip
    assert said(whole) == []
    assert said(whole, first) == [" slices: 2 long samples in 5 slices"]
    (line,) = said(whole, planned, planned)
    assert line.startswith(" slices: 4 long samples in 10 slices; ")
    assert "1.50 times as long" in line
