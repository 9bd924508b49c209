"""How a field of a configuration group becomes a command-line flag.

A group is a frozen dataclass. Each field is one flag: its type hint decides what the flag takes,
the string below the field is the help text, and :func:`option` adds what a hint cannot say. The
parser (``megatron_flex/arguments.py``) and ``docs/flags.md`` are generated from the same
descriptions, so that they cannot differ.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
import typing
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

METADATA = "megatron_flex.option"


@dataclass(frozen=True)
class Extra:
    """What :func:`option` adds to a field.

    Attributes:
        flags: the flag's names, where they are not the field's name with dashes.
        required: there is no default.
        derived: says what the value follows from when the flag is not given.
        always: the flag is accepted, and what it asks for is always done.
        own: the flag does not exist in Megatron-LM.
        at_least, at_most, above, below: bounds of the value, or of each value.
    """

    flags: tuple[str, ...] = ()
    required: bool = False
    derived: str = ""
    always: bool = False
    own: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None


def option(default: Any = None, **extra: Any) -> Any:
    """A field with a default, or with ``required=True`` or ``derived="..."`` one without."""
    described = Extra(**extra)
    metadata = {METADATA: described}
    if described.required or described.derived:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One flag, as the parser and the documentation need it.

    Attributes:
        field: name of the field; unique among all groups.
        flags: names on the command line, the first is the usual one.
        kind: type of the value, or of each value of several.
        choices: the values that are allowed; empty: any of ``kind``.
        count: ``None`` one value; ``"*"`` any number of values; an integer exactly so many.
        default: value when the flag is not given; ``None`` where it is required or derived.
        switch: the value that the flag sets, for flags that take none.
        help: the help text, one line.
    """

    field: str
    flags: tuple[str, ...]
    kind: type
    choices: tuple[Any, ...]
    count: int | Literal["*"] | None
    default: Any
    switch: bool | None
    help: str
    extra: Extra

    @property
    def flag(self) -> str:
        """The usual name."""
        return self.flags[0]

    @property
    def takes(self) -> str:
        """What the flag takes, for people: ``INT``, ``{adam}``, ``STR ...`` or nothing."""
        if self.switch is not None:
            return ""
        one = "{" + ",".join(map(str, self.choices)) + "}" if self.choices else self.kind.__name__
        one = one if self.choices else one.upper()
        if self.count is None:
            return one
        return f"{one} ..." if self.count == "*" else " ".join([one] * self.count)

    @property
    def default_text(self) -> str:
        """The default, for people."""
        if self.extra.required:
            return "required"
        if self.extra.always:
            return "always on"
        if self.extra.derived:
            return self.extra.derived
        if self.switch is not None:
            return "off" if self.default is not self.switch else "on"
        if self.default is None:
            return "not set"
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default)) or "none"
        return str(self.default)

    def convert(self, text: str) -> Any:
        """One value from the command line; ``ValueError`` says what is wrong with it."""
        if self.choices:
            for choice in self.choices:
                if str(choice) == text:
                    return choice
            raise ValueError(f"'{text}' is not one of {', '.join(map(str, self.choices))}")
        try:
            value = self.kind(text)
        except ValueError:
            kinds = {int: "a whole number", float: "a number"}
            raise ValueError(f"'{text}' is not {kinds.get(self.kind, self.kind)}") from None
        self.check(value)
        return value

    def check(self, value: float | str) -> None:
        """Raise ``ValueError`` when a value is outside the bounds."""
        if isinstance(value, str):
            return
        x = self.extra
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        for bound, text, bad in (
            (x.at_least, "at least", lambda b: value < b),
            (x.at_most, "at most", lambda b: value > b),
            (x.above, "above", lambda b: value <= b),
            (x.below, "below", lambda b: value >= b),
        ):
            if bound is not None and bad(bound):
                raise ValueError(f"must be {text} {bound}, not {value}")


@cache
def options(group: type) -> tuple[Option, ...]:
    """The flags of one group, in the order of its fields."""
    hints = typing.get_type_hints(group)
    helps = _docstrings(group)
    return tuple(
        _describe(field, hints[field.name], helps.get(field.name, ""))
        for field in dataclasses.fields(group)
    )


def _describe(field: dataclasses.Field[Any], hint: Any, text: str) -> Option:
    extra: Extra = field.metadata.get(METADATA, Extra())
    default = None if field.default is dataclasses.MISSING else field.default
    count: int | Literal["*"] | None = None
    hint = _without_none(hint)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        count = "*" if parts[-1] is Ellipsis else len(parts)
        hint = parts[0]
    choices: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    switch = (extra.always or not default) if hint is bool else None
    flags = extra.flags
    if not flags:
        dashed = field.name.replace("_", "-")
        flags = (f"--no-{dashed}",) if switch is False else (f"--{dashed}",)
    return Option(field.name, flags, hint, choices, count, default, switch, text, extra)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _docstrings(group: type) -> dict[str, str]:
    """The string below each field, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    texts = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[field.target.id] = " ".join(text.split())
    return texts
