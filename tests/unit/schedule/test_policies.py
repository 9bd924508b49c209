"""The textbook schedules have their published makespans and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import policy, simulate
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.policies.policy import in_flight_cap, out_of_step

SIZES = [(4, 8), (8, 16), (8, 32)]


def straight(stages: int, replicas: int = 1) -> Plan:
    groups = [tuple(range(i * replicas, (i + 1) * replicas)) for i in range(stages)]
    return Plan(tuple(Stage(i, i + 1, group) for i, group in enumerate(groups)))


def v(devices: int) -> Plan:
    last = 2 * devices - 1
    return Plan(tuple(Stage(i, i + 1, (min(i, last - i),)) for i in range(last + 1)))


def run(
    name: str, devices: int, batches: int, forward: float = 1.0, backward: float = 2.0
) -> Placement:
    """Unit times on a straight pipeline, half of each on the two stages of a V."""
    if name == "zb-v":
        half = OpCosts.uniform(
            2 * devices, batches, forward=0.5, backward_input=0.5, backward_weight=0.5,
            activation=0.5,
        )  # fmt: skip
        return simulate(v(devices), half, policy(name))
    costs = OpCosts.uniform(
        devices, batches, forward=forward, backward_input=backward / 2, backward_weight=backward / 2
    )
    return simulate(straight(devices), costs, policy(name))


@pytest.mark.parametrize(("devices", "batches"), [*SIZES, (3, 2), (1, 5), (5, 1)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (2, 1), (1, 3)])
def test_gpipe_and_1f1b_take_their_closed_form(
    name: str, devices: int, batches: int, forward: int, backward: int
) -> None:
    placed = run(name, devices, batches, forward, backward)
    assert placed.makespan == (batches + devices - 1) * (forward + backward)


@pytest.mark.parametrize(
    ("name", "devices", "batches", "bubble"),
    [
        ("1f1b", 4, 8, 0.2727),
        ("1f1b", 8, 32, 0.1795),
        ("zb-h1", 4, 8, 0.1111),
        ("zb-h1", 8, 32, 0.0680),
        ("zb-v", 4, 8, 0.0588),
        ("zb-v", 8, 16, 0.0680),
        ("zb-v", 8, 32, 0.0352),
    ],
)
def test_bubbles_are_the_published_ones(
    name: str, devices: int, batches: int, bubble: float
) -> None:
    placed = run(name, devices, batches)
    assert round(placed.mean_bubble, 4) == bubble
    assert round(1 - 3 * batches / placed.makespan, 4) == bubble


@pytest.mark.parametrize(("devices", "batches"), SIZES)
def test_zero_bubble_schedules_take_their_published_slots(devices: int, batches: int) -> None:
    assert run("zb-h1", devices, batches).makespan == 3 * batches + devices - 1
    assert run("zb-v", devices, batches).makespan == 3 * batches + (devices - 1) / 2


@pytest.mark.parametrize(("devices", "batches"), SIZES)
def test_no_device_waits_between_its_first_and_last_operation_in_zb_h2(
    devices: int, batches: int
) -> None:
    placed = run("zb-h2", devices, batches)
    for order in placed.order:
        assert placed.finish[order[-1]] - placed.start[order[0]] == 3 * batches


@pytest.mark.parametrize(("devices", "batches"), SIZES)
def test_activations_held_are_the_published_ones(devices: int, batches: int) -> None:
    assert set(run("gpipe", devices, batches).peak) == {batches}
    assert run("1f1b", devices, batches).peak == tuple(range(devices, 0, -1))
    assert set(run("zb-h1", devices, batches).peak) == {devices}
    assert set(run("zb-h2", devices, batches).peak) == {2 * devices - 1}
    assert set(run("zb-v", devices, batches).peak) == {devices}


@pytest.mark.parametrize(("devices", "samples", "slices"), [(4, 8, 4), (4, 2, 1), (8, 6, 16)])
def test_seq1f1b_has_its_published_bubble_and_memory(
    devices: int, samples: int, slices: int
) -> None:
    numbers = range(samples * slices)
    chains = [tuple(numbers[i : i + slices]) for i in numbers[::slices]] if slices > 1 else []
    costs = OpCosts.uniform(devices, len(numbers))
    placed = simulate(straight(devices), costs, policy("seq1f1b"), chains=chains)
    assert placed.makespan == 3 * (samples * slices + devices - 1)
    assert round(placed.mean_bubble, 9) == round(
        (devices - 1) / (slices * samples + devices - 1), 9
    )
    # The peak counts what is reserved: whole chains. Held is less.
    kinds = [placed.problem.decode(code)[0] for code in placed.order[0]]
    held = max(accumulate(1 if kind is OpKind.FORWARD else -1 for kind in kinds))
    assert held == min(samples * slices, slices + devices - 1)


def test_replicas_run_as_pipelines_of_their_own() -> None:
    for name, makespan in (("1f1b", 33.0), ("zb-h1", 27.0), ("gpipe", 33.0)):
        plan = straight(4, replicas=2)
        placed = simulate(plan, OpCosts.uniform(4, 16), policy(name))
        assert placed.makespan == makespan


def test_gpipe_starts_no_backward_before_the_last_forward() -> None:
    plan = Plan.parse("0:2@0 | 2:3@1,2 | 3:5@0")
    costs = OpCosts.scaled([2, 1, 2], [3, 1, 4, 1, 5])
    placed = simulate(plan, costs, policy("gpipe"))
    for order in placed.order:
        kinds = [placed.problem.decode(code)[0] for code in order]
        assert kinds == sorted(kinds)
        assert kinds.count(OpKind.FORWARD) * 2 == len(kinds)


def test_an_unknown_schedule_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no schedule is named 'fifo'; there are gpipe, 1f1b"):
        policy("fifo")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_plans_of_another_shape_are_scheduled_by_the_rule(name: str) -> None:
    for text in ("0:2@0,1 | 2:5@2", "0:2@0 | 2:3@1,2 | 3:5@0", "0:5@3"):
        plan = Plan.parse(text)
        costs = OpCosts.scaled([s.stop - s.start for s in plan.stages], [5, 1, 3, 3, 2, 2, 8])
        placed = simulate(plan, costs, policy(name))
        kinds = 3 if policy(name).split else 2
        assert sum(map(len, placed.order)) == kinds * len(plan.stages) * 7


def test_1f1b_on_uneven_degrees_holds_what_keeps_the_pipeline_full() -> None:
    # Two of three devices share the first half: 1.5 times as many micro-batches pass through.
    plan = Plan.parse("0:2@0,1 | 2:4@2")
    costs = OpCosts.scaled([2, 2], [1] * 12)
    placed = simulate(plan, costs, policy("1f1b"))
    # Device 2 has twice the work of the others: it must never wait once it has begun.
    order = placed.order[2]
    assert placed.finish[order[-1]] - placed.start[order[0]] == 12 * 6
    # A micro-batch that is out of step waits for up to two more: ceil((3 + 2) / 2) in flight.
    assert placed.peak[0] == 2 * 3
    lean = simulate(Plan.parse(f"{plan} ; lean"), costs, policy("1f1b"))
    assert lean.peak[0] == 2 * 2
    assert lean.makespan >= placed.makespan


@pytest.mark.parametrize("degrees", [(1, 5), (5, 1), (2, 3), (3, 1, 2)])
def test_1f1b_on_uneven_degrees_keeps_the_slowest_stage_busy(degrees: tuple[int, ...]) -> None:
    # Every device has 60 slots of work; filling and draining takes less than one pass there and
    # back for each replica.
    ends = [0, *accumulate(degrees)]
    stages = (Stage(i, i + 1, tuple(range(a, b))) for i, (a, b) in enumerate(pairwise(ends)))
    costs = OpCosts.scaled(list(degrees), [1] * 60)
    placed = simulate(Plan(tuple(stages)), costs, policy("1f1b"))
    assert placed.makespan <= 60 * 3 + 3 * sum(degrees)
    backward_first = replace(policy("1f1b"), alternate=False)
    assert (
        placed.makespan
        <= simulate(Plan(placed.problem.plan.stages), costs, backward_first).makespan
    )


def test_what_waits_out_of_step_is_counted_at_boundaries_of_other_degrees_only() -> None:
    assert out_of_step((4, 4, 4), 0) == 0
    assert out_of_step((1, 5), 0) == out_of_step((5, 1), 0) == 5
    assert [out_of_step((2, 2, 3, 1), stage) for stage in range(4)] == [6, 6, 3, 0]
    assert in_flight_cap(0.5, 8, 2) == 2
    assert in_flight_cap(0.5, 8, 2, 3) == 4
    assert in_flight_cap(0.0, 8, 2) == 1


@pytest.mark.parametrize(("devices", "batches"), SIZES)
@pytest.mark.parametrize("rounds", [2, 3])
def test_interleaved_stages_divide_the_bubble(devices: int, batches: int, rounds: int) -> None:
    """Narayanan et al. (2021): (p - 1) / v of a micro-batch's time; memory as they say."""
    stages = tuple(Stage(i, i + 1, (i % devices,)) for i in range(rounds * devices))
    costs = OpCosts.uniform(
        rounds * devices, batches, forward=1 / rounds, backward_input=1 / rounds,
        backward_weight=1 / rounds, activation=1 / rounds,
    )  # fmt: skip
    placed = simulate(Plan(stages), costs, policy("interleaved"))
    assert placed.makespan == pytest.approx(3 * (batches + (devices - 1) / rounds))
    assert placed.peak[0] == pytest.approx(devices + (devices - 1) / rounds)


@pytest.mark.parametrize(
    ("name", "devices", "batches", "slots", "peak"),
    [
        # Half slots, in halves of a micro-batch's activations; (p + 2) and (2 p / 3 + 2) at most.
        ("v-half", 4, 8, 53, 6), ("v-half", 8, 32, 209, 10), ("v-half", 6, 24, 155, 8),
        ("v-min", 6, 24, 161, 6), ("v-min", 3, 12, 77, 4), ("v-min", 8, 32, 219, 8),
    ],
)  # fmt: skip
def test_v_schedules_with_less_memory(
    name: str, devices: int, batches: int, slots: int, peak: int
) -> None:
    """Qi et al., "Pipeline Parallelism with Controllable Memory": about 1/2 and 1/3 of 1F1B's.

    And bubbles of at most 1/2 and 2/3 of 1F1B's (p - 1) micro-batches.
    """
    placed = simulate(v(devices), OpCosts.uniform(2 * devices, batches), policy(name))
    assert placed.makespan == slots
    assert max(placed.peak) == peak
    part = {"v-half": 1 / 2, "v-min": 2 / 3}[name]
    assert slots - 6 * batches <= part * 6 * (devices - 1) + 2
    most = {"v-half": devices + 2, "v-min": 2 * devices / 3 + 3}[name]
    assert peak <= most
