"""How many ranks should share each layer: chosen once, before a run starts.

Every size that divides a server and the model is planned for by itself; what is compared is the
mean time of the first batches. Sharing layers takes collectives that nothing hides, and makes
products smaller; it gains where there are more devices than the pipeline has use for, where few
micro-batches fill it (long samples), and where memory forces recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.quantities import size as text_of

CLOSE = 0.02
"""What a larger group must save, as a part of the time, to be chosen: the cost model is not exact,
and layers that are not shared need no collectives that may be slower than described."""


@dataclass(frozen=True)
class Outlook:
    """What is predicted with groups of ``size`` ranks.

    Attributes:
        size: ranks of a group.
        seconds: mean of an iteration over the batches that were planned.
        plan: that of the first batch, in words.
        peak: bytes of the fullest rank.
        problem: why it cannot be; the others say nothing then.
    """

    size: int
    seconds: float = 0.0
    plan: str = ""
    peak: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        name = f"tensor parallelism {self.size}"
        if self.problem:
            return f"{name}: cannot be: {self.problem}"
        return (
            f"{name}: {self.seconds:.4g} s an iteration, {text_of(self.peak)} at most, with"
            f" {self.plan}"
        )


def in_words(plan: Plan) -> str:
    """How many stages a plan has, and how many devices each."""
    degrees = [len(stage.group) for stage in plan.stages]
    found = f"{len(degrees)} stages on {'+'.join(map(str, degrees))} devices"
    if sum(degrees) > len(plan.devices):
        return f"{found}, {len(plan.devices)} in turn"
    return found


def sizes(ranks: int, per_server: int) -> tuple[int, ...]:
    """Powers of two that divide the ranks of a server and of the job."""
    powers = (1 << k for k in range(per_server.bit_length()))
    return tuple(n for n in powers if per_server % n == 0 and ranks % n == 0)


def best(outlooks: Sequence[Outlook]) -> Outlook:
    """The fastest; of nearly equal ones that with the fewest ranks in a group.

    Raises :class:`PlanError` where nothing can be.
    """
    possible = [o for o in outlooks if not o.problem]
    if not possible:
        listed = "; ".join(map(str, outlooks))
        raise PlanError(f"--tensor-model-parallel-size auto finds no size that can be: {listed}")
    least = min(o.seconds for o in possible)
    near = [o for o in possible if o.seconds * (1.0 - CLOSE) <= least]
    return min(near, key=lambda o: o.size)


def reasons(outlooks: Sequence[Outlook], chosen: Outlook) -> list[str]:
    """What is known of each size, and which was chosen."""
    fastest = min((o.seconds for o in outlooks if not o.problem), default=chosen.seconds)
    why = "the fastest"
    if chosen.seconds > fastest:
        why = f"within {CLOSE:.0%} of the fastest, with fewer in a group"
    return [*map(str, outlooks), f"chosen: tensor parallelism {chosen.size}, {why}"]
