"""Plans next to a plan: what a local search tries.

Groups of devices are merged with their neighbours or split, cuts and devices move from one to the
next, and what passes the devices once is made to pass them twice and back. Devices stay in their
order, so that what was on one server stays there where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest

from megatron_flex.planner.plan import Plan, Stage

STEPS = (1, 2)
"""Elements by which a cut moves."""

_Group = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Groups of devices that the model passes once, or there and back.

    Attributes:
        groups: devices that hold the same stages.
        first: elements that each group holds in the first pass, in the order of groups.
        back: elements in the pass back, which goes through the groups in reverse; all 0 in a
            straight plan. A group holds elements in one of them at least.
    """

    groups: tuple[_Group, ...]
    first: tuple[int, ...]
    back: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, points: Sequence[int]) -> Layout | None:
        """``None`` for a plan of another form, or that is cut inside an element.

        ``points``: first unit of each element, and the number of units.
        """
        element = {unit: e for e, unit in enumerate(points)}
        edges = [*(s.start for s in plan.stages), plan.num_units]
        if any(unit not in element for unit in edges):
            return None
        sizes = [element[b] - element[a] for a, b in pairwise(edges)]
        passed = [s.group for s in plan.stages]
        turn = next((i for i in range(len(passed)) if passed[i] in passed[:i]), len(passed))
        there, back = passed[:turn], passed[turn:][::-1]
        groups = _merged(there, back)
        if groups is None or len(plan.devices) != sum(map(len, groups)):
            return None
        one = dict(zip(there, sizes, strict=False))
        other = dict(zip(back, sizes[turn:][::-1], strict=True))
        return cls(
            tuple(groups),
            tuple(one.get(g, 0) for g in groups),
            tuple(other.get(g, 0) for g in groups),
        )

    @property
    def v(self) -> bool:
        """Whether any group is passed on the way back."""
        return any(self.back)

    def plan(self, points: Sequence[int]) -> Plan:
        """As a plan."""
        stages = []
        at = 0
        there = zip(self.groups, self.first, strict=True)
        back = zip(self.groups[::-1], self.back[::-1], strict=True)
        for group, size in (*there, *back):
            if size:
                stages.append(Stage(points[at], points[at + size], group))
                at += size
        return Plan(tuple(stages))

    def _checked(self) -> Layout | None:
        """Itself, if every group holds an element and none less than none."""
        pairs = list(zip(self.first, self.back, strict=True))
        return self if all(min(p) >= 0 and sum(p) > 0 for p in pairs) else None

    def moved(self, way_back: bool, group: int, step: int) -> Layout | None:
        """With ``step`` elements of a pass moved from a group to the next one."""
        sizes = list(self.back if way_back else self.first)
        sizes[group] -= step
        sizes[group + 1] += step
        found = replace(self, back=tuple(sizes)) if way_back else replace(self, first=tuple(sizes))
        return found._checked()

    def turned(self, step: int) -> Layout | None:
        """With ``step`` elements of the last group moved from the first pass to the pass back."""
        first = (*self.first[:-1], self.first[-1] - step)
        return replace(self, first=first, back=(*self.back[:-1], self.back[-1] + step))._checked()

    def merged(self, group: int) -> Layout:
        """With a group and the next as one."""
        g = self.groups
        joined = (*g[:group], g[group] + g[group + 1], *g[group + 2 :])

        def sums(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes[:group], sizes[group] + sizes[group + 1], *sizes[group + 2 :])

        return Layout(joined, sums(self.first), sums(self.back))

    def split(self, group: int, devices: int) -> Layout | None:
        """With a group as two, the first of them of ``devices``; elements in proportion."""
        own = self.groups[group]
        if not 0 < devices < len(own) or self.first[group] + self.back[group] < 2:
            return None
        parts = (*self.groups[:group], own[:devices], own[devices:], *self.groups[group + 1 :])
        share = devices / len(own)

        def shared(sizes: tuple[int, ...]) -> tuple[int, ...]:
            size = sizes[group]
            some = min(max(1, round(share * size)), size - 1) if size > 1 else size
            return (*sizes[:group], some, size - some, *sizes[group + 1 :])

        return Layout(parts, shared(self.first), shared(self.back))._checked()

    def lent(self, group: int, to: int, devices: int = 1) -> Layout | None:
        """With devices moved from a group to the one before or after it."""
        own, other = self.groups[group], self.groups[to]
        if len(own) <= devices:
            return None
        groups = list(self.groups)
        if to < group:
            groups[group], groups[to] = own[devices:], other + own[:devices]
        else:
            groups[group], groups[to] = own[:-devices], own[-devices:] + other
        return replace(self, groups=tuple(groups))

    def folded(self, work: Sequence[float]) -> Layout | None:
        """The other of straight and V, in which every group has about as much work.

        ``work``: of each element.
        """
        n = len(self.groups)
        totals = [0.0, *accumulate(work)]
        sizes = (*self.first, *self.back[::-1])
        ends = [0, *accumulate(sizes)]
        own = [totals[b] - totals[a] for a, b in pairwise(ends)]
        shares = [own[i] + own[2 * n - 1 - i] for i in range(n)]
        if not self.v:
            shares = [s / 2 for s in shares] + [s / 2 for s in shares[::-1]]
        if len(shares) > len(work):
            return None
        found = _sizes(totals, shares)
        if self.v:
            return Layout(self.groups, found, (0,) * n)
        return Layout(self.groups, found[:n], found[n:][::-1])


def _merged(there: list[_Group], back: list[_Group]) -> list[_Group] | None:
    """One order of groups of which both are parts."""
    found: list[_Group] = []
    rest = list(back)
    for group in there:
        if group in rest:
            at = rest.index(group)
            found += rest[:at]
            rest = rest[at + 1 :]
        found.append(group)
    found += rest
    return found if len(set(found)) == len(found) else None


def _sizes(totals: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """Elements of stages that have about these shares of the work, and one element at least.

    ``totals``: work of the first 0, 1, ... elements.
    """
    cuts = [0]
    elements = len(totals) - 1
    for number, wanted in enumerate(list(accumulate(shares))[:-1], 1):
        possible = range(cuts[-1] + 1, elements - (len(shares) - number) + 1)
        cuts.append(min(possible, key=lambda e: abs(totals[e] - wanted)))
    cuts.append(elements)
    return tuple(b - a for a, b in pairwise(cuts))


def neighbours(
    layout: Layout,
    busy: Callable[[int], float],
    work: Sequence[float],
    *,
    straight: bool,
    v: bool,
    granule: int = 1,
) -> Iterator[Layout]:
    """Layouts one move away, kinds of moves in turn, each kind most promising first.

    Args:
        busy: seconds that a device computes.
        work: of each element.
        straight, v: which of both may be.
        granule: groups are split and lent devices by multiples of it.
    """
    n = len(layout.groups)
    load = [max(map(busy, group)) for group in layout.groups]

    def cuts() -> Iterator[Layout | None]:
        found = []
        for group in range(n - 1):
            for sign in (-1, 1):
                gain = sign * (load[group] - load[group + 1])  # of the giver over the taker
                for size in STEPS:
                    for way_back in (False, True) if layout.v else (False,):
                        found.append((size, -gain, group, way_back, sign * size))
        for _, _, group, way_back, step in sorted(found):
            yield layout.moved(way_back, group, step)

    def turns() -> Iterator[Layout | None]:
        if layout.v:
            for step in (layout.first[-1], -layout.back[-1], 1, -1):
                yield layout.turned(step) if step else None

    def merges() -> Iterator[Layout | None]:
        for group in sorted(range(n - 1), key=lambda g: load[g] + load[g + 1]):
            yield layout.merged(group)

    def splits() -> Iterator[Layout | None]:
        for group in sorted(range(n), key=lambda g: -load[g]):
            yield layout.split(group, len(layout.groups[group]) // (2 * granule) * granule)

    def devices() -> Iterator[Layout | None]:
        pairs = [(g, t) for g in range(n) for t in (g - 1, g + 1) if 0 <= t < n]
        for group, to in sorted(pairs, key=lambda p: load[p[0]] - load[p[1]]):
            yield layout.lent(group, to, granule)

    def folds() -> Iterator[Layout | None]:
        if straight if layout.v else v:
            yield layout.folded(work)

    by_cut = cuts()
    seen = {layout}
    for row in zip_longest(merges(), by_cut, folds(), by_cut, splits(), devices(), turns()):
        for found in row:
            if found is not None and found not in seen and (v or not found.v):
                seen.add(found)
                yield found
