"""What a device holds: slabs and blocks come and go with the plan, and memory with them."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch

from megatron_flex.model.blocks import build_block
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, update
from megatron_flex.schedule.shards import missing, share
from tests.close import assert_close, assert_numbers_close
from tests.unit.model.support import make_batch, make_config, run
from tests.unit.runtime.slabs import CPU

TIED = make_config()  # units 0 to 5, the tied word embedding is slab 6
UNTIED = make_config(untie_embeddings_and_output_weights=True)
ROPE = make_config(position_embedding_type="rope")  # slab 0 has no parameters
WHOLE = Plan.parse("0:6@0")


def hold(config: ModelConfig, plan: str, rank: int = 0, exact: bool = False) -> Holdings:
    return Holdings(config, Plan.parse(plan), rank, CPU, exact=exact)


def expected_blocks(holdings: Holdings) -> set[int]:
    units = holdings.config.layers.units
    return {u.index for u in units if set(u.slabs) <= set(holdings.slabs)}


def check(holdings: Holdings) -> None:
    """Exactly the complete blocks are there, and their weights lie in the slabs."""
    assert set(holdings.blocks) == expected_blocks(holdings)
    for unit, block in holdings.blocks.items():
        for number, parameters in block.slab_parameters().items():
            slab = holdings.slabs[number]
            for entry in slab.layout.entries:
                if entry.name in parameters:
                    ours = parameters[entry.name]
                    assert ours.data_ptr() == slab.view(slab.params, entry).data_ptr(), unit
                    assert ours.grad is not None


# -- at the start ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TIED, UNTIED, ROPE], ids=["tied", "untied", "rope"])
@pytest.mark.parametrize("plan", ["0:6@0", "0:2@0,1 | 2:6@1", "0:1@1 | 1:5@0 | 5:6@1", "0:6@2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_holds_what_the_plan_gives_it(config: ModelConfig, plan: str, rank: int) -> None:
    holdings = hold(config, plan, rank)
    parsed = Plan.parse(plan)
    holders = [s.group for s in parsed.stages for _ in range(s.start, s.stop)]
    units = [u for u in config.layers.units if rank in holders[u.index]]
    assert set(holdings.slabs) == {s for u in units for s in u.slabs}
    check(holdings)
    lowest = [min(group) for group in holders]
    for slab in set(holdings.slabs) - {config.layers.tied_slab}:
        assert (slab in holdings.owned) is (lowest[slab] == rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_values_do_not_depend_on_the_plan(dtype: str) -> None:
    config = make_config(params_dtype=dtype)
    expected = {
        name: parameter
        for unit in config.layers.units
        for of_slab in build_block(unit, config).slab_parameters().values()
        for name, parameter in of_slab.items()
    }
    for plan, rank in (("0:6@0", 0), ("0:3@0 | 3:6@1", 0), ("0:3@0 | 3:6@1", 1)):
        for name, tensor in hold(config, plan, rank).named_state(owned=False).items():
            if name in expected:
                assert torch.equal(tensor, expected[name]), name
            elif ".master." in name:
                plain = name.removeprefix("optimizer.state.master.")
                assert torch.equal(tensor, expected[plain].float()), name
            else:
                assert not tensor.any(), name


def test_each_tensor_of_a_job_has_one_owner() -> None:
    plan = "0:2@0,1 | 2:4@2 | 4:6@1,2"
    owned = [hold(TIED, plan, rank).named_state(owned=True) for rank in range(4)]
    names = [name for state in owned for name in state]
    assert len(names) == len(set(names))
    assert set(names) == set(hold(TIED, "0:6@0").named_state(owned=True))
    assert owned[3] == {}


# -- join and drop -----------------------------------------------------------------------------


def test_blocks_appear_when_all_their_slabs_are_there() -> None:
    tied = TIED.layers.tied_slab
    assert tied == 6
    holdings = hold(TIED, "0:6@1")
    assert holdings.blocks == {}
    for slab, blocks in ((0, []), (2, [2]), (5, [2]), (6, [0, 2, 5])):
        holdings.join(slab)
        assert sorted(holdings.blocks) == blocks
        check(holdings)
    for slab, blocks in ((5, [0, 2]), (6, [2]), (2, []), (0, [])):
        holdings.drop(slab)
        assert sorted(holdings.blocks) == blocks
        check(holdings)


def test_the_tied_slab_is_shared_by_embedding_and_head() -> None:
    holdings = hold(TIED, "0:6@0")
    name = "embedding.word_embeddings.weight"
    first = holdings.blocks[0].slab_parameters()[6][name]
    last = holdings.blocks[5].slab_parameters()[6][name]
    assert first is last
    assert holdings.slabs[6].parameters[name] is first
    batch = make_batch([5, 9], TIED)
    run([holdings.blocks[unit] for unit in range(6)], batch).sum().backward()
    # The same with a head that has weights of its own.
    head = build_block(TIED.layers.units[5], TIED)
    own = head.slab_parameters()[6][name]
    assert first.grad is not None
    whole = first.grad.clone()
    first.grad.zero_()
    run([*(holdings.blocks[unit] for unit in range(5)), head], batch).sum().backward()
    assert own.grad is not None
    assert_close(whole, first.grad + own.grad, 5e-7)
    assert first.grad.any()
    assert own.grad.any()


def test_a_slab_that_returns_brings_its_block_back_to_life() -> None:
    holdings = hold(TIED, "0:6@0")
    batch = make_batch([5, 9], TIED)
    block = holdings.blocks[1]
    x = torch.randn(14, 1, TIED.hidden_size, generator=torch.Generator().manual_seed(1))
    before = block(x, batch).detach()
    state = holdings.slabs[1].state.clone()
    holdings.drop(1)
    assert all(p.device.type == "meta" for p in block.parameters()), "a shell without memory"
    holdings.join(1).state.copy_(state)
    assert holdings.blocks[1] is block, "it was not built again"
    assert torch.equal(block(x, batch), before)
    holdings.slabs[1].grads.zero_()
    block(x, batch).sum().backward()
    assert holdings.slabs[1].grads.any()
    check(holdings)


def test_a_block_that_is_down_cannot_be_run_by_accident() -> None:
    holdings = hold(TIED, "0:6@0")
    block = holdings.blocks[1]
    holdings.drop(1)
    assert 1 not in holdings.blocks
    x = torch.zeros(14, 1, TIED.hidden_size)
    with pytest.raises((RuntimeError, NotImplementedError)):
        block(x, make_batch([5, 9], TIED)).sum().item()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_but_the_pool_keeps_the_memory_of_a_dropped_slab(dtype: str, exact: bool) -> None:
    holdings = hold(make_config(params_dtype=dtype), "0:6@0", exact=exact)
    for number in (0, 1, 6):
        slab = holdings.slabs[number]
        parameters = [*slab.parameters.values(), *slab.parameters_of(0).values()]
        views = [slab.master, slab.exp_avg, *parameters, *(p.grad for p in parameters)]
        alive = [weakref.ref(view) for view in views if view is not None]
        holdings.drop(number)
        del slab, parameters, views
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive), f"slab {number}"
    del holdings


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_state_goes_to_the_host_and_comes_back(dtype: str, exact: bool) -> None:
    holdings = hold(make_config(params_dtype=dtype), "0:6@0", exact=exact)
    names = set(holdings.named_state(owned=True))
    for slab in holdings:
        slab.exp_avg.normal_()
        slab.exp_avg_sq.uniform_()
    before = {k: v.clone() for k, v in holdings.named_state(owned=True).items()}
    used = holdings.pool.used
    for number in (1, 4, 6):
        holdings.rehouse(number, offloaded=True)
    moved = sum(holdings.slabs[n].layout.numel for n in (1, 4, 6))
    assert holdings.pool.used == used - moved * (8 if dtype == "float32" else 12)
    check(holdings)
    for _ in range(2):
        after = holdings.named_state(owned=True)
        assert set(after) == names
        assert all(torch.equal(before[k], v) for k, v in after.items())
        for number in (1, 4, 6):
            holdings.rehouse(number, offloaded=False)
    assert holdings.pool.used == used
    check(holdings)


def test_a_state_on_the_host_has_the_weights_of_the_last_update() -> None:
    holdings = hold(TIED, "0:6@0")
    holdings.rehouse(1, offloaded=True)
    slab = holdings.slabs[1]
    slab.grads.fill_(1.0)
    brought = slab.swapped.clone()
    update(slab, OptimizerConfig(), StepSize(0.1, 0.0), 1.0, 0, brought)
    assert not torch.equal(slab.master, slab.params)
    assert torch.equal(slab.state[: slab.layout.numel], slab.params.detach())
    assert torch.equal(slab.master, slab.params.detach())


# -- sharded -----------------------------------------------------------------------------------


def filled(dtype: str, exact: bool, plan: str = "0:6@0") -> Holdings:
    """With moments of its own, and master weights that are not the rounded ones."""
    holdings = hold(make_config(params_dtype=dtype), plan, exact=exact)
    for slab in holdings:
        slab.exp_avg.normal_()
        slab.exp_avg_sq.uniform_()
        if slab.mixed:
            slab.master.add_(1e-6)
            slab.params_from_masters()
    return holdings


def parts(numel: int) -> list[tuple[int, int]]:
    return [share(numel, 3, place) for place in range(3)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_is_a_third_of_the_state_and_all_of_the_weights(dtype: str, exact: bool) -> None:
    holdings, whole = filled(dtype, exact), filled(dtype, exact)
    for slab in whole:
        slab.take_part(holdings.slabs[slab.index])
        slab.params.copy_(holdings.slabs[slab.index].params)
    for number in (1, 4, 6):
        part = parts(whole.slabs[number].layout.numel)[1]
        holdings.cut(number, part)
        slab, other = holdings.slabs[number], whole.slabs[number]
        assert slab.sharded
        assert slab.part == part
        assert slab.params.equal(other.params)
        for mine, theirs in zip(slab.piece(*part), other.piece(*part), strict=True):
            assert mine.equal(theirs)
        tensors = 2 if dtype == "float32" else 3
        assert slab.buffers.state.numel() == tensors * (part[1] - part[0])
        with pytest.raises(ValueError, match="no device has its whole state"):
            slab.named_state()
    check(holdings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_that_is_cut_anew_keeps_what_it_has_and_takes_pieces(dtype: str) -> None:
    holdings, whole = filled(dtype, exact=False), filled(dtype, exact=False)
    slab = whole.slabs[1]
    holdings.slabs[1].params.copy_(slab.params)
    holdings.slabs[1].state.copy_(slab.state)
    numel = slab.layout.numel
    holdings.cut(1, (0, 512))
    for part in ((256, 1024), (0, numel)):
        old = holdings.slabs[1].part
        target = holdings.recut(1, part)
        for start, stop in missing(part, old):
            for mine, theirs in zip(
                target.piece(start, stop), slab.piece(start, stop), strict=True
            ):
                mine.copy_(theirs)
        holdings.slabs[1].grads.fill_(2.0)
        holdings.install(target)
        assert holdings.slabs[1] is target
        assert bool((target.grads == 2.0).all())
        assert target.params.equal(slab.params)
        for mine, theirs in zip(target.piece(*part), slab.piece(*part), strict=True):
            assert mine.equal(theirs)
        check(holdings)
    assert not holdings.slabs[1].sharded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_of_all_parts_are_the_update_of_the_whole(dtype: str) -> None:
    whole = filled(dtype, exact=False)
    slab, size = whole.slabs[1], StepSize(0.1, 0.1)
    slab.grads.normal_()
    found = []
    for part in parts(slab.layout.numel):
        split = filled(dtype, exact=False)
        split.slabs[1].params.copy_(slab.params)
        split.slabs[1].state.copy_(slab.state)
        split.cut(1, part)
        one = split.slabs[1]
        one.grads.copy_(slab.grads)
        update(one, OptimizerConfig(), size, 0.5, 3)
        found.append([t.clone() for t in (*one.piece(*part), one.params[part[0] : part[1]])])
    update(slab, OptimizerConfig(), size, 0.5, 3)
    expected = (slab.master, slab.exp_avg, slab.exp_avg_sq, slab.params)
    for pieces, tensor in zip(zip(*found, strict=True), expected, strict=True):
        assert torch.cat(pieces).equal(tensor)


def test_norms_and_zeros_of_all_parts_are_those_of_the_whole() -> None:
    slab = hold(TIED, "0:6@0").slabs[1]
    slab.grads.normal_()
    slab.grads[::3] = 0.0
    each = parts(slab.layout.numel)
    norm = sum(slab.squared_norm(part).item() for part in each)
    assert_numbers_close(norm, slab.squared_norm().item(), 2e-7)
    assert sum(slab.zeros(part).item() for part in each) == slab.zeros().item()
    assert slab.squared_norm((64, 64)).item() == slab.zeros((64, 64)).item() == 0


def test_a_state_that_is_spread_is_filled_and_taken_back() -> None:
    holdings = filled("bfloat16", exact=False, plan="0:6@0,1 ; shard 0-5")
    assert holdings.shared == dict.fromkeys(range(7), (0, 1))
    slab = holdings.slabs[1]
    whole = slab.spread()
    start, stop = slab.part
    assert whole.piece(start, stop)[1].equal(slab.exp_avg)
    assert not whole.exp_avg[stop:].any()
    assert whole.params.data_ptr() == slab.params.data_ptr()
    whole.state.fill_(3.0)
    slab.take_part(whole)
    assert all(bool((t == 3.0).all()) for t in slab.piece(start, stop))


def test_weights_that_were_loaded_stay_when_a_part_is_taken() -> None:
    # In a float32 model the parameters are the master weights.
    slab = filled("float32", exact=False, plan="0:6@0,1 ; shard 0-5").slabs[1]
    whole = slab.spread()
    whole.params.fill_(5.0)
    slab.take_part(whole)
    assert bool((slab.params == 5.0).all())


def test_the_memory_of_a_part_goes_with_it() -> None:
    holdings = hold(UNTIED, "0:6@0")
    used = holdings.pool.used
    numel = holdings.slabs[1].layout.numel
    holdings.cut(1, (0, 512))
    assert holdings.pool.used == used - 8 * numel  # the state of the part is not the pool's
    state = weakref.ref(holdings.slabs[1].buffers.state)
    holdings.drop(1)
    assert holdings.pool.used == used - 16 * numel
    gc.collect()
    assert state() is None


def test_the_next_slab_of_the_same_size_takes_over_the_memory() -> None:
    holdings = hold(UNTIED, "0:6@0")
    most = holdings.pool.most
    first, second = holdings.slabs[1], holdings.slabs[3]  # both attention
    assert first.layout.numel == second.layout.numel
    address = first.state.data_ptr()
    holdings.drop(1)
    holdings.drop(3)
    assert holdings.pool.used < most
    assert {holdings.join(3).state.data_ptr(), holdings.join(1).state.data_ptr()} >= {address}
    assert (holdings.pool.used, holdings.pool.kept, holdings.pool.most) == (most, 0, most)
    check(holdings)


def test_alternating_halves_need_the_memory_of_the_larger() -> None:
    holdings = hold(UNTIED, "0:3@0 | 3:6@1")
    numels = {s: holdings._layout(s).numel for s in range(6)}
    halves = [16 * sum(numels[s] for s in part) for part in ((0, 1, 2), (3, 4, 5))]
    for _ in range(3):
        for gone, come in (((0, 1, 2), (3, 4, 5)), ((3, 4, 5), (0, 1, 2))):
            for slab in gone:
                holdings.drop(slab)
            for slab in come:
                holdings.join(slab)
            check(holdings)
    assert holdings.pool.most == max(halves)
    assert holdings.pool.used + holdings.pool.kept <= max(halves)


def test_a_slab_without_parameters_makes_its_block_complete() -> None:
    holdings = hold(ROPE, "0:6@1")
    holdings.join(6)
    assert sorted(holdings.blocks) == []
    empty = holdings.join(0)
    assert empty.layout.numel == 0
    assert sorted(holdings.blocks) == [0]
    holdings.drop(0)
    assert sorted(holdings.blocks) == []


def test_gradients_of_a_joined_slab_are_zero() -> None:
    # The executor clears them before it drops a slab; a joiner's contribution must be zero.
    holdings = hold(UNTIED, "0:6@0", exact=True)
    for slab in (1, 2):
        holdings.drop(slab)
    for slab in (1, 2):
        joined = holdings.join(slab)
        assert joined.sums is not None
        assert not joined.grads.any()
        assert not joined.sums.any()


# -- adopt -------------------------------------------------------------------------------------


def test_adopting_a_plan_moves_ownership() -> None:
    holdings = hold(TIED, "0:3@0 | 3:6@1")
    owned = [holdings.owned]
    for slab in (0, 1):
        holdings.drop(slab)
    for slab in (4, 5):
        holdings.join(slab)
    holdings.adopt(Plan.parse("0:2@1 | 2:3@0 | 3:4@1 | 4:6@1,0"))
    owned.append(holdings.owned)
    holdings.join(3)
    holdings.adopt(Plan.parse("0:2@1 | 2:6@0"))
    owned.append(holdings.owned)
    assert owned == [(0, 1, 2, 6), (2, 4, 5, 6), (2, 3, 4, 5, 6)]


def test_adopting_a_plan_that_gives_other_slabs_is_refused() -> None:
    holdings = hold(UNTIED, "0:3@0 | 3:6@1")
    message = "worker 0 holds slabs [0, 1, 2], but the plan '0:4@0 | 4:6@1' gives it [0, 1, 2, 3]"
    with pytest.raises(ValueError, match=re.escape(message)):
        holdings.adopt(Plan.parse("0:4@0 | 4:6@1"))


# -- training and evaluation -------------------------------------------------------------------


def test_a_block_that_comes_during_an_evaluation_is_in_evaluation() -> None:
    holdings = hold(TIED, "0:3@0 | 3:6@1")
    assert all(block.training for block in holdings.blocks.values())
    holdings.train(False)
    holdings.drop(1)
    holdings.join(1)
    holdings.join(4)
    assert not any(block.training for block in holdings.blocks.values())
    kept = holdings.blocks[4]
    holdings.drop(4)
    holdings.train(True)
    holdings.join(4)
    assert holdings.blocks[4] is kept
    assert all(block.training for block in holdings.blocks.values())


def test_slabs_come_in_ascending_order() -> None:
    holdings = hold(TIED, "0:6@1")
    for slab in (4, 1, 3):
        holdings.join(slab)
    assert [slab.index for slab in holdings] == [1, 3, 4]
