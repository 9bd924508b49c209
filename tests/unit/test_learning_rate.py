"""Learning-rate and weight-decay schedules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.learning_rate import LearningRateSchedule, ScheduleError
from tests.unit.config.commands import config

PEAK, BATCH, ITERS = 1e-3, 16, 20


def schedule(flags: str = "", without: tuple[str, ...] = ()) -> LearningRateSchedule:
    c = config(flags, without=without)
    return LearningRateSchedule(c.learning_rate, c.training)


def rates(flags: str, without: tuple[str, ...] = ()) -> list[float]:
    """Learning rate before each iteration, and after the last."""
    s = schedule(flags, without)
    values = [s.learning_rate]
    for _ in range(ITERS):
        s.step(BATCH)
        values.append(s.learning_rate)
    return values


CURVES: list[tuple[str, Callable[[int], float]]] = [
    ("--lr-decay-style constant", lambda k: PEAK),
    ("", lambda k: PEAK * (1 - k / ITERS)),
    ("--min-lr 1e-4", lambda k: 1e-4 + 9e-4 * (1 - k / ITERS)),
    ("--lr-decay-style cosine", lambda k: PEAK * 0.5 * (1 + math.cos(math.pi * k / ITERS))),
    (
        "--lr-decay-iters 10 --lr-warmup-iters 5",
        lambda k: PEAK * (k / 5 if k <= 5 else max(0.0, (10 - k) / 5)),
    ),
    (
        "--lr-warmup-fraction .25 --lr-warmup-init 1e-4",
        lambda k: 1e-4 + 9e-4 * k / 5 if k <= 5 else PEAK * (20 - k) / 15,
    ),
    (
        "--lr-decay-style inverse-square-root --lr-warmup-iters 4",
        lambda k: PEAK * (k / 4 if k <= 4 else math.sqrt(4 / k)),
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear",
        lambda k: PEAK * min(1.0, (20 - k) / 4),
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4",
        lambda k: PEAK * (1.0 if k <= 16 else 2 * 0.5 ** ((k - 16) / 4) - 1),
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style minus_sqrt",
        lambda k: PEAK * (1.0 if k <= 16 else 1 - math.sqrt((k - 16) / 4)),
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style cosine",
        lambda k: PEAK * (1.0 if k <= 16 else 0.5 * (1 + math.cos(math.pi * (k - 16) / 4))),
    ),
]


@pytest.mark.parametrize(("flags", "curve"), CURVES, ids=[c[0] for c in CURVES])
def test_the_learning_rate_follows_its_formula(flags: str, curve: Callable[[int], float]) -> None:
    expected = [curve(k) for k in range(ITERS + 1)]
    assert rates(flags) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("iters", "samples"),
    [
        ("--lr-warmup-iters 5", "--lr-warmup-samples 80"),
        ("--lr-decay-iters 10", "--lr-decay-samples 160"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 4",
            "--lr-decay-style WSD --lr-wsd-decay-samples 64",
        ),
        ("--lr-warmup-fraction .1", "--lr-warmup-fraction .1"),
    ],
)
def test_samples_and_iterations_give_the_same_schedule(iters: str, samples: str) -> None:
    assert rates(iters) == rates(f"--train-samples 320 {samples}", ("--train-iters",))


def test_weight_decay_is_constant_or_grows() -> None:
    assert schedule("--weight-decay .3").weight_decay == 0.3
    s = schedule("--weight-decay-incr-style linear --start-weight-decay .1 --end-weight-decay .3")
    assert s.weight_decay == pytest.approx(0.1)
    s.step(BATCH * ITERS // 2)
    assert s.weight_decay == pytest.approx(0.2)
    s.step(BATCH * ITERS)
    assert s.weight_decay == pytest.approx(0.3)
    s = schedule("--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 1")
    s.step(BATCH * ITERS // 4)
    assert s.weight_decay == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))


@given(
    st.sampled_from([flags for flags, _ in CURVES]),
    st.lists(st.integers(0, 3 * BATCH), max_size=8),
    st.lists(st.integers(0, 3 * BATCH), max_size=8),
)
def test_a_resumed_schedule_goes_on_as_if_it_had_not_stopped(
    flags: str, before: list[int], after: list[int]
) -> None:
    whole, first, second = schedule(flags), schedule(flags), schedule(flags)
    for samples in before:
        whole.step(samples)
        first.step(samples)
    second.step(7)  # loading replaces the position, it does not add to it
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.samples == sum(before)
    for samples in after:
        whole.step(samples)
        second.step(samples)
        assert (second.learning_rate, second.weight_decay) == (
            whole.learning_rate,
            whole.weight_decay,
        )


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--lr 2e-3", "--lr: checkpoint 0.001, flags 0.002"),
        ("--min-lr 1e-5", "--min-lr: checkpoint 0.0, flags 1e-05"),
        ("--lr-warmup-iters 2", "--lr-warmup-*"),
        ("--lr-decay-iters 30", "--lr-decay-*"),
        ("--lr-decay-style cosine", "--lr-decay-style: checkpoint linear, flags cosine"),
        ("--weight-decay .2", "--weight-decay"),
        ("--train-iters 40 --lr-decay-iters 20", "--train-iters"),
        ("--lr-warmup-iters 1 --lr-warmup-init 1e-5", "--lr-warmup-init"),
    ],
)
def test_a_schedule_that_differs_from_the_checkpoint_is_an_error(flags: str, name: str) -> None:
    saved, other = schedule(), schedule(flags)
    saved.step(BATCH)
    before = other.state_dict()
    with pytest.raises(ScheduleError) as caught:
        other.load_state_dict(saved.state_dict())
    assert name in str(caught.value)
    assert "--override-opt_param-scheduler" in str(caught.value)
    assert other.state_dict() == before


def test_the_flags_can_override_the_checkpoint() -> None:
    saved = schedule()
    saved.step(5 * BATCH)
    other = schedule("--load d --override-opt_param-scheduler --lr 2e-3")
    other.load_state_dict(saved.state_dict())
    assert other.learning_rate == pytest.approx(2e-3 * 0.75)


def test_the_checkpoint_can_override_the_flags() -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2 --lr-warmup-init 1e-5"
    saved = schedule(flags)
    for samples in (BATCH, 18 * BATCH):
        saved.step(samples)
        other = schedule("--load d --use-checkpoint-opt_param-scheduler --lr 2e-3")
        other.load_state_dict(saved.state_dict())
        assert other.learning_rate == saved.learning_rate


def test_megatron_core_reads_the_state() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ours = schedule("--lr-warmup-iters 3")
    ours.step(7 * BATCH)

    class Optimizer:
        def __init__(self) -> None:
            self.param_groups: list[dict[str, float]] = [{}]

    optimizer = Optimizer()
    theirs = OptimizerParamScheduler(
        optimizer, 0.0, 1.0, 0.0, 0, 1, "cosine", 0.0, 0.0, 1, "constant"
    )
    theirs.load_state_dict(ours.state_dict())
    assert optimizer.param_groups[0]["lr"] == ours.learning_rate
    state = theirs.state_dict()
    again = schedule("--lr-warmup-iters 3")
    again.load_state_dict(state)
    assert again.learning_rate == ours.learning_rate
