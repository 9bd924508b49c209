"""The validator in plain Python: what ``kernels/src/program_validate.cpp`` must equal.

The replay blocks where a worker may block: a receive waits for its message (sends are buffered,
first in first out for each ordered pair of devices), an operation until messages are taken that its
device has sent, a reduction for its whole group, the global norm for all devices. A message can be
taken when its receive is posted, some ahead of the one that is waited for. It tracks what every
device has computed and received, so whatever would make the iteration hang or its result wrong is
refused with the device and the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Drop,
    Forward,
    GatherParameters,
    GlobalNorm,
    Instruction,
    PieceOp,
    Program,
    Recut,
    RecvActivation,
    RecvGradient,
    RecvPiece,
    RecvState,
    ReduceGradient,
    ScatterGradient,
    SendActivation,
    SendGradient,
    SendPiece,
    SendState,
    SlabOp,
    SquaredNorm,
    StateOp,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.operations import check_chains
from megatron_flex.schedule.residency import POSTED
from megatron_flex.schedule.routing import check_route
from megatron_flex.schedule.shards import cuts
from megatron_flex.schedule.slabs import slab_stages
from megatron_flex.schedule.text import excerpt
from megatron_flex.schedule.validate import ProgramError
from tests.oracles.validate_switch import SwitchReplay

#: What a (stage, micro-batch) has gone through.
NOTHING, FORWARDED, HALF, DONE = range(4)


def validate(program: Program, layers: LayerList, *, forward_only: bool = False) -> None:
    """Raise :class:`ProgramError` unless the program runs to its end and trains rightly.

    Args:
        forward_only: the program is an evaluation: no backward, reductions or updates belong in.
    """
    try:
        program.plan.check(layers.num_units, len(program.instructions))
        check_route(program.plan, program.route, len(program.tokens))
        check_chains(program.chains, len(program.tokens), program.route)
        if program.next_plan is not None:
            program.next_plan.check(layers.num_units, len(program.instructions))
            cuts(program.held or program.plan, program.next_plan, layers, program.elements)
        if program.held is not None:
            program.held.check(layers.num_units, len(program.instructions))
    except ValueError as error:
        raise ProgramError(str(error)) from error
    if forward_only and program.next_plan is not None:
        raise ProgramError("an evaluation does not switch: leave out the next plan")
    _Replay(program, layers, forward_only).run()


class _Replay:
    def __init__(self, program: Program, layers: LayerList, forward_only: bool) -> None:
        self.program, self.train = program, not forward_only
        self.plan, self.route, self.tokens = program.plan, program.route, program.tokens
        self.S, self.M, self.D = len(self.route), len(self.tokens), len(program.instructions)
        self.stages_of_slab = slab_stages(self.plan, layers)
        self.switch = SwitchReplay(program, layers, self.stop)
        self.holders = self.switch.members
        self.state = bytearray(self.S * self.M)
        # Of each slice of a longer sample: the slice before it, and the one after it.
        self.before = {b: a for chain in program.chains for a, b in pairwise(chain)}
        self.after = {a: b for b, a in self.before.items()}
        # Inputs at hand: the previous stage's output, the next stage's gradient.
        self.activation = bytearray(self.S * self.M)
        self.gradient = bytearray(self.S * self.M)
        self.sent: dict[tuple[type[Instruction], int, int], int] = {}
        # Weight gradients still to come on each device, by stage; forwards and backwards by device.
        self.weights_left = [dict.fromkeys(self.plan.stages_of(d), 0) for d in range(self.D)]
        for stage, row in enumerate(self.route):
            for device in row:
                self.weights_left[device][stage] += 1
        self.queues: dict[tuple[int, int], deque[tuple[Transfer, int]]] = {}
        self.at = [0] * self.D
        self.waits_for: list[int | None] = [None] * self.D  # sender that a receive waits for
        # Messages of each device that are not known to be taken: target, how many were sent to it
        # before, and the step; receives to come, and how many are posted of those from each peer.
        self.sends: list[deque[tuple[int, int, int]]] = [deque() for _ in range(self.D)]
        self.untaken: list[tuple[int, int, int] | None] = [None] * self.D
        self.counted: Counter[tuple[int, int]] = Counter()
        self.posted: Counter[tuple[int, int]] = Counter()
        receives = (RecvActivation, RecvGradient)
        self.to_post = [
            deque(i.peer for i in steps if isinstance(i, receives))
            for steps in program.instructions
        ]
        self.arrived: dict[int, set[int]] = {}  # slab -> devices at its reduction
        self.reduced: list[set[int]] = [set() for _ in range(self.D)]
        self.updated: list[set[int]] = [set() for _ in range(self.D)]
        self.normed: dict[int, set[int]] = {}
        self.at_norm: set[int] = set()
        self.past_norm = bytearray(self.D)
        self.device = 0
        self.step = 0
        self.ready: list[int] = list(range(self.D))[::-1]
        for device in range(self.D):
            for _ in range(POSTED):
                self.post(device)
        self.handlers: dict[type[Instruction], Callable[[Any], bool]] = {
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward,
            BackwardWeight: self.backward_weight,
            SendActivation: self.send,
            SendGradient: self.send,
            RecvActivation: self.receive,
            RecvGradient: self.receive,
            ReduceGradient: self.reduce,
            ScatterGradient: self.reduce,
            SquaredNorm: self.squared_norm,
            GlobalNorm: self.global_norm,
            UpdateOrSkip: self.update,
            GatherParameters: self.gather,
            Recut: self.recut,
            SendPiece: self.send_state,
            RecvPiece: self.receive_state,
            SendState: self.send_state,
            RecvState: self.receive_state,
            Drop: self.drop,
        }

    def run(self) -> None:
        handlers, lists, at = self.handlers, self.program.instructions, self.at
        while self.ready:
            self.device = device = self.ready.pop()
            steps = lists[device]
            step, end = at[device], len(steps)
            while step < end:
                self.step = step
                instruction = steps[step]
                handler = handlers.get(type(instruction))
                if handler is None:
                    self.fail("no device knows this instruction in a training program")
                if self.past_norm[device] and not isinstance(instruction, SlabOp):
                    self.fail("only updates and a switch may follow the global norm")
                if isinstance(instruction, Compute) and not self.taken(instruction.under_way):
                    break
                if not handler(instruction):
                    break
                step += 1
            at[device] = step
        self.finish()

    # -- computing -----------------------------------------------------------------------------

    def index(self, op: Compute | Transfer) -> int:
        if not (0 <= op.stage < self.S and 0 <= op.micro_batch < self.M):
            self.fail(f"there are only stages 0 to {self.S - 1}, micro-batches 0 to {self.M - 1}")
        return op.stage * self.M + op.micro_batch

    def here(self, op: Compute) -> int:
        """Index of an operation that must belong on this device."""
        index = self.index(op)
        if self.route[op.stage][op.micro_batch] != self.device:
            if self.device not in self.plan.stages[op.stage].group:
                self.fail(f"device {self.device} does not hold stage {op.stage}")
            self.fail(
                f"micro-batch {op.micro_batch} is routed to device"
                f" {self.route[op.stage][op.micro_batch]} for stage {op.stage}"
            )
        return index

    def forward(self, op: Forward) -> bool:
        index = self.here(op)
        if not self.switch.present(self.device, self.units_of(op.stage)):
            return False
        if self.state[index] != NOTHING:
            self.fail(f"a second forward of micro-batch {op.micro_batch} on stage {op.stage}")
        if op.stage and not self.activation[index]:
            self.fail(f"the output of stage {op.stage - 1} for micro-batch {op.micro_batch} is not"
                      f" on device {self.device} yet")  # fmt: skip
        before = self.before.get(op.micro_batch)
        if before is not None and self.state[op.stage * self.M + before] == NOTHING:
            self.fail(f"micro-batch {op.micro_batch} needs the keys and values of {before}, the"
                      " slice before it, which has not been forwarded")  # fmt: skip
        self.state[index] = FORWARDED
        if op.stage + 1 < self.S and self.route[op.stage + 1][op.micro_batch] == self.device:
            self.activation[index + self.M] = 1
        return True

    def backward(self, op: Backward | BackwardInput) -> bool:
        index = self.here(op)
        if not self.train:
            self.fail("a backward in a program that is forward only")
        state = self.state[index]
        if state == NOTHING:
            self.fail("backward before forward")
        if state != FORWARDED:
            self.fail(f"a second backward of micro-batch {op.micro_batch} on stage {op.stage}")
        if op.stage + 1 < self.S and not self.gradient[index]:
            self.fail(f"the gradient from stage {op.stage + 1} for micro-batch {op.micro_batch} is"
                      f" not on device {self.device} yet")  # fmt: skip
        after = self.after.get(op.micro_batch)
        if after is not None and self.state[op.stage * self.M + after] < HALF:
            self.fail(
                f"the gradient of keys and values of micro-batch {op.micro_batch} is not"
                f" whole: the backward of {after}, the slice after it, is not done"
            )
        if type(op) is Backward:
            self.state[index] = DONE
            self.weights_left[self.device][op.stage] -= 1
        else:
            self.state[index] = HALF
        if op.stage and self.route[op.stage - 1][op.micro_batch] == self.device:
            self.gradient[index - self.M] = 1
        return True

    def backward_weight(self, op: BackwardWeight) -> bool:
        index = self.here(op)
        if self.state[index] != HALF:
            self.fail("the weight half of a backward must come once, after its input half")
        self.state[index] = DONE
        self.weights_left[self.device][op.stage] -= 1
        return True

    # -- messages ------------------------------------------------------------------------------

    def ends(self, op: Transfer) -> tuple[int, int]:
        """Producing and consuming device of a message, by the routing."""
        step = 1 if type(op) in (SendActivation, RecvActivation) else -1
        if not 0 <= op.stage + step < self.S:
            self.fail(f"no stage takes what stage {op.stage} sends this way")
        return self.route[op.stage][op.micro_batch], self.route[op.stage + step][op.micro_batch]

    def send(self, op: SendActivation | SendGradient) -> bool:
        index = self.index(op)
        source, target = self.ends(op)
        if source != self.device or target != op.peer:
            self.fail(f"this message goes from device {source} to device {target} by the routing")
        if source == target:
            self.fail("no message is needed on one device")
        key = (type(op), op.stage, op.micro_batch)
        if key in self.sent:
            self.fail(f"sent a second time, first at step {self.sent[key]}")
        if self.state[index] < (FORWARDED if type(op) is SendActivation else HALF):
            self.fail("sent before it is computed")
        if op.tokens != self.tokens[op.micro_batch]:
            self.fail(f"the message has {op.tokens} tokens, micro-batch {op.micro_batch} has"
                      f" {self.tokens[op.micro_batch]}")  # fmt: skip
        self.sent[key] = self.step
        self.queues.setdefault((source, target), deque()).append((op, self.step))
        self.sends[source].append((target, self.counted[source, target], self.step))
        self.counted[source, target] += 1
        if self.waits_for[target] == source:
            self.waits_for[target] = None
            self.ready.append(target)
        return True

    def receive(self, op: RecvActivation | RecvGradient) -> bool:
        index = self.index(op)
        source, target = self.ends(op)
        if target != self.device or source != op.peer:
            self.fail(f"this message goes from device {source} to device {target} by the routing")
        if source == target:
            self.fail("no message is needed on one device")
        queue = self.queues.get((source, target))
        if not queue:
            self.waits_for[target] = source
            return False
        self.post(target)
        message, step = queue.popleft()
        wanted = SendActivation if type(op) is RecvActivation else SendGradient
        found = (type(message), message.stage, message.micro_batch)
        if found != (wanted, op.stage, op.micro_batch):
            self.fail(f"out of order: the next message from device {source} is its step {step},"
                      f" {message}")  # fmt: skip
        if message.tokens != op.tokens:
            size = "smaller" if op.tokens < message.tokens else "larger"
            self.fail(f"the receive is {size} than the message: {op.tokens} tokens against"
                      f" {message.tokens} (device {source}, step {step})")  # fmt: skip
        if wanted is SendActivation:
            self.activation[index + self.M] = 1
        else:
            self.gradient[index - self.M] = 1
        return True

    def post(self, device: int) -> None:
        """The next receive of a device's list is posted."""
        if not self.to_post[device]:
            return
        peer = self.to_post[device].popleft()
        if not 0 <= peer < self.D:
            return  # refused when it is waited for
        self.posted[peer, device] += 1
        untaken = self.untaken[peer]
        if untaken is not None and untaken[0] == device:
            self.ready.append(peer)

    def taken(self, under_way: int) -> bool:
        """Whether all but the last messages of this device can be taken."""
        sends = self.sends[self.device]
        while len(sends) > under_way:
            target, before, _ = sends[0]
            if self.posted[self.device, target] <= before:
                self.untaken[self.device] = sends[0]
                return False
            sends.popleft()
        self.untaken[self.device] = None
        return True

    # -- slabs ---------------------------------------------------------------------------------

    def held(self, slab: int) -> tuple[int, ...]:
        """Holders of a slab that this device must hold and have the whole gradient of."""
        if not self.train:
            self.fail("work on gradients in a program that is forward only")
        if not 0 <= slab < len(self.holders):
            self.fail(f"there are only slabs 0 to {len(self.holders) - 1}")
        if self.device not in self.holders[slab]:
            self.fail(f"device {self.device} does not hold slab {slab}")
        return self.holders[slab]

    def whole(self, slab: int) -> None:
        for stage in self.stages_of_slab[slab]:
            if self.weights_left[self.device].get(stage, 0):
                missing = next(
                    m
                    for m, device in enumerate(self.route[stage])
                    if device == self.device and self.state[stage * self.M + m] != DONE
                )
                self.fail(f"the gradient of slab {slab} is not whole: the backward of micro-batch"
                          f" {missing} on stage {stage} is not done")  # fmt: skip

    def reduce(self, op: ReduceGradient) -> bool:
        holders = self.held(op.slab)
        if self.device in self.arrived.get(op.slab, ()):
            if op.slab not in self.reduced[self.device]:
                if len(self.arrived[op.slab]) < len(holders):
                    return False
                self.reduced[self.device].add(op.slab)
                return True
            self.fail(f"slab {op.slab} is reduced a second time")
        if op.group != holders:
            self.fail(f"wrong group: slab {op.slab} is held by devices {_names(holders)}")
        if len(holders) < 2:
            self.fail(f"slab {op.slab} has one holder, nothing to reduce")
        if (type(op) is ScatterGradient) is not (op.slab in self.switch.scattered):
            rule = "only its own part" if op.slab in self.switch.scattered else "all of it"
            self.fail(f"each holder of slab {op.slab} needs the sum of {rule}")
        self.whole(op.slab)
        present = self.arrived.setdefault(op.slab, set())
        present.add(self.device)
        if len(present) < len(holders):
            return False
        self.ready.extend(d for d in holders if d != self.device)
        self.reduced[self.device].add(op.slab)
        return True

    def squared_norm(self, op: SquaredNorm) -> bool:
        if self.past_norm[self.device]:
            self.fail("a norm after the global norm")
        self.final(op.slab)
        counted = self.normed.setdefault(op.slab, set())
        if self.device in counted or (counted and op.slab not in self.switch.scattered):
            self.fail(f"the norm of slab {op.slab} is counted twice, first by device"
                      f" {min(counted)}")  # fmt: skip
        counted.add(self.device)
        return True

    def final(self, slab: int) -> None:
        """This device must have the gradient of the whole global batch."""
        holders = self.held(slab)
        if len(holders) > 1 and slab not in self.reduced[self.device]:
            self.fail(f"the gradient of slab {slab} is not reduced over devices {_names(holders)}")
        self.whole(slab)

    def global_norm(self, op: GlobalNorm) -> bool:
        device = self.device
        if device not in self.at_norm:
            self.complete()
            self.at_norm.add(device)
            if len(self.at_norm) == self.D:
                if self.train:
                    self.all_normed()
                self.ready.extend(d for d in range(self.D) if d != device)
        if len(self.at_norm) < self.D:
            return False
        self.past_norm[device] = 1
        return True

    def all_normed(self) -> None:
        for slab, holders in enumerate(self.holders):
            counted = self.normed.get(slab, set())
            if not counted:
                self.fail(f"no device has counted the norm of slab {slab}")
            if slab in self.switch.scattered and len(counted) < len(holders):
                self.fail(f"devices {_names(set(holders) - counted)} have not counted the norm of"
                          f" their parts of slab {slab}")  # fmt: skip

    def complete(self) -> None:
        """All that is routed to this device must be done before the global norm."""
        for stage in self.plan.stages_of(self.device):
            for micro_batch, device in enumerate(self.route[stage]):
                if device != self.device:
                    continue
                state = self.state[stage * self.M + micro_batch]
                name = f"of micro-batch {micro_batch} on stage {stage} is missing"
                if state == NOTHING:
                    self.fail(f"the forward {name}")
                if self.train and state != DONE:
                    self.fail(f"the {'weight half of the ' * (state == HALF)}backward {name}")
        if not self.train:
            return
        for slab, holders in enumerate(self.holders):
            if self.device in holders:
                self.final(slab)

    def update(self, op: UpdateOrSkip) -> bool:
        self.held(op.slab)
        if not self.past_norm[self.device]:
            self.fail("an update before the global norm")
        if op.slab in self.updated[self.device]:
            self.fail(f"slab {op.slab} is updated a second time")
        if not self.switch.update(self.device, op.slab):
            return False
        self.updated[self.device].add(op.slab)
        return True

    # -- a switch ------------------------------------------------------------------------------

    def gather(self, op: GatherParameters) -> bool:
        self.held(op.slab)
        self.switch.gather(self.device, op)
        return True

    def recut(self, op: Recut) -> bool:
        if self.past_norm[self.device]:
            self.fail("a slab is cut anew after the global norm")
        self.switch.recut(self.device, op)
        return True

    def send_state(self, op: SendState | SendPiece) -> bool:
        self.check_peer(op)
        self.wake(self.switch.send(self.device, op))
        return True

    def receive_state(self, op: RecvState | RecvPiece) -> bool:
        self.check_peer(op)
        self.wake(self.switch.receive(self.device, op, late=bool(self.past_norm[self.device])))
        return True

    def check_peer(self, op: StateOp | PieceOp) -> None:
        if not 0 <= op.peer < self.D or op.peer == self.device:
            self.fail(f"a state goes to another of the {self.D} devices")

    def wake(self, device: int | None) -> None:
        if device is not None:
            self.ready.append(device)

    def drop(self, op: Drop) -> bool:
        if not self.past_norm[self.device]:
            self.fail("a slab is dropped before the global norm")
        self.final(op.slab)
        return self.switch.drop(self.device, op.slab)

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Every list must have come to its end, with all updates.

        No message can be left over here: a send is refused unless one operation needs it, and
        that operation is refused without its receive.
        """
        lists = self.program.instructions
        for device in range(self.D):
            if self.at[device] == len(lists[device]) and not self.past_norm[device]:
                self.device, self.step = device, len(lists[device])
                self.fail("the list ends without a global norm")
        blocked = [d for d in range(self.D) if self.at[d] < len(lists[d])]
        if blocked:
            self.deadlock(blocked)
        if not self.train:
            return
        self.switch.finish()

    def deadlock(self, blocked: list[int]) -> NoReturn:
        """Name the device whose wait cannot end; if there is none, all wait for each other."""
        lists = self.program.instructions
        reasons, culprits = [], []
        for device in blocked:
            instruction = lists[device][self.at[device]]
            if isinstance(instruction, RecvActivation | RecvGradient):
                others = {instruction.peer}
                wanted = SendActivation if type(instruction) is RecvActivation else SendGradient
                here = (instruction.micro_batch, instruction.stage)
                never = not any(
                    type(step) is wanted and (step.micro_batch, step.stage) == here
                    for step in self.ahead(instruction.peer)
                )
                reason = f"waits for device {instruction.peer}"
                reason += ", which never sends it" if never else ""
            elif isinstance(instruction, ReduceGradient):
                others = set(instruction.group) - self.arrived[instruction.slab]
                never = any(instruction not in self.ahead(other) for other in others)
                reason = f"waits for devices {_names(others)} at the reduction"
                reason += ", which lack it" if never else ""
            elif isinstance(instruction, Compute) and (untaken := self.untaken[device]) is not None:
                target, _, sent = untaken
                others, message = {target}, lists[device][sent]
                assert isinstance(message, Transfer)
                takes = RecvActivation if isinstance(message, SendActivation) else RecvGradient
                here = (message.micro_batch, message.stage)
                never = not any(
                    type(step) is takes and (step.micro_batch, step.stage) == here
                    for step in self.ahead(target)
                )
                reason = f"waits for device {target} to take what it sent at step {sent}"
                reason += ", which it never receives" if never else ""
            elif not isinstance(instruction, GlobalNorm):
                slab, needed = self.switch.waits(device)
                others = set(needed)
                never = any(step not in self.ahead(peer) for peer, step in needed.items())
                sends = (SendState, SendPiece)
                verb = "send" if any(isinstance(n, sends) for n in needed.values()) else "take"
                reason = f"waits for devices {_names(others)} to {verb} the state of slab {slab}"
                reason += ", which never happens" if never else ""
            else:
                others, never = set(range(self.D)) - self.at_norm, False
                reason = f"waits for devices {_names(others)} at the global norm"
            if never:
                culprits.append(device)
            reasons.append(f"  device {device} at step {self.at[device]} ({instruction}) {reason}")
        # The culprit is never one that waits at the barrier for the others.
        culprits.extend(d for d in blocked if d not in self.at_norm)
        self.device = (culprits or blocked)[0]
        self.step = self.at[self.device]
        self.fail("deadlock:\n" + "\n".join(reasons), blocked)

    def ahead(self, device: int) -> tuple[Instruction, ...]:
        """What a device has not done yet."""
        return self.program.instructions[device][self.at[device] :]

    def fail(self, reason: str, devices: list[int] | None = None) -> NoReturn:
        """Raise with the device, the step and the lists around it."""
        steps = list(self.at)
        steps[self.device] = self.step
        instructions = self.program.instructions[self.device]
        what = str(instructions[self.step]) if self.step < len(instructions) else "end"
        shown = devices or self.neighbours()
        raise ProgramError(
            f"device {self.device}, step {self.step} ({what}): {reason}\n"
            + excerpt(self.program, steps, shown),
            self.device,
            self.step,
        )

    def stop(self, reason: str, device: int | None = None) -> NoReturn:
        """Fail; with ``device``, at the end of its list."""
        if device is not None:
            self.device, self.step = device, len(self.program.instructions[device])
        self.fail(reason)

    def units_of(self, stage: int) -> range:
        """The units of a stage."""
        return range(self.plan.stages[stage].start, self.plan.stages[stage].stop)

    def neighbours(self) -> list[int]:
        """The failing device and those that it exchanges messages with nearby."""
        found = {self.device}
        steps = self.program.instructions[self.device]
        for instruction in steps[max(0, self.step - 3) : self.step + 4]:
            if isinstance(instruction, Transfer) and 0 <= instruction.peer < self.D:
                found.add(instruction.peer)
        return sorted(found)


def _names(devices: tuple[int, ...] | set[int]) -> str:
    return ", ".join(map(str, sorted(devices)))
