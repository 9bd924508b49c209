"""Peaks of a program in plain Python: what ``kernels/src/program_footprint.cpp`` must equal."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.levels import Lines, SliceLines, SlicePasses, StagePasses
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Drop,
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    Recut,
    RecvActivation,
    RecvGradient,
    RecvState,
    SendActivation,
    SendGradient,
    SendState,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.residency import POSTED, WINDOW, travels
from megatron_flex.schedule.shards import sharded_slabs


def device_peaks(
    footprint: Footprint, program: Program, device: int, sliced: Sequence[int]
) -> tuple[float, float]:
    """As :meth:`megatron_flex.planner.footprint.Footprint.device`."""
    return _Replay(footprint, program, device, sliced).run()


def highest(lines: Lines, tokens: float) -> float:
    """Bytes of a pass for a micro-batch of so many tokens."""
    return max(fixed + token * tokens for fixed, token in lines)


def highest_slice(
    lines: SliceLines, tokens: float, sliced: float, begun: float, ended: float = 0.0
) -> float:
    """Bytes where each unit that begins takes ``begun`` and then gives up ``ended``."""
    return max(
        line.level(tokens, sliced) + line.own * begun - line.before * ended for line in lines
    )


class _Chain:
    """What a device holds of one sample that is cut.

    ``held`` are the stages whose units have its keys; ``tables`` the bytes of its rotary tables.
    """

    def __init__(self, chain: Sequence[int], tokens: float) -> None:
        self.first, self.last = chain[0], chain[-1]
        self.tokens = tokens
        self.held: set[int] = set()
        self.tables = 0.0


class _Replay:
    """Goes through the instructions of one device."""

    def __init__(
        self, footprint: Footprint, program: Program, device: int, sliced: Sequence[int]
    ) -> None:
        self.f = footprint
        self.sliced = sliced
        self.chain = {
            m: found
            for chain in (program.chains if len(sliced) else ())
            for found in [_Chain(chain, sum(sliced[m] for m in chain))]
            for m in chain
        }
        self.tokens = program.tokens
        self.instructions = program.instructions[device]
        o, plan = program.plan.o_plan, program.plan
        held = program.held or plan
        self.slabs = dict(footprint._held(held, device))
        self.used = sum(self.slabs.values()) + footprint._twice_tied(held, device)
        self.peak = self.used
        self.swapped = set(self.slabs) & set(o.optimizer)
        after = program.next_plan
        self.later = frozenset(after.o_plan.optimizer if after is not None else ())
        self.sharded = sharded_slabs(held, footprint._layers)
        # Bytes that the update takes before it gives up the present state, and the change in all.
        self.cut: dict[int, tuple[float, float]] = {}
        stages = plan.stages_of(device)
        self.passes = {n: footprint._stage(plan.stages[n], o) for n in stages}
        self.slices = {n: footprint._slices(plan.stages[n], o) for n in stages if self.chain}
        whole = (Backward, BackwardInput)
        self.evaluates = not any(isinstance(i, whole) for i in self.instructions)
        self.sent: deque[float] = deque()  # bytes of messages that are not taken
        receives = (RecvActivation, RecvGradient)
        self.device = device
        self.expected = [self._posted(i) for i in self.instructions if isinstance(i, receives)]
        self.expected.reverse()
        self.posted = 0
        self.left = Counter(i.micro_batch for i in self.instructions if isinstance(i, Compute))
        self.contexts: dict[int, float] = {}
        self.travels = travels(self.instructions, plan)
        self.leaving = 0.0

    def run(self) -> tuple[float, float]:
        """Both peaks."""
        self._post()
        for number, op in enumerate(self.instructions):
            if isinstance(op, Compute):
                self._delivered(op.under_way)
                if self.travels.passes:
                    self._travel(op)
                if isinstance(op, Forward):
                    self._forward(op)
                elif isinstance(op, BackwardWeight):
                    self._backward_weight(op)
                else:
                    self._backward(op)
            elif isinstance(op, Transfer):
                self._transfer(op)
            elif isinstance(op, RecvState):
                self._join(op)
            elif isinstance(op, Recut):
                self._recut(op)
            elif isinstance(op, GlobalNorm):
                self._delivered(0)
                rest = self.instructions[number + 1 :]
                updated = [i.slab for i in rest if isinstance(i, UpdateOrSkip)]
                self.swapped -= self.cut.keys()
                first = [slab for slab in updated if slab in self.swapped][:WINDOW]
                window = sum(map(self.f.window, first))
                return max(self.peak, self.used + window), self._updates(rest)
        return self.peak, self.used

    def _take(self, size: float) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def _post(self) -> None:
        while self.expected and self.posted < POSTED:
            self._take(self.expected.pop())
            self.posted += 1

    def _in_shares(self, op: Transfer) -> bool:
        servers = self.f._divided
        return bool(servers) and op.peer // servers != self.device // servers

    def _posted(self, op: Transfer) -> float:
        """Bytes of the buffer that a message comes to."""
        share = self.f.boundary / self.f._tensor.size
        return (share if self._in_shares(op) else self.f.boundary) * op.tokens

    def _transfer(self, op: Transfer) -> None:
        if isinstance(op, (SendActivation, SendGradient)):
            self.sent.append(self.f.boundary * op.tokens)
        else:
            self.posted -= 1  # its buffer goes on as an activation or a gradient
            self._post()
            if self._in_shares(op):  # all of it is gathered in another
                self._take(self.f.boundary * op.tokens)
                self.used -= self._posted(op)

    def _delivered(self, under_way: int) -> None:
        """All but the last messages have been taken."""
        while len(self.sent) > under_way:
            self.used -= self.sent.popleft()

    def _travel(self, op: Compute) -> None:
        """What the pass before saved has left, and what the next one needs comes back."""
        self.used -= self.leaving
        self.leaving = 0.0
        key = self.travels.back.get(op)
        if key is not None:
            self._take(self._travels(*key))

    def _travels(self, stage: int, micro_batch: int) -> float:
        """Bytes that a pass's activations on their way to the host free."""
        tokens = self.tokens[micro_batch]
        if micro_batch in self.chain:
            return self.slices[stage].travels(tokens, self.sliced[micro_batch])
        return self.passes[stage].travels * tokens

    def _left(self, op: Compute) -> float:
        """Bytes that a forward leaves to its backward, with its output."""
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        if op.micro_batch in self.chain:
            left = self.slices[op.stage].left(tokens, self.sliced[op.micro_batch])
            return left + p.output * tokens
        return (p.left + p.output) * tokens

    def _forward(self, op: Forward) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        if p.context and op.micro_batch not in self.contexts:
            self.contexts[op.micro_batch] = p.context * tokens
            self._take(self.contexts[op.micro_batch])
        source = self.f.boundary * tokens if op.stage else 0.0  # in use already
        base = self.used - source
        if op.micro_batch in self.chain:
            self._forward_slice(op, base)
        else:
            self.peak = max(self.peak, base + highest(p.forward, tokens))
        self.used += self._left(op) - source
        if (op.stage, op.micro_batch) in self.travels.passes:
            self.leaving = self._travels(op.stage, op.micro_batch)
        self._done(op)

    def _forward_slice(self, op: Forward, base: float) -> None:
        """The peak of the pass, and the buffers: the first slice makes them."""
        q, chain = self.slices[op.stage], self.chain[op.micro_batch]
        keys = self.f.chains.keys_values * chain.tokens
        makes = keys if op.micro_batch == chain.first else 0.0
        if makes and q.units and not chain.held:
            chain.tables = self.f._tables * chain.tokens
            self.used += chain.tables
            base += chain.tables
        frees = keys if self.evaluates and op.micro_batch == chain.last else 0.0
        most = highest_slice(
            q.forward, self.tokens[op.micro_batch], self.sliced[op.micro_batch], makes
        )
        self.peak = max(self.peak, base + most)
        self.used += q.units * (makes - frees)
        if q.units:
            chain.held.add(op.stage)
        if frees:
            self._freed(op, chain)

    def _freed(self, op: Compute, chain: _Chain) -> None:
        """A stage has given up its buffers; the last one also the rotary tables."""
        chain.held.discard(op.stage)
        if not chain.held:
            self.used -= chain.tables
            chain.tables = 0.0

    def _backward_slice(self, op: Compute, base: float) -> None:
        """The peak of the pass; the last slice makes the gradients' buffers, the first frees all.

        ``base`` is what is in use besides what the forward left.
        """
        q, chain, m = self.slices[op.stage], self.chain[op.micro_batch], op.micro_batch
        gradients = self.f.chains.gradients * chain.tokens
        makes = gradients if m == chain.last else 0.0
        frees = gradients + self.f.chains.keys_values * chain.tokens if m == chain.first else 0.0
        lines = q.backward_input if isinstance(op, BackwardInput) else q.backward
        most = highest_slice(lines, self.tokens[m], self.sliced[m], makes, frees)
        self.peak = max(self.peak, base + most)
        self.used += q.units * (makes - frees)
        if frees:
            self._freed(op, chain)

    def _backward(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        # What the forward left, and the gradient of its output, are in use already.
        left, split = self._left(op), isinstance(op, BackwardInput)
        if op.micro_batch in self.chain:
            self._backward_slice(op, self.used - left)
        else:
            lines = p.backward_input if split else p.backward
            self.peak = max(self.peak, self.used - left + highest(lines, tokens))
        self.used += (self.f.boundary * tokens if op.stage else 0.0) - left
        self.used += self._halves(op).owed * tokens if split else 0.0
        self._done(op)

    def _halves(self, op: Compute) -> StagePasses | SlicePasses:
        """What is owed between the halves of a pass."""
        cut = op.micro_batch in self.chain
        return self.slices[op.stage] if cut else self.passes[op.stage]

    def _backward_weight(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self._halves(op)
        self.used -= p.owed * tokens
        if p.backward_weight:
            self.peak = max(self.peak, self.used + highest(p.backward_weight, tokens))
        self._done(op)

    def _done(self, op: Compute) -> None:
        self.left[op.micro_batch] -= 1
        if not self.left[op.micro_batch]:
            self.used -= self.contexts.pop(op.micro_batch, 0.0)

    def _join(self, op: RecvState) -> None:
        self._take(self._joined(op.slab))

    def _joined(self, slab: int) -> float:
        """Bytes of a slab that comes for the next plan, where its optimizer state is then."""
        offloaded = slab in self.later
        if offloaded:
            self.swapped.add(slab)
        self.slabs[slab] = self.f.slab(slab, offloaded=offloaded)
        return self.slabs[slab]

    def _recut(self, op: Recut) -> None:
        """Room for another part; where the whole state is here, only at the update."""
        now = self.slabs.get(op.slab)
        early, more, after = self.f._recut(
            op.slab, (op.start, op.stop), now is not None, op.slab in self.sharded
        )
        self._take(early)
        self.slabs[op.slab] = after
        if now is not None:
            self.cut[op.slab] = (more, after - early - now)

    def _updates(self, instructions: Sequence[Instruction]) -> float:
        """Peak after the global norm."""
        used = peak = self.used
        updates = [i.slab for i in instructions if isinstance(i, UpdateOrSkip)]
        coming = deque(self.f.window(slab) for slab in updates if slab in self.swapped)
        # States from the host: one goes when the next comes, the last ones when all must be back.
        window = deque(coming.popleft() for _ in range(min(WINDOW, len(coming))))
        for op in instructions:
            if isinstance(op, (SendState, Drop)):
                window.clear()
            peak = max(peak, used + sum(window))
            if isinstance(op, UpdateOrSkip) and op.slab in self.cut:
                more, change = self.cut.pop(op.slab)
                peak = max(peak, used + more + sum(window))
                used += change
            elif isinstance(op, UpdateOrSkip) and op.slab in self.swapped and coming:
                window.popleft()
                window.append(coming.popleft())
            elif isinstance(op, RecvState):
                used += self._joined(op.slab)
            elif isinstance(op, Drop):
                used -= self.slabs.pop(op.slab, 0.0)
        return max(peak, used + sum(window))
