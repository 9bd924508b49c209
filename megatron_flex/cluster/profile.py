"""A profile: what one unit of each kind costs, as lines in tokens and token pairs.

Time of a micro-batch on a unit is ``fixed + per_token * tokens + per_pair * squares`` seconds, with
``squares`` the sum of squared sample lengths: two micro-batches with equal tokens need not cost the
same. A profile is measured (``tools/profile_layers.py``), or written down from a described cluster
(``megatron_flex/planner/closed_form.py``). It is valid within a range; outside it is extrapolated
with a warning that names the range.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_flex.cluster.cluster import Link
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind

FORMAT = 1


class ProfileError(ValueError):
    """A profile that cannot be: the message names the kind, the field and the value."""


class ProfileRangeWarning(UserWarning):
    """A profile is used outside the range in which it was measured."""


_NO_COST = frozenset(
    {
        "num_layers",
        "vocab_size",  # rows are what counts
        "max_position_embeddings",
        "rotary_base",
        "rotary_percent",
        "use_rope_scaling",
        "rope_scaling_factor",
        "norm_epsilon",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "seed",
        "persist_layer_norm",
    }
)
"""Fields of a model's configuration that its units' costs do not depend on."""


_DEFAULTS = {
    f.name: f.default
    for f in fields(ModelConfig)
    if f.default is not MISSING and f.name not in _NO_COST
}
"""For a profile that was measured before a field existed."""


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """What decides the costs of a model's units, by the names of its configuration."""
    return {name: value for name, value in asdict(config).items() if name not in _NO_COST}


@dataclass(frozen=True)
class Line:
    """``fixed + per_token * tokens + per_pair * squares``, in seconds or in bytes."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def __call__(self, tokens: float, squares: float) -> float:
        """The value for a micro-batch of ``tokens`` tokens with ``squares`` token pairs."""
        return self.fixed + self.per_token * tokens + self.per_pair * squares

    def __add__(self, other: Line) -> Line:
        return Line(
            self.fixed + other.fixed,
            self.per_token + other.per_token,
            self.per_pair + other.per_pair,
        )

    def scaled(self, factor: float) -> Line:
        """All coefficients times ``factor``."""
        return Line(self.fixed * factor, self.per_token * factor, self.per_pair * factor)


@dataclass(frozen=True)
class KindProfile:
    """Costs of one unit of a kind.

    Attributes:
        forward: seconds of the forward pass.
        backward_input: seconds of the input half of the backward pass.
        backward_weight: seconds of its weight half.
        activation: bytes that a forward leaves for the backward, a token.
        transient: bytes that a pass needs on top while it runs, a token.
        update: seconds of the optimizer's update of the unit's own slab.
    """

    forward: Line
    backward_input: Line
    backward_weight: Line
    activation: float
    transient: float
    update: float

    @property
    def backward(self) -> Line:
        """Seconds of the whole backward pass."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Profile:
    """Costs of all kinds of unit of one model on one kind of device.

    Attributes:
        name: what was profiled and where.
        kinds: costs of one unit of each kind.
        boundary: bytes of one token's activation between stages.
        tied_update: seconds of the update of the tied word embedding; 0 without one.
        tokens: least and most tokens of a micro-batch that were measured.
        longest: longest sample that was measured, in tokens.
        links: measured links by name (``intra``, ``host``); may be empty.
        model: the shape of the model whose units these are (:func:`shape_of`); ``None`` in
            profiles of before it was kept.
        machine: the processor or GPU that was measured; empty where none was, or it was not kept.
        tensor: ranks that share each layer; costs are those of one, collectives among them.
        sequence: they share what lies between the products, too (sequence parallelism).
    """

    name: str
    kinds: Mapping[Kind, KindProfile]
    boundary: float
    tied_update: float
    tokens: tuple[int, int]
    longest: int
    links: Mapping[str, Link]
    model: Mapping[str, Any] | None = None
    machine: str = ""
    tensor: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        missing = [kind.value for kind in Kind if kind not in self.kinds]
        if missing:
            raise ProfileError(f"profile '{self.name}' has no costs of {', '.join(missing)}")
        for kind, costs in self.kinds.items():
            for field in fields(costs):
                value = getattr(costs, field.name)
                numbers = asdict(value) if isinstance(value, Line) else {"": value}
                for part, number in numbers.items():
                    name = f"{kind.value}.{field.name}{'.' if part else ''}{part}"
                    _check(self.name, name, number)
            grows = costs.forward.per_token + costs.forward.per_pair
            if kind in (Kind.ATTENTION, Kind.MLP) and grows <= 0.0:
                raise ProfileError(
                    f"profile '{self.name}': {kind.value}.forward must grow with tokens: a longer"
                    " micro-batch cannot be free"
                )
        _check(self.name, "boundary", self.boundary)
        _check(self.name, "tied_update", self.tied_update)
        if self.tensor < 1:
            raise ProfileError(
                f"profile '{self.name}': tensor must be at least 1, not {self.tensor}"
            )
        low, high = self.tokens
        if not 0 < low <= high or self.longest < 1:
            raise ProfileError(
                f"profile '{self.name}': the measured range (tokens {low} to {high}, samples up to"
                f" {self.longest}) is empty"
            )

    def check_model(self, config: ModelConfig) -> None:
        """Raise :class:`ProfileError` when the units of ``config`` are not those measured."""
        shape = shape_of(config)
        measured = shape if self.model is None else {**_DEFAULTS, **self.model}
        different = [
            f"{name} is {measured.get(name)} in the profile and {shape.get(name)} here"
            for name in sorted({*shape, *measured})
            if measured.get(name) != shape.get(name)
        ]
        if different:
            raise ProfileError(
                f"the profile '{self.name}' is of another model ({'; '.join(different)}): measure"
                " this one with tools/profile_layers.py and this command's flags"
            )

    def doubt(self, machine: str | None) -> str | None:
        """What to warn of where costs are wanted on ``machine`` (``None``: it is not known)."""
        if self.model is None:
            return (
                f"the profile '{self.name}' does not say which model and machine it was measured"
                " on: measure again with tools/profile_layers.py to have that checked"
            )
        if machine is None or not self.machine or self.machine == machine:
            return None
        return (
            f"the profile '{self.name}' was measured on {self.machine}, and this is {machine}: its"
            " times may be far off; measure here with tools/profile_layers.py"
        )

    def warn_outside(self, tokens: tuple[int, int], longest: int) -> str | None:
        """Warn when micro-batches are outside the measured range; returns the warning.

        Args:
            tokens: fewest and most tokens of the micro-batches.
            longest: their longest sample.

        Half the least and twice the most that was measured follow along the fitted line; what is
        beyond them is extrapolated.
        """
        low, high = self.tokens
        if tokens[1] <= 2 * high and longest <= 2 * self.longest and 2 * tokens[0] >= low:
            return None
        text = (
            f"profile '{self.name}' was measured on micro-batches of {low} to {high} tokens and"
            f" samples up to {self.longest}; micro-batches of {tokens[0]} to {tokens[1]} tokens"
            f" with samples up to {longest} are extrapolated"
        )
        warnings.warn(text, ProfileRangeWarning, stacklevel=2)
        return text

    def to_json(self) -> str:
        """The text form; :meth:`from_json` reads it back to an equal profile."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "kinds": {kind.value: asdict(costs) for kind, costs in self.kinds.items()},
                "boundary": self.boundary,
                "tied_update": self.tied_update,
                "tokens": list(self.tokens),
                "longest": self.longest,
                "links": {name: asdict(link) for name, link in self.links.items()},
                "model": None if self.model is None else dict(self.model),
                "machine": self.machine,
                "tensor": self.tensor,
                "sequence": self.sequence,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read the text form. :class:`ProfileError` names what is missing or wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ProfileError(f"not a profile: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProfileError(f"not a profile of format {FORMAT}; measure it again")
        try:
            return cls(
                name=str(data["name"]),
                kinds={
                    Kind(name): KindProfile(
                        forward=Line(**costs["forward"]),
                        backward_input=Line(**costs["backward_input"]),
                        backward_weight=Line(**costs["backward_weight"]),
                        activation=float(costs["activation"]),
                        transient=float(costs["transient"]),
                        update=float(costs["update"]),
                    )
                    for name, costs in data["kinds"].items()
                },
                boundary=float(data["boundary"]),
                tied_update=float(data["tied_update"]),
                tokens=(int(data["tokens"][0]), int(data["tokens"][1])),
                longest=int(data["longest"]),
                links={name: Link(**link) for name, link in data["links"].items()},
                model=None if data.get("model") is None else dict(data["model"]),
                machine=str(data.get("machine", "")),
                tensor=int(data.get("tensor", 1)),
                sequence=bool(data.get("sequence", False)),
            )
        except ProfileError:
            raise
        except KeyError as error:
            raise ProfileError(f"the profile has no field {error}") from error
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ProfileError(f"the profile is malformed: {error}") from error

    def save(self, path: Path) -> None:
        """Write the text form; never half-written."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(self.to_json() + "\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile from a file."""
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            raise ProfileError(f"cannot read the profile {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ProfileError(f"the profile {path} is no text: {error}") from error


def _check(profile: str, name: str, number: Any) -> None:
    if not isinstance(number, (int, float)) or not (0.0 <= number < math.inf):
        raise ProfileError(
            f"profile '{profile}': {name} is {number}, but costs must be finite and not negative;"
            " measure again"
        )
