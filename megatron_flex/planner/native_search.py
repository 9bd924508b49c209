"""The searches of ``kernels/src/planner_*.cpp`` on :class:`Tables`.

A search cuts a sequence of *steps* into contiguous groups. For a straight pipeline the steps are
the elements; for a V they are taken in turn from the front and from the back, so that each group
holds a front chunk and a back chunk (docs/planner.md, templates).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_flex.native import function, pointers, structure
from megatron_flex.planner.cost import Group, GroupCost, PlanCost
from megatron_flex.planner.tables import Array, IntArray, Shares, Tables, prefix
from megatron_flex.schedule.compact import offsets, rows

_Problem = structure(
    "steps devices kinds classes micro_batches granule width extra_in_flight sharded tie_low"
    " tie_high",
    "tied_state tied_optimizer tied_update tied_reduce chain max_tokens total_tokens buffers"
    " intra_seconds_per_byte intra_latency inter_seconds_per_byte inter_latency hop_intra hop_inter"
    " hop_busy_intra hop_busy_inter hide host_seconds_per_byte offload_optimizer"
    " offload_activations",
    "work_prefix front_forward_prefix hide_prefix reduce_prefix state_prefix optimizer_prefix"
    " front_activation_prefix back_activation_prefix update_prefix front_count_prefix"
    " back_count_prefix reduce_step transient_step first_forward drain round_trip remaining front"
    " back kind_forward kind_activation kind_kept kind_optimizer share top_offset top_tokens server"
    " budget device_class fetch_bytes fetch_seconds handover_seconds spare",
)
"""``mflex_planner_problem`` of ``kernels/src/planner_problem.h``, field by field."""


@dataclass(frozen=True)
class Cut:
    """What a search found.

    Attributes:
        groups: in pipeline order of their first chunk.
        cost: seconds up to the global norm, by the definition in :mod:`cost`.
        update: seconds of the slowest update.
    """

    groups: tuple[Group, ...]
    cost: float
    update: float

    @property
    def seconds(self) -> float:
        """The whole iteration."""
        return self.cost + self.update


def straight_steps(elements: int) -> tuple[int, ...]:
    """How many elements the front has given after each step: all of them, one by one."""
    return tuple(range(elements + 1))


def v_steps(work: Array, first_pass: float) -> tuple[int, ...]:
    """Steps of a V whose first pass covers the part ``first_pass`` of the work.

    Each step takes one element, from the front or from the back, so that both passes are always
    equally far in proportion to their work. Returns how many the front has given after each step.
    """
    elements = len(work)
    total = float(work.sum())
    sums = prefix(work)
    turn = int(np.clip(np.searchsorted(sums, first_pass * total), 1, elements - 1))
    front_work = max(float(sums[turn]), 1e-300)
    back_work = max(total - float(sums[turn]), 1e-300)
    front, back, given = 0, elements, [0]
    while front + (elements - back) < elements:
        if front < turn:
            front_end = float(sums[front + 1]) / front_work
        else:
            front_end = math.inf
        back_end = (total - float(sums[back - 1])) / back_work if back > turn else math.inf
        if front_end <= back_end:
            front += 1
        else:
            back -= 1
        given.append(front)
    return tuple(given)


class SearchProblem:
    """Tables in the form that the native searches read; build it once and search it often."""

    def __init__(
        self, tables: Tables, front: Sequence[int] | None = None, granule: int = 1
    ) -> None:
        """``front``: elements that the front has given after each step (default: straight).

        ``granule``: group sizes and positions are multiples of it, such as a server's devices.
        """
        t = self.tables = tables
        elements = t.num_elements
        self.front = np.asarray(
            straight_steps(elements) if front is None else front, dtype=np.int64
        )
        self.back = elements - (np.arange(elements + 1) - self.front)
        taken_front = np.diff(self.front) == 1
        order = np.where(taken_front, self.front[:-1], self.back[1:])
        self.granule = granule
        position = np.argsort(order)
        tie = sorted((int(position[0]), int(position[elements - 1])))
        tied = t.tied.state > 0 and elements > 1
        inside = taken_front.astype(np.float64)

        counts = np.zeros((2, len(t.kinds), elements))
        counts[np.where(taken_front, 0, 1), t.kind[order], np.arange(elements)] = 1.0
        activation = t.activation[order]
        both = prefix(t.first_forward + t.first_backward)
        a = t.arrivals
        arrays: dict[str, Array | IntArray] = {
            "work_prefix": prefix(t.work[order]),
            "front_forward_prefix": prefix(t.forward[order] * inside),
            "hide_prefix": prefix(t.first_backward[order]),
            "reduce_prefix": prefix(t.reduce[order]),
            "state_prefix": prefix(t.state[order]),
            "optimizer_prefix": prefix(t.optimizer[order]),
            "front_activation_prefix": prefix(activation * inside),
            "back_activation_prefix": prefix(activation * (1.0 - inside)),
            "update_prefix": prefix(t.update[order]),
            "front_count_prefix": _prefix_rows(counts[0]),
            "back_count_prefix": _prefix_rows(counts[1]),
            "reduce_step": t.largest_reduce[order],
            "transient_step": t.transient[order],
            "first_forward": prefix(t.first_forward),
            "drain": prefix(t.first_backward * (0.0 if t.split else 1.0)),
            "round_trip": np.zeros(elements + 1) if t.split else both[-1] - both,
            "remaining": t.remaining,
            "front": self.front,
            "back": self.back.astype(np.int64),
            "kind_forward": np.array([k.forward for k in t.kinds]),
            "kind_activation": np.array([k.activation for k in t.kinds]),
            "kind_kept": np.array([-1.0 if k.kept is None else k.kept for k in t.kinds]),
            "kind_optimizer": np.array([k.optimizer for k in t.kinds]),
            "share": t.shares.share,
            "top_offset": t.shares.offset,
            "top_tokens": t.shares.top,
            "server": t.server,
            "budget": t.budget,
            "device_class": np.zeros(0, dtype=np.int64) if a is None else a.device_class,
            "fetch_bytes": np.zeros(0) if a is None else _prefix_rows(a.size[:, order]),
            "fetch_seconds": np.zeros(0) if a is None else _prefix_rows(a.early[:, order]),
            "handover_seconds": np.zeros(0) if a is None else _prefix_rows(a.handover[:, order]),
            "spare": np.zeros(0) if a is None else a.spare,
        }
        # The structure holds addresses: keep the arrays they point into.
        self._arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        w = t.wires
        self._problem = _Problem(
            steps=elements,
            devices=t.num_devices,
            kinds=len(t.kinds),
            classes=0 if a is None else len(a.spare),
            micro_batches=t.num_micro_batches,
            granule=granule,
            width=t.width,
            extra_in_flight=int(t.split),
            sharded=int(t.sharded),
            tie_low=tie[0] if tied else -1,
            tie_high=tie[1] if tied else -1,
            tied_state=t.tied.state,
            tied_optimizer=t.tied.optimizer,
            tied_update=t.tied.update,
            tied_reduce=t.tied.reduce,
            chain=t.chain,
            max_tokens=t.max_tokens,
            total_tokens=t.total_tokens,
            buffers=t.buffers,
            intra_seconds_per_byte=w.per_byte[0],
            intra_latency=w.latency[0],
            inter_seconds_per_byte=w.per_byte[1],
            inter_latency=w.latency[1],
            hop_intra=w.hop[0],
            hop_inter=w.hop[1],
            hop_busy_intra=w.busy[0],
            hop_busy_inter=w.busy[1],
            hide=0.0 if a is None else a.hide,
            host_seconds_per_byte=w.host_per_byte,
            offload_optimizer=float(t.offload_optimizer),
            offload_activations=float(t.offload_activations),
            **pointers(self._arrays),
        )

    @cached_property
    def _address(self) -> int:
        return ctypes.addressof(self._problem)

    def search(self, groups: int = 0, *, chain: bool = True) -> Cut | None:
        """The best cut into at most ``groups`` groups (0: any number); ``None``: none fits.

        ``chain`` false: without the bound of one micro-batch alone. Where that bound decides, many
        cuts are equal, and this one is the best balanced.
        """
        t = self.tables
        self._problem.chain = t.chain if chain else 0.0
        out = np.zeros(4 * t.num_devices, dtype=np.int64)
        cost = np.zeros(2)
        count = function("mflex_planner_search")(
            self._address, groups, out.ctypes.data, cost.ctypes.data
        )
        if count == 0:
            return None
        rows = out[: 4 * count].reshape(count, 4).tolist()
        return Cut(tuple(self.group(*row) for row in rows), float(cost[0]), float(cost[1]))

    def group(self, begin: int, end: int, first: int, last: int) -> Group:
        """Steps ``[begin, end)`` on devices ``[first, last)`` as a group."""
        front = (int(self.front[begin]), int(self.front[end]))
        back = (int(self.back[end]), int(self.back[begin]))
        chunks = tuple(c for c in (front, back) if c[1] > c[0])
        return Group(chunks, tuple(range(first, last)))

    def partition(
        self, stages: int, bounds: tuple[int, int, int, int], hops: tuple[float, float]
    ) -> tuple[Group, ...] | None:
        """The paper's search: exactly ``stages`` stages on all devices, of least eq. 1.

        Args:
            bounds: least and most elements of a stage, least and most devices.
            hops: seconds of a mean micro-batch's activation and gradient between stages, within a
                server and between servers.
        """
        out = np.zeros(4 * stages, dtype=np.int64)
        limits, seconds = np.array(bounds, dtype=np.int64), np.array(hops)
        time = function("mflex_planner_hbsa")(
            self._address, stages, limits.ctypes.data, seconds.ctypes.data, out.ctypes.data
        )
        if not math.isfinite(time):
            return None
        return tuple(self.group(*row) for row in out.reshape(stages, 4).tolist())

    def price(self, groups: Sequence[Group]) -> PlanCost:
        """:func:`megatron_flex.planner.cost.plan_cost`, fast. The problem must be straight."""
        arrays = _as_arrays(tuple(groups))
        out = np.empty((len(groups), 8))
        function("mflex_planner_price")(
            self._address, len(groups), *(a.ctypes.data for a in arrays), out.ctypes.data
        )
        costs = tuple(GroupCost(*row) for row in out.tolist())
        worst = max(max(c.seconds for c in costs), self.tables.chain)
        return PlanCost(worst + max(c.update for c in costs), self.tables.chain, costs)

    def feasible(self, more: int) -> bool:
        """Whether any cut fits when every device has so many bytes more."""
        return bool(function("mflex_planner_feasible")(self._address, float(more)))

    def shortfall(self) -> int:
        """The least whole number of bytes more on every device with which a cut fits; 0: now."""
        if self.feasible(0):
            return 0
        low, high = 0, 1 << 20
        while not self.feasible(high):
            low, high = high, high * 2
            if high > 1 << 62:
                raise ValueError("no number of bytes is enough")
        while high - low > 1:
            middle = (low + high) // 2
            if self.feasible(middle):
                high = middle
            else:
                low = middle
        return high


@lru_cache(maxsize=1024)
def _as_arrays(groups: tuple[Group, ...]) -> tuple[IntArray, ...]:
    """Groups as the native price reads them: a plan has the same for every batch."""
    chunks = [c for g in groups for c in g.chunks]
    return (
        offsets([len(g.chunks) for g in groups]),
        np.array(chunks, dtype=np.int64),
        *rows(g.of_chunk(i) for g in groups for i in range(len(g.chunks))),
        *rows(g.devices for g in groups),
    )


def _prefix_rows(rows: Array) -> Array:
    """Prefix sums of every row, ``[rows, n + 1]``."""
    out: Array = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=out[:, 1:])
    return out


def shares(work: Array, tokens: Array, devices: int, granule: int = 1, depth: int = 1) -> Shares:
    """Deal micro-batches to replicas, for every degree that is a multiple of ``granule``.

    Args:
        work: ``[n]`` seconds of each micro-batch through the whole model.
        tokens: ``[n]`` its tokens.
        depth: micro-batches that may be in flight on one of d replicas, in units of devices / d.
    """
    work = np.ascontiguousarray(work, dtype=np.float64)
    tokens = np.ascontiguousarray(tokens, dtype=np.float64)
    share = np.zeros(devices + 1)
    offset = np.zeros(devices + 2, dtype=np.int64)
    room = sum(depth * -(-devices // d) + 3 for d in range(granule, devices + 1, granule))
    top = np.zeros(room)
    used = function("mflex_planner_shares")(
        work.ctypes.data, tokens.ctypes.data, len(work), devices, granule, depth,
        share.ctypes.data, offset.ctypes.data, top.ctypes.data,
    )  # fmt: skip
    return Shares(share, offset, top[:used])
