"""Profiles: text form, nonsense, ranges; and their fit to measured points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.cluster.cluster import load
from megatron_flex.cluster.fit import Point, errors, fit_line
from megatron_flex.cluster.profile import Line, Profile, ProfileError, ProfileRangeWarning
from megatron_flex.model.layers import Kind
from megatron_flex.planner.closed_form import closed_form_profile
from tests.unit.planner.instances_real import small_model

PROFILE = closed_form_profile(small_model(), load("a100"))


def test_the_text_form_round_trips(tmp_path: Path) -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    with pytest.raises(ProfileError, match="No such file"):
        Profile.load(tmp_path / "none.json")
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], b"\xff\xfe" + whole, b"", b"[]"):
        path.write_bytes(torn)
        with pytest.raises(ProfileError, match=r"not a profile|is no text"):
            Profile.load(path)
    with pytest.raises(OSError):  # noqa: PT011
        PROFILE.save(tmp_path)  # a directory
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kinds", "mlp", "forward", "per_token"), -1.0, "mlp.forward.per_token is -1.0"),
        (("kinds", "mlp", "forward", "per_token"), float("nan"), "mlp.forward.per_token is nan"),
        (("kinds", "mlp", "forward", "per_token"), 0.0, "cannot be free"),
        (("kinds", "head", "update"), float("inf"), "head.update is inf"),
        (("kinds", "head", "activation"), "much", "malformed"),
        (("longest",), float("inf"), "malformed"),
        (("kinds", "head", "activation"), 10**400, "malformed"),
        (("boundary",), -2.0, "boundary is -2.0"),
        (("tokens",), [100, 10], "is empty"),
        (("tokens",), [0, 10], "is empty"),
        (("longest",), 0, "is empty"),
        (("format",), 0, "measure it again"),
    ],
)
def test_nonsense_is_refused(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(PROFILE.to_json())
    part = data
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize("name", ["kinds", "boundary", "tokens", "longest", "links"])
def test_missing_sizes_are_refused(name: str) -> None:
    data = json.loads(PROFILE.to_json())
    del data[name]
    with pytest.raises(ProfileError, match=f"no field '{name}'"):
        Profile.from_json(json.dumps(data))
    with pytest.raises(ProfileError, match="not a profile"):
        Profile.from_json("[1, 2")


def test_a_missing_kind_is_named() -> None:
    data = json.loads(PROFILE.to_json())
    del data["kinds"]["head"]
    with pytest.raises(ProfileError, match="no costs of head"):
        Profile.from_json(json.dumps(data))


def test_out_of_range_is_extrapolated_with_a_warning_that_names_the_range() -> None:
    data = json.loads(PROFILE.to_json())
    data["tokens"], data["longest"] = [64, 4096], 2048
    profile = Profile.from_json(json.dumps(data))
    for tokens, longest in (((64, 4096), 2048), ((32, 8192), 4096)):
        assert profile.warn_outside(tokens, longest) is None
    for tokens, longest in (((64, 8193), 2048), ((64, 4096), 4097), ((8, 100), 50)):
        with pytest.warns(ProfileRangeWarning, match="64 to 4096 tokens and samples up to 2048"):
            assert profile.warn_outside(tokens, longest) is not None


def points(line: Line, noise: float, seed: int, outliers: int = 0) -> list[Point]:
    r = np.random.default_rng(seed)
    found = []
    for tokens in (64, 128, 256, 512, 1024, 2048):
        for length in (32, 128, 2048):
            squares = tokens * min(length, tokens)
            value = line(tokens, squares) * float(np.exp(noise * r.standard_normal()))
            found.append(Point(tokens, squares, value))
    for i in r.choice(len(found), outliers, replace=False):
        p = found[i]
        found[i] = Point(p.tokens, p.squares, 3 * p.value)
    return found


@given(st.floats(0, 1e-3), st.floats(1e-7, 1e-5), st.floats(0, 1e-8))
def test_exact_points_give_the_line_back(fixed: float, per_token: float, per_pair: float) -> None:
    line = Line(fixed, per_token, per_pair)
    found = fit_line(points(line, 0.0, 0))
    for tokens, squares in ((64, 64**2), (700, 700 * 50), (4000, 4000**2)):
        assert found(tokens, squares) == pytest.approx(line(tokens, squares), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_disturbed_points_do_not_pull_the_fit(seed: int) -> None:
    line = Line(1e-4, 2e-6, 1e-9)
    found = fit_line(points(line, 0.02, seed, outliers=3))
    clean = points(line, 0.0, seed)
    assert errors(found, clean).p90 < 0.03


def test_coefficients_are_never_negative() -> None:
    falling = [Point(t, t * 10, 1.0 / t) for t in (1, 2, 4, 8)] + [Point(8, 64, 0.1)]
    found = fit_line(falling)
    assert min(found.fixed, found.per_token, found.per_pair) >= 0.0
    assert fit_line([Point(1, 1, 0.0), Point(2, 4, 0.0)]) == Line()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([Point(1, 1, float("nan"))], "finite"),
        ([Point(1, 1, -1.0)], "not negative"),
        ([], "finite and not negative"),
        ([Point(64, 64**2, 1.0), Point(64, 64**2, 1.0)], "cannot tell"),
        ([Point(t, t * 8, 1.0 * t) for t in (8, 16, 32)], "samples of different lengths"),
    ],
)
def test_points_that_say_nothing_are_refused(bad: list[Point], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        fit_line(bad, "forward")


def test_a_closed_form_grows_with_tokens_and_with_length() -> None:
    attention = PROFILE.kinds[Kind.ATTENTION]
    one, many = 2048.0**2, 64 * 32.0**2
    assert attention.forward(2048, one) > 1.05 * attention.forward(2048, many)
    mlp = PROFILE.kinds[Kind.MLP]
    assert mlp.forward(2048, one) == mlp.forward(2048, many)
    for kind in Kind:
        costs = PROFILE.kinds[kind]
        assert costs.backward(512, 512.0) >= costs.forward(512, 512.0)


def test_a_profile_of_another_model_is_refused_naming_what_differs() -> None:
    model = small_model()
    PROFILE.check_model(model)
    PROFILE.check_model(replace(model, num_layers=9, seed=7, max_position_embeddings=9000))
    other = replace(model, ffn_hidden_size=2 * model.ffn_hidden_size)
    with pytest.raises(ProfileError, match=r"another model \(ffn_hidden_size is \d+ in the pro"):
        PROFILE.check_model(other)
    with pytest.raises(ProfileError, match="padded_vocab_size"):
        PROFILE.check_model(replace(model, padded_vocab_size=model.padded_vocab_size + 128))


def test_another_machine_and_a_profile_of_before_are_doubted() -> None:
    measured = replace(PROFILE, machine="NVIDIA H200")
    assert measured.doubt("NVIDIA H200") is None
    assert measured.doubt(None) is None
    assert "measured on NVIDIA H200, and this is NVIDIA A100" in str(measured.doubt("NVIDIA A100"))
    data = json.loads(measured.to_json())
    del data["model"], data["machine"]
    before = Profile.from_json(json.dumps(data))
    before.check_model(replace(small_model(), hidden_size=8))
    assert "does not say which model" in str(before.doubt("NVIDIA H200"))
