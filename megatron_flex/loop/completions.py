"""Completions of prompts during a run, on the plan that trains: no worker needs the whole model.

Every prompt goes through the stages as a micro-batch does, token by token, and prompts follow each
other through the pipeline. Each stage's worker keeps the keys and values of its own units. The
prompts are dealt to the replicas of a stage. After each token all workers learn what was chosen, so
they end together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.decode import Completion, Growing, Stops, ended, room
from megatron_flex.model.head import HeadBlock
from megatron_flex.model.layers import Kind
from megatron_flex.model.megatron import DTYPES
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.channel import Message
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.world import World, explain


class _Stages:
    """This worker's part of the pipeline."""

    def __init__(self, world: World, holdings: Holdings, plan: Plan) -> None:
        self._world, self._holdings, self._plan = world, holdings, plan
        self._sent: list[tuple[str, Tensor, Message]] = []

    def _runner(self, stage: int, prompt: int) -> int:
        group = self._plan.stages[stage].group
        return group[prompt % len(group)]

    def runs(self, prompt: int) -> bool:
        """Whether a stage of this worker completes that prompt."""
        mine = range(len(self._plan.stages))
        return any(self._runner(stage, prompt) == self._world.rank for stage in mine)

    def forward(self, prompt: int, batch: PackedBatch) -> int | None:
        """This worker's stages of one step; the likeliest token where the last stage is."""
        stages, rank = self._plan.stages, self._world.rank
        hidden: Tensor | None = None
        for number, stage in enumerate(stages):
            if self._runner(number, prompt) != rank:
                continue
            if number and (source := self._runner(number - 1, prompt)) != rank:
                hidden = self._receive(number, prompt, source, batch.num_tokens)
            for unit in range(stage.start, stage.stop):
                block = self._holdings.blocks[unit]
                if block.unit.kind is Kind.HEAD:
                    assert isinstance(block, HeadBlock)
                    assert hidden is not None
                    return block.likeliest(hidden, batch.num_tokens)
                hidden = block(hidden, batch)
            assert hidden is not None
            if (target := self._runner(number + 1, prompt)) != rank:
                self._send(number, prompt, target, hidden)
        return None

    def _receive(self, stage: int, prompt: int, source: int, tokens: int) -> Tensor:
        config = self._holdings.config
        buffer = torch.empty(
            self._world.tensor.rows(tokens), 1, config.hidden_size,
            dtype=DTYPES[config.params_dtype], device=self._world.device,
        )  # fmt: skip
        assert self._world.pipeline is not None
        with explain(f"prompt {prompt} before stage {stage}", self._world):
            self._world.pipeline.receive(buffer, source).wait(self._world.timeout)
        return buffer

    def _send(self, stage: int, prompt: int, target: int, hidden: Tensor) -> None:
        what, hidden = f"prompt {prompt} after stage {stage}", hidden.contiguous()
        assert self._world.pipeline is not None
        with explain(what, self._world):
            self._sent.append((what, hidden, self._world.pipeline.send(hidden, target)))

    def agree(self, chosen: Tensor) -> list[int]:
        """All workers' choices, each of which one has made; what was sent has arrived."""
        if self._world.control is not None:
            with explain("the tokens that were chosen", self._world):
                dist.all_reduce(chosen, group=self._world.control)
        for what, _, work in self._sent:
            with explain(what, self._world):
                work.wait(self._world.timeout)
        self._sent.clear()
        found: list[int] = chosen.tolist()
        return found


@torch.no_grad()
def complete_all(
    world: World,
    holdings: Holdings,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    stops: Stops,
) -> list[Completion]:
    """The likeliest completions of all prompts, on every worker; all workers call this together.

    Args:
        world: all workers.
        holdings: what this worker holds under ``plan``; nothing of it is on its way.
        plan: of the model.
        prompts: token ids.
        tokens: made for each at most.
        stops: see :data:`megatron_flex.model.decode.Stops`.
    """
    holdings.train(False)
    most = [room(holdings.config, len(prompt), tokens) for prompt in prompts]
    stages = _Stages(world, holdings, plan)
    samples = {
        number: Growing(number, len(prompt) + most[number] - 1)
        for number, prompt in enumerate(prompts)
        if stages.runs(number)
    }
    made: list[list[int]] = [[] for _ in prompts]
    stop = [0] * len(prompts)
    open_ = list(range(len(prompts)))
    while open_:
        chosen = torch.zeros(len(prompts), dtype=torch.int64)
        for number in open_:
            if number not in samples:
                continue
            given = torch.tensor(made[number][-1:] or list(prompts[number]))
            batch = samples[number].next(len(given), given.to(world.device))
            token = stages.forward(number, batch)
            if token is not None and world.tensor.index == 0:
                chosen[number] = token
        for number, token in enumerate(stages.agree(chosen)):
            if number in open_:
                made[number].append(token)
                stop[number] = ended(made[number], stops)
        open_ = [n for n in open_ if not stop[n] and len(made[n]) < most[n]]
    return [Completion(tuple(m), s) for m, s in zip(made, stop, strict=True)]
