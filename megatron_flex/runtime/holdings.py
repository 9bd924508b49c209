"""What one device holds: slabs, and the blocks (modules) whose weights live in them.

A block is there when all slabs of its unit are. Slabs come and go between iterations; a block that
was built once is kept as a shell without memory for the next time its unit comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_flex.model.blocks import Block, build_shell, decays
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.initialize import initialize
from megatron_flex.model.megatron import DTYPES
from megatron_flex.model.tensor_cut import cut_of, is_partial
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.memory import MemoryMeter
from megatron_flex.runtime.slab import Sharing, Slab, SlabLayout, SlabPool
from megatron_flex.schedule.shards import Range, sharded_slabs, share
from megatron_flex.schedule.slabs import slab_holders


class Holdings:
    """The slabs and blocks of one device.

    Attributes:
        slabs: by number.
        blocks: by unit; exactly the units of which this device holds all slabs.
        owned: slabs of which this device is the owner (the lowest holder): it saves them.
        shared: held slabs whose optimizer state is sharded, and their holders, ascending.
        updates: optimizer updates applied so far, the same on all devices.
        memory: counts the bytes in use on the device; what the pool keeps is free for use.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        rank: int,
        device: torch.device,
        *,
        exact: bool = False,
        group: TensorGroup = SOLO,
    ) -> None:
        """Hold what ``plan`` gives to the device ``rank``, with initial values.

        Args:
            exact: keep exact sums of gradients (:mod:`megatron_flex.runtime.exact`).
            group: the workers that are the device together; this one's share is held.
        """
        self.config = config
        self.rank = rank
        self.group = group
        self.device = device
        self.exact = exact
        self.slabs: dict[int, Slab] = {}
        self.blocks: dict[int, Block] = {}
        self.owned: tuple[int, ...] = ()
        self.shared: dict[int, tuple[int, ...]] = {}
        self.updates = 0
        self.memory = MemoryMeter(device)  # before there is anything to count
        self.pool = SlabPool(DTYPES[config.params_dtype], device, exact)
        self._shells: dict[int, tuple[Block, dict[str, torch.nn.Parameter]]] = {}
        self._layouts: dict[int, SlabLayout] = {}
        self._training = True
        sharded = sharded_slabs(plan, config.layers)
        for number, holders in enumerate(slab_holders(plan, config.layers)):
            if rank in holders:
                self._initialize(self.join(number))
                if number in sharded:
                    place = holders.index(rank)
                    self.cut(number, share(self._layout(number).numel, len(holders), place))
        self.adopt(plan)

    def join(self, number: int, *, offloaded: bool = False, part: Range | None = None) -> Slab:
        """Make room for a slab, and put up the blocks that are complete with it.

        Its weights and optimizer state are undefined until they are filled. ``offloaded``: the
        state is in the host's memory. ``part``: elements whose optimizer state will be here.
        """
        layout = self._layout(number)
        offloaded = offloaded and layout.numel > 0
        slab = self._make(number, part or (0, layout.numel), offloaded=offloaded)
        self.slabs[number] = slab
        for unit in self._units(number):
            slabs = self.config.layers.units[unit].slabs
            if all(s in self.slabs for s in slabs):
                self._put_up(unit)
        return slab

    def drop(self, number: int) -> None:
        """Give up a slab and the blocks that need it; its gradients must be zero."""
        for unit in self._units(number):
            block = self.blocks.pop(unit, None)
            if block is not None:
                for name, parameter in self._shells[unit][1].items():
                    block.bind(name, parameter)
        self.pool.give(self.slabs.pop(number).buffers)
        self.memory.set_aside(self.pool.kept)

    def rehouse(self, number: int, *, offloaded: bool) -> None:
        """Move a slab's optimizer state (and master weights) to the host's memory, or back.

        Its gradients must be zero, and nothing else may use its state meanwhile.
        """
        old = self.slabs[number]
        new = self.pool.take(old.layout.numel, offloaded=offloaded)
        with torch.no_grad():
            new.state.copy_(old.state)
            if old.mixed or offloaded:
                new.params.copy_(old.params)
        self._exchange(Slab(number, old.layout, new))

    def cut(self, number: int, part: Range) -> None:
        """Keep only a part of a slab's optimizer state, of which all is here."""
        old = self.slabs[number]
        if part == old.part:
            return
        new = self._make(number, part)
        with torch.no_grad():
            new.params.copy_(old.params)
            new.grads.copy_(old.grads)
        new.take_part(old)
        self._exchange(new)

    def recut(self, number: int, part: Range) -> Slab:
        """Room for another part of a sharded slab, with what is known of it.

        To be installed; where it is sharded too, parameters and gradients are the same memory.
        """
        old = self.slabs[number]
        if part == (0, old.layout.numel):
            new = self._make(number, part)
        else:
            new = Slab(number, old.layout, old.buffers.of_part(part), part)
        start, stop = max(part[0], old.part[0]), min(part[1], old.part[1])
        if start < stop:
            with torch.no_grad():
                pieces = zip(new.piece(start, stop), old.piece(start, stop), strict=True)
                for target, source in pieces:
                    target.copy_(source)
        return new

    def install(self, new: Slab) -> None:
        """Put a slab with another part of its optimizer state in place of the one that is here."""
        old = self.slabs[new.index]
        if old is not new:
            if not new.sharded:
                with torch.no_grad():
                    new.params.copy_(old.params)
                    new.grads.copy_(old.grads)
            self._exchange(new)
        new.params_from_masters()

    def _make(self, number: int, part: Range, *, offloaded: bool = False) -> Slab:
        layout = self._layout(number)
        sharded = part != (0, layout.numel)
        buffers = self.pool.take(layout.numel, offloaded=offloaded, sharded=sharded)
        self.memory.set_aside(self.pool.kept)
        return Slab(number, layout, buffers.of_part(part) if sharded else buffers, part)

    def _exchange(self, new: Slab) -> None:
        """Put a slab in place of one of the same weights, whose memory goes if it is its own."""
        old, self.slabs[new.index] = self.slabs[new.index], new
        for unit in self._units(new.index):
            block = self.blocks.get(unit)
            if block is not None:
                for name, parameter in new.parameters_of(unit).items():
                    block.bind(name, parameter)
        if old.grads is not new.grads:
            old.grads.zero_()
            self.pool.give(old.buffers)
        self.memory.set_aside(self.pool.kept)

    def adopt(self, plan: Plan) -> None:
        """Take over ownership under ``plan``; the slabs must be those that it gives this device."""
        holders = slab_holders(plan, self.config.layers)
        wanted = {s for s, devices in enumerate(holders) if self.rank in devices}
        if wanted != set(self.slabs):
            raise ValueError(
                f"worker {self.rank} holds slabs {sorted(self.slabs)}, but the plan '{plan}' gives"
                f" it {sorted(wanted)}"
            )
        self.owned = tuple(s for s in sorted(wanted) if holders[s][0] == self.rank)
        sharded = sharded_slabs(plan, self.config.layers)
        self.shared = {s: holders[s] for s in sorted(wanted & sharded)}

    def state_bytes(self, number: int) -> int:
        """Bytes of a slab's whole state, held here or not."""
        return 3 * 4 * self._layout(number).numel

    def train(self, mode: bool) -> None:
        """Switch dropout on or off in every block."""
        if mode is not self._training:
            self._training = mode
            for block in self.blocks.values():
                block.train(mode)

    def named_state(
        self, *, owned: bool, model: bool = True, optimizer: bool = True
    ) -> dict[str, torch.Tensor]:
        """Views of all state by checkpoint name; of owned slabs only, or of every held one.

        With sharded slabs see :mod:`megatron_flex.runtime.shards`.
        """
        merged: dict[str, torch.Tensor] = {}
        for number in self.owned if owned else sorted(self.slabs):
            merged.update(self.slabs[number].named_state(model=model, optimizer=optimizer))
        return merged

    def __iter__(self) -> Iterator[Slab]:
        """The slabs in ascending order."""
        return iter([self.slabs[number] for number in sorted(self.slabs)])

    # ---- building ----------------------------------------------------------------------------

    def _units(self, slab: int) -> tuple[int, ...]:
        """Units that use a slab: its own, or embedding and head for the tied word embedding."""
        layers = self.config.layers
        return (0, layers.num_units - 1) if slab == layers.tied_slab else (slab,)

    def _shell(self, unit: int) -> tuple[Block, dict[str, torch.nn.Parameter]]:
        """The block of a unit without memory, and its parameters as they are then."""
        if unit not in self._shells:
            block = build_shell(self.config.layers.units[unit], self.config, group=self.group)
            parameters = {
                name: parameter
                for of_slab in block.slab_parameters().values()
                for name, parameter in of_slab.items()
            }
            self._shells[unit] = (block, parameters)
        return self._shells[unit]

    def _layout(self, number: int) -> SlabLayout:
        if number not in self._layouts:
            unit = self._units(number)[0]
            names = self._names(unit, number)
            parameters = self._shell(unit)[1]
            shapes = ((name, parameters[name].shape) for name in names)
            self._layouts[number] = SlabLayout.of(shapes, decays, self._sharing, self.group.index)
        return self._layouts[number]

    def _sharing(self, name: str) -> Sharing:
        group = self.group
        if group.size == 1 or cut_of(self.config, name) is not None:
            return Sharing.CUT
        partial = is_partial(self.config, name, sequence_parallel=group.sequence_parallel)
        return Sharing.PARTIAL if partial else Sharing.WHOLE

    def _names(self, unit: int, slab: int) -> list[str]:
        """Names of a unit's parameters that lie in ``slab``, in the order of initialisation."""
        return list(self._shell(unit)[0].slab_parameters()[slab])

    def _put_up(self, unit: int) -> None:
        block = self._shell(unit)[0]
        for number in self.config.layers.units[unit].slabs:
            for name, parameter in self.slabs[number].parameters_of(unit).items():
                block.bind(name, parameter)
        block.train(self._training)
        self.blocks[unit] = block

    def _initialize(self, slab: Slab) -> None:
        slab.params.zero_()  # what is between parameters too
        names = self._names(self._units(slab.index)[0], slab.index)
        parameters = {name: slab.parameters[name] for name in names}
        initialize(self.config, slab.index, parameters, self.group)
        slab.masters_from_params()
