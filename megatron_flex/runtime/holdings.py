"""What one device holds under a plan: blocks (modules) and the slabs that their weights live in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_flex.model.blocks import Block, build_block, decays
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.slab import Slab, SlabLayout
from megatron_flex.schedule.slabs import slab_holders

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Holdings:
    """The blocks and slabs of one device.

    Attributes:
        blocks: by unit.
        slabs: by slab number, ascending.
        owned: slabs of which this device is the owner (the lowest holder): it norms and saves them.
    """

    def __init__(self, config: ModelConfig, plan: Plan, rank: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.blocks: dict[int, Block] = {}
        self.slabs: dict[int, Slab] = {}
        units = [
            unit
            for number in plan.stages_of(rank)
            for unit in range(plan.stages[number].start, plan.stages[number].stop)
        ]
        for unit in units:
            self._add(unit)
        self.slabs = dict(sorted(self.slabs.items()))
        holders = slab_holders(plan, config.layers)
        self.owned = tuple(s for s in self.slabs if holders[s][0] == rank)

    def _add(self, index: int) -> None:
        block = build_block(self.config.layers.units[index], self.config)
        for number, parameters in block.slab_parameters().items():
            if number not in self.slabs:
                layout = SlabLayout.of(((n, p.shape) for n, p in parameters.items()), decays)
                slab = Slab(number, layout, _TYPES[self.config.params_dtype], self.device)
                slab.fill({n: p.detach() for n, p in parameters.items()})
                self.slabs[number] = slab
            for name, parameter in self.slabs[number].parameters.items():
                block.bind(name, parameter)
        self.blocks[index] = block.to(self.device)

    def train(self, mode: bool) -> None:
        """Switch dropout on or off in every block."""
        for block in self.blocks.values():
            block.train(mode)

    def named_state(
        self, *, owned: bool, model: bool = True, optimizer: bool = True
    ) -> dict[str, torch.Tensor]:
        """Views of all state by checkpoint name; of owned slabs only, or of every held one."""
        merged: dict[str, torch.Tensor] = {}
        for number in self.owned if owned else self.slabs:
            merged.update(self.slabs[number].named_state(model=model, optimizer=optimizer))
        return merged

    def __iter__(self) -> Iterator[Slab]:
        return iter(self.slabs.values())

