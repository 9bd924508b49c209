"""Measuring a profile with the trainer's own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flex.cluster.profile import Profile, ProfileRangeWarning
from megatron_flex.model.layers import Kind
from megatron_flex.planner.memory import unit_memory
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.planner import Planner
from megatron_flex.profiling import (
    Shape,
    Workbench,
    fit,
    grid,
    measure,
    pooled,
    random_shapes,
    runs,
    whole,
)
from megatron_flex.runtime.machine import machine_name
from tests.unit.planner.instances_real import even_batch, small_cluster, small_model
from tools.profile_layers import main

SMALL = small_model(
    2, hidden_size=128, ffn_hidden_size=512, num_attention_heads=4, kv_channels=32,
    num_query_groups=4, vocab_size=500, padded_vocab_size=512, params_dtype="float32",
)  # fmt: skip


def test_a_grid_has_every_total_cut_to_every_length() -> None:
    shapes = grid([64, 100], [32, 64])
    assert {s.lengths for s in shapes} == {(32, 32), (64,), (32, 32, 32, 4), (64, 36), (100,)}
    assert all(s.tokens in (64, 100) for s in shapes)
    assert Shape((3, 4)).squares == 25


def test_random_shapes_stay_within_their_ranges() -> None:
    for shape in random_shapes(50, (64, 2048), 512, seed=3):
        assert 64 <= shape.tokens <= 2048
        assert max(shape.lengths) <= 512


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_a_measured_profile_is_complete_and_plans(architecture: str) -> None:
    config = SMALL
    if architecture == "bert":
        config = small_model(
            2, architecture="bert", causal=False, num_tokentypes=2, binary_head=True,
            hidden_size=128, ffn_hidden_size=512, num_attention_heads=4, kv_channels=32,
            num_query_groups=4, vocab_size=500, padded_vocab_size=512, params_dtype="float32",
        )  # fmt: skip
    bench = Workbench(config, torch.device("cpu"))
    shapes = grid([32, 256, 2048], [16, 64])  # pairs must show, also on a busy machine
    calls: list[int] = []
    samples = measure(bench, shapes, 2, calls.append)
    assert sum(calls) == runs(shapes, 2)
    profile = fit(bench, samples, shapes, "test", {})
    assert profile.machine == machine_name(torch.device("cpu"))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.tokens == (32, 2048)
    assert profile.longest == 2048
    assert profile.kinds[Kind.ATTENTION].forward.per_pair > 0
    assert profile.kinds[Kind.MLP].forward.per_pair == 0
    for kind in (Kind.ATTENTION, Kind.MLP, Kind.HEAD):
        expected = unit_memory(config)[kind].activation
        assert profile.kinds[kind].activation == pytest.approx(expected, rel=0.1)
        assert profile.kinds[kind].update > 0
    # Longer must cost more, and the fit must know its own points within a factor.
    assert pooled(profile, samples).median < 0.5
    planner = Planner(config, profile, small_cluster(2), PlannerOptions(simulations=2))
    with pytest.warns(ProfileRangeWarning, match="32 to 2048 tokens"):
        decision = planner.decide([even_batch(4, 5000)], None)
    assert decision.predicted.seconds > 0


@pytest.mark.soak
def test_a_fitted_profile_predicts_what_it_has_not_seen() -> None:
    config = small_model(1, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=8,
                         kv_channels=32, num_query_groups=8, vocab_size=2000,
                         padded_vocab_size=2000, params_dtype="float32")  # fmt: skip
    torch.set_num_threads(1)
    bench = Workbench(config, torch.device("cpu"))
    shapes = grid([64, 128, 256, 512, 1024, 2048], [32, 128, 512])
    unseen = random_shapes(24, (64, 2048), 2048, seed=1)
    samples = measure(bench, [*shapes, *unseen], 9)
    known = {(s.tokens, s.squares) for s in shapes}
    seen = {k: [p for p in v if (p.tokens, p.squares) in known] for k, v in samples.items()}
    rest = {k: [p for p in v if (p.tokens, p.squares) not in known] for k, v in samples.items()}
    profile = fit(bench, seen, shapes, "test", {})
    for error in (pooled(profile, rest), whole(profile, rest)):
        assert error.median <= 0.05
        assert error.p90 <= 0.10


def test_the_tool_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    arguments = [
        "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "100",
        "--device", "cpu", "--repeats", "1", "--held-out", "3", "--no-links",
        "--output", str(path),
    ]  # fmt: skip
    assert main([*arguments, "--tokens", "64", "512", "2048", "--lengths", "16"]) == 0
    assert "all units together" in capsys.readouterr().out
    assert Profile.load(path).tokens == (64, 2048)
    assert main([*arguments, "--tokens", "128", "--lengths", "128"]) == 1
    assert "cannot tell" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "64", "0"], "--tokens must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--num-attention-heads", "0"], "no multiple of --num-attention-heads 0"),
        (["--device", "nowhere"], "--device nowhere"),
        (["--device", "meta"], "there is none here"),
        (["--output", "/dev/null/profile.json"], "--output /dev/null/profile.json cannot be"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
