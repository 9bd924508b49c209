"""How a run's batches are cut to micro-batches, by its flags."""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.arguments import plan_of
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.devices import unit_costs
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.dynapipe import dynapipe_of

_PADS = {"pad": "micro-batch", "pad-batch": "batch", "pad-all": "batch", "bucket": "bucket"}


def run_cut(
    config: Config, cost: CostCoefficients, model: ModelConfig, profile: Profile | None
) -> Cut:
    """How a run's batches are cut; ``profile``: what was measured of its layers."""
    align = config.alignment
    found = _unaligned(config, cost, model, profile)
    tokens, slices = found.tokens, found.slice_tokens
    if tokens is not None:  # padding included
        tokens -= tokens % align
    return replace(found, tokens=tokens, slice_tokens=slices - slices % align, align=align)


def _unaligned(
    config: Config, cost: CostCoefficients, model: ModelConfig, profile: Profile | None
) -> Cut:
    tokens, count = config.data.micro_batch_tokens, config.training.micro_batch_size
    f, gpt = config.flexpipe, config.architecture == "gpt"
    how = f.flexpipe_batching
    if how == "dynapipe":
        known = dynapipe_of(unit_costs(config, model, profile), plan_of(config, model))
        return Cut(pad=how, dynapipe=known, cost=cost)
    if how in _PADS:
        length = config.model.seq_length if how == "pad-all" else 0
        return Cut(tokens, count, pad=_PADS[how], pad_to=length, cost=cost)
    # Without either flag the plan says how: the planner's, or a recorded one. With exact sums all
    # runs cut alike, planned or not: another cut has other bits.
    flexible = count is None and (f.flexpipe or f.flexpipe_bitwise or tokens is None)
    if how == "slices":
        return Cut(tokens, None, 0, by_cost=True, sliced=gpt, cost=cost)
    wanted = 0 if how == "pack" else f.slice_tokens
    if wanted is None:
        # BERT looks at all tokens of a sample: it cannot be cut.
        return Cut(tokens, count, 0, flexible and (gpt or tokens is None), gpt, cost)
    if wanted and tokens is None and count is None:
        tokens = wanted
    return Cut(tokens, count, wanted, by_cost=flexible and tokens is None, cost=cost)
