"""The flags that are generated from the groups."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from megatron_flex.arguments import build_parser
from megatron_flex.config.config import GROUPS, all_options, flag_of
from megatron_flex.config.option import Option, options
from megatron_flex.config.refused import BY_FLAG, FLAGS, VALUES
from tests.unit.config.commands import refusal
from tests.unit.config.megatron import DEFAULTS, LISTED

OPTIONS = tuple(all_options())
ACCEPTED = {flag: option for option in OPTIONS for flag in option.flags}
OTHER_DEFAULTS = {
    "--transformer-impl": "local",
    "--ckpt-format": "torch_dcp",
    "--fp8-recipe": "tensorwise",
}


@pytest.mark.parametrize("name", LISTED)
def test_every_flag_of_megatron_that_scripts_use_is_accepted_or_refused(name: str) -> None:
    assert (f"--{name}" in ACCEPTED) != (f"--{name}" in BY_FLAG)


@pytest.mark.parametrize(("flag", "default"), DEFAULTS.items())
def test_defaults_are_those_of_megatron(flag: str, default: object) -> None:
    option = ACCEPTED[flag]
    if option.extra.always:
        assert option.default is True
        return
    ours = option.default is option.switch if option.switch is not None else option.default
    assert (ours or None) == (OTHER_DEFAULTS.get(flag, default) or None)


def test_flags_that_megatron_does_not_have_are_marked() -> None:
    assert {f for f, o in ACCEPTED.items() if not o.extra.own} == set(DEFAULTS)


def test_no_flag_and_no_field_occurs_twice() -> None:
    flags = [flag for o in OPTIONS for flag in o.flags] + [f for r in FLAGS for f in r.flags]
    assert [f for f, n in Counter(flags).items() if n > 1] == []
    assert [f for f, n in Counter(o.field for o in OPTIONS).items() if n > 1] == []


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.field)
def test_every_flag_has_a_plain_help_text(option: Option) -> None:
    assert option.help.endswith(".")
    assert option.help.isascii()
    assert len(option.help) > 10


def test_help_shows_every_flag_and_its_text() -> None:
    text = " ".join(build_parser().format_help().split())
    for option in OPTIONS:
        assert option.flag in text
        # argparse breaks lines at dashes.
        assert option.help.split()[0] in text


def test_groups_are_frozen() -> None:
    for group in GROUPS.values():
        assert group.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize("refused", [f for r in FLAGS for f in r.flags])
def test_a_refused_flag_says_why_and_what_to_do(refused: str) -> None:
    message = refusal(refused)
    assert message == f"{refused} cannot be used: {BY_FLAG[refused]}"
    assert BY_FLAG[refused].reason
    assert BY_FLAG[refused].instead


@pytest.mark.parametrize(
    ("flag", "value"), [(f, value or "7") for f, values in VALUES.items() for value in values]
)
def test_a_refused_value_says_why(flag: str, value: str) -> None:
    reasons = VALUES[flag]
    message = refusal(f"{flag} {value}")
    assert flag in message
    assert value in message
    assert reasons.get(value, reasons.get("", "?")) in message


def test_advice_names_only_flags_that_exist() -> None:
    texts = [str(r) for r in FLAGS] + [t for values in VALUES.values() for t in values.values()]
    texts += [o.help for o in OPTIONS] + [o.extra.derived for o in OPTIONS]
    for text in texts:
        for word in text.replace(",", " ").replace(".", " ").replace(":", " ").split():
            if word.startswith("--"):
                name = word.strip("();")
                assert name in ACCEPTED or name in {"--train-*"}, (name, text)


def test_a_hint_decides_what_a_flag_takes() -> None:
    by_field = {o.field: o for group in GROUPS.values() for o in options(group)}
    assert by_field["seed"].takes == "INT"
    assert by_field["lr"].takes == "FLOAT"
    assert by_field["data_path"].takes == "STR ..."
    assert by_field["rampup_batch_size"].takes == "INT INT INT"
    assert by_field["overlong"].takes == "{truncate,split,drop,error}"
    assert by_field["timing_log_level"].convert("0") == 0
    assert by_field["swiglu"].takes == ""
    assert by_field["add_bias_linear"].flag == "--disable-bias-linear"
    assert by_field["mock_data"].switch is True
    assert by_field["save_optim"].switch is False
    assert flag_of("override_opt_param_scheduler") == "--override-opt_param-scheduler"


def test_the_string_below_a_field_is_its_help() -> None:
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        """Sizes."""

        width: int = 3
        """How wide
        it is."""

        depth: float = 1.5

    width, depth = options(Sizes)
    assert (width.flag, width.help, width.default_text) == ("--width", "How wide it is.", "3")
    assert (depth.flag, depth.help, depth.kind) == ("--depth", "", float)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("num_layers", "0", "must be at least 1, not 0"),
        ("num_layers", "2.5", "'2.5' is not a whole number"),
        ("lr", "0", "must be above 0, not 0.0"),
        ("lr", "inf", "inf is not a finite number"),
        ("hidden_dropout", "1", "must be below 1, not 1.0"),
        ("rotary_percent", "1.5", "must be at most 1, not 1.5"),
        ("seed", "-1", "must be at least 0, not -1"),
        ("normalization", "BatchNorm", "'BatchNorm' is not one of LayerNorm, RMSNorm"),
    ],
)
def test_a_value_out_of_bounds_is_refused(field: str, text: str, message: str) -> None:
    option = next(o for o in OPTIONS if o.field == field)
    with pytest.raises(ValueError, match=f"^{message}$"):
        option.convert(text)
