"""A split backward trains as one process does, and this suite would notice if it did not.

Input halves and weight halves run in the orders of the zero-bubble schedules, on all kinds of
layouts, with all kinds of memory optimisation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from megatron_flex.model.tape import Tape
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime import exact
from megatron_flex.runtime.executor import Executor
from megatron_flex.schedule.instructions import BackwardInput, BackwardWeight, Program
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import UNTIED, reference
from tests.distributed.test_memory import DROPPING, random_optimisation
from tests.distributed.test_switching import WAYS, random_plan

POLICIES = ["zb-h1", "zb-h2", "zb-v", "zb"]
#: Tied, dropout; untied, grouped queries, SwiGLU, RMSNorm and rotary; the same with normed heads.
MODELS = {
    "gpt": DROPPING,
    "gated": UNTIED,
    "normed heads": replace(UNTIED, qk_layernorm=True),
    "bert": replace(jobs.BERT, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1),
}
#: All models have 8 units.
LAYOUTS = {
    "even": "0:4@0 | 4:8@1",
    "uneven layers": "0:2@0 | 2:8@1",
    "uneven degrees": "0:4@0,1 | 4:8@2",
    "v": "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0",
    "two stages on a device": "0:2@0 | 2:5@1 | 5:8@0",
    "idle device": "0:4@2 | 4:8@0",
    "one process": "0:8@0",
}
MEMORY = {
    "plain": "",
    "recompute": " ; recompute 1-3,6",
    "offload": " ; activations 1,2,4-7 ; optimizer 2,5",
    "shard": " ; shard 0-7",
    "both": " ; recompute 2,5 ; activations 1,4,7",
}
ITERATIONS = 4


def compare(
    workers: WorkerPool, model: str, layout: str, memory: str, policy: str, exact_sums: bool
) -> None:
    config, plan = MODELS[model], LAYOUTS[layout] + MEMORY[memory]
    size = 1 + max(Plan.parse(plan).devices)
    options: dict[str, Any] = {"exact": exact_sums, "iterations": ITERATIONS, "longest": 90}
    expected = reference(workers, config, **options)
    got = jobs.merge(workers.run(size, jobs.train, config, plan, policy=policy, **options))
    if exact_sums:
        jobs.assert_equal_bits(got, expected)
    else:
        jobs.assert_same(got, expected)


#: Every policy, layout, model and kind of memory optimisation comes at least once in each column.
SAMPLE = [
    ("zb-h1", "even", "gpt", "plain"),
    ("zb-h2", "uneven layers", "gated", "plain"),
    ("zb-v", "v", "bert", "plain"),
    ("zb", "uneven degrees", "normed heads", "shard"),
    ("zb-h1", "two stages on a device", "gated", "recompute"),
    ("zb-h2", "even", "bert", "offload"),
    ("zb-v", "v", "gpt", "both"),
    ("zb", "idle device", "gpt", "recompute"),
    ("zb", "one process", "bert", "both"),
]


@pytest.mark.parametrize("exact_sums", [False, True], ids=["sums", "exact"])
@pytest.mark.parametrize(("policy", "layout", "model", "memory"), SAMPLE)
def test_split_backward_equals_one_process(
    workers: WorkerPool, policy: str, layout: str, model: str, memory: str, exact_sums: bool
) -> None:
    compare(workers, model, layout, memory, policy, exact_sums)


@pytest.mark.soak
@pytest.mark.parametrize("exact_sums", [False, True], ids=["sums", "exact"])
@pytest.mark.parametrize("policy", POLICIES)
def test_split_backward_equals_one_process_everywhere(
    workers: WorkerPool, policy: str, exact_sums: bool
) -> None:
    for layout, model, memory in product(LAYOUTS, MODELS, MEMORY):
        compare(workers, model, layout, memory, policy, exact_sums)


def test_bfloat16_with_exact_sums_gives_equal_bits(workers: WorkerPool) -> None:
    config = replace(UNTIED, params_dtype="bfloat16", hidden_dropout=0.1)
    options: dict[str, Any] = {"exact": True, "iterations": ITERATIONS}
    expected = jobs.merge(workers.run(1, jobs.train, config, "0:8@0", **options))
    for policy in ("zb-h2", "zb-v"):
        layout = LAYOUTS["v" if policy == "zb-v" else "even"]
        got = jobs.merge(workers.run(2, jobs.train, config, layout, policy=policy, **options))
        jobs.assert_equal_bits(got, expected)


def test_random_sequences_of_plans_with_split_backward(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    """Live migration, switches, evaluation in between, and all kinds of memory optimisation."""
    for seed in range(count(3, 60)):
        rng = random.Random(seed)
        config, devices = list(MODELS.values())[seed % 4], 1 + seed % 4
        plans = [f"{random_plan(rng, 8, devices)}{random_optimisation(rng, 8)}" for _ in range(5)]
        options: dict[str, Any] = {"evaluate": True, "exact": seed % 2 == 1, "iterations": 5}
        expected = jobs.merge(workers.run(1, jobs.train, config, "0:8@0", **options))
        got = jobs.merge(
            workers.run(
                devices, jobs.train, config, plans, policy=POLICIES[seed % 4], way=WAYS[seed % 3],
                migrate=seed % 3 == 0, **options,
            )
        )  # fmt: skip
        (jobs.assert_equal_bits if options["exact"] else jobs.assert_same)(got, expected)


# -- faults ------------------------------------------------------------------------------------


def _wrap(executor: Executor, kind: Any, around: Callable[[Any, Any, Any], None]) -> None:
    honest = executor.handlers[kind]
    executor.handlers[kind] = lambda run, op: around(run, op, honest)


def _chosen(op: Any) -> bool:
    return (op.stage, op.micro_batch) == (0, 1)


def a_weight_half_is_left_out(executor: Executor, program: Program) -> Program:
    def around(run: Any, op: Any, honest: Any) -> None:
        if _chosen(op):
            run.tapes[0, 1] = Tape()
        honest(run, op)

    _wrap(executor, BackwardWeight, around)
    return program


def a_weight_half_runs_twice(executor: Executor, program: Program) -> Program:
    def around(run: Any, op: Any, honest: Any) -> None:
        if _chosen(op):
            for gradient in list(run.tapes[0, 1]._owed):
                run.tapes[0, 1].put(gradient)
        honest(run, op)

    _wrap(executor, BackwardWeight, around)
    return program


def a_weight_half_takes_the_input_of_another_micro_batch(
    executor: Executor, program: Program
) -> Program:
    """Of as many tokens, so that nothing but the comparison can notice."""
    inputs: list[Any] = []

    def around(run: Any, op: Any, honest: Any) -> None:
        honest(run, op)
        tape = run.tapes.get((op.stage, op.micro_batch))
        if tape is None or op.stage != 0:
            return
        # The last layer of the tape that has an input of that shape.
        gradient = tape._owed[0]
        names = gradient.__closure__[0].cell_contents.__code__.co_freevars
        cell = gradient.__closure__[0].cell_contents.__closure__[names.index("x")]
        inputs.append(cell)
        if len(inputs) > 1:
            other, own = inputs[-2].cell_contents, cell.cell_contents
            rows = min(len(other), len(own))
            mixed = own.clone()
            mixed[:rows] = other[:rows]
            cell.cell_contents = mixed

    _wrap(executor, BackwardInput, around)
    return program


def a_norm_is_in_both_halves(executor: Executor, program: Program) -> Program:
    def around(run: Any, op: Any, honest: Any) -> None:
        sums = [
            (slab.grads if slab.sums is None else slab.sums)[slab.layout.decayed :]
            for slab in executor.holdings
        ]
        before = [part.clone() for part in sums]
        honest(run, op)
        for part, old in zip(sums, before, strict=True):
            run.tapes[op.stage, op.micro_batch].put(partial(part.add_, part - old))

    _wrap(executor, BackwardInput, around)
    return program


def exact_sums_after_the_weight_half_only(executor: Executor, program: Program) -> Program:
    def after_input(run: Any, op: Any, honest: Any) -> None:
        executor.holdings.exact = False
        honest(run, op)
        executor.holdings.exact = True

    def after_weight(run: Any, op: Any, honest: Any) -> None:
        honest(run, op)
        stage = program.plan.stages[op.stage]
        for unit in range(stage.start, stage.stop):
            for number in executor.holdings.config.layers.units[unit].slabs:
                exact.accumulate(executor.holdings.slabs[number], unit)

    _wrap(executor, BackwardInput, after_input)
    _wrap(executor, BackwardWeight, after_weight)
    return program


@pytest.mark.parametrize(
    "fault",
    [
        a_weight_half_is_left_out,
        a_weight_half_runs_twice,
        a_weight_half_takes_the_input_of_another_micro_batch,
        a_norm_is_in_both_halves,
        exact_sums_after_the_weight_half_only,
    ],
)
@pytest.mark.parametrize("exact_sums", [False, True], ids=["sums", "exact"])
def test_the_comparison_notices(workers: WorkerPool, fault: jobs.Fault, exact_sums: bool) -> None:
    if fault is exact_sums_after_the_weight_half_only and not exact_sums:
        pytest.skip("there are no exact sums")
    options: dict[str, Any] = {"exact": exact_sums, "iterations": 5}
    expected = reference(workers, UNTIED, **options)
    got = workers.run(
        2, jobs.train, UNTIED, "0:4@0 | 4:8@1", policy="zb-h2", fault=fault, **options
    )
    check = jobs.assert_equal_bits if exact_sums else jobs.assert_same
    with pytest.raises(AssertionError, match=r"iteration \d|other bits"):
        check(jobs.merge(got), expected)
