"""The same GPT as its users write it in plain PyTorch, and PyTorch's own ways to train it.

A stage is a range of units as in our plans, of whole layers; parameters have the shapes and initial
values of ours, so that losses can be compared. Micro-batches are rectangles: shorter samples are
padded, and padding has no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.model.blocks import build_block
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize

NO_LOSS = -100
CPU = torch.device("cpu")


class Layer(nn.Module):
    """A transformer layer with the norms before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.ffn_hidden_size
        self.heads = config.num_attention_heads
        self.input_layernorm = nn.LayerNorm(hidden, config.norm_epsilon)
        self.linear_qkv = nn.Linear(hidden, 3 * hidden)
        self.linear_proj = nn.Linear(hidden, hidden)
        self.pre_mlp_layernorm = nn.LayerNorm(hidden, config.norm_epsilon)
        self.linear_fc1 = nn.Linear(hidden, inner)
        self.linear_fc2 = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, H] -> [B, T, H]``."""
        batch, tokens, hidden = x.shape
        qkv = self.linear_qkv(self.input_layernorm(x))
        # A head's query, key and value are neighbours, as in Megatron.
        q, k, v = qkv.view(batch, tokens, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear_proj(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.linear_fc2(F.gelu(self.linear_fc1(self.pre_mlp_layernorm(x))))


class PlainStage(nn.Module):
    """Units ``[start, stop)``: embeddings, whole layers, final norm and output layer."""

    def __init__(self, config: ModelConfig, stage: Stage) -> None:
        super().__init__()
        hidden, last = config.hidden_size, config.layers.num_units - 1
        units = config.layers.units[stage.start : stage.stop]
        numbers = sorted({u.layer for u in units if u.layer is not None})
        self.word_embeddings: nn.Module | None = None
        self.output_layer: nn.Module | None = None
        if stage.start == 0:
            self.word_embeddings = nn.Embedding(config.padded_vocab_size, hidden)
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.layers = nn.ModuleDict({str(n): Layer(config) for n in numbers})
        if stage.stop == last + 1:
            self.final_layernorm = nn.LayerNorm(hidden, config.norm_epsilon)
            self.output_layer = nn.Linear(hidden, config.padded_vocab_size, bias=False)
        values = {}
        for unit in units:
            block = build_block(unit, config)
            for full, local in block.full_names().items():
                values[_plain_name(full)] = block.get_parameter(local)
        self.load_state_dict(values)

    def forward(self, x: Tensor) -> Tensor:
        """Of the first stage ``[B, T]`` tokens; of the last to ``[B, T, vocabulary]``."""
        if self.word_embeddings is not None:
            positions = torch.arange(x.shape[1])
            x = self.word_embeddings(x) + self.position_embeddings(positions)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output_layer is None else self.output_layer(self.final_layernorm(x))


def _plain_name(full: str) -> str:
    for room in ("decoder.", "embedding.", "self_attention.", "mlp."):
        full = full.replace(room, "")
    return full


class Rectangles:
    """Padded inputs and targets of a batch's samples."""

    def __init__(self, source: BatchSource, batch: GlobalBatch, samples: Sequence[int]) -> None:
        first, lengths = batch.first_sample, batch.lengths.tolist()
        whole = MicroBatch(tuple(Slice.all_of(first + i, lengths[i]) for i in samples))
        packed = source.packed(whole, inputs=True, targets=True)
        assert packed.tokens is not None
        assert packed.labels is not None
        assert packed.loss_mask is not None
        labels = packed.labels.where(packed.loss_mask > 0, NO_LOSS)
        self.inputs = pad_sequence(packed.tokens.split(packed.lengths), batch_first=True)
        self.targets = pad_sequence(
            labels.split(packed.lengths), batch_first=True, padding_value=NO_LOSS
        )


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Over real tokens."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LOSS, reduction="sum"
    )


class Trainer:
    """AdamW with clipped gradients, over modules of which no other worker has the parameters."""

    def __init__(self, modules: Sequence[nn.Module], step: StepSize, *, replicas: bool) -> None:
        config = OptimizerConfig()
        parameters = [p for module in modules for p in module.parameters()]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": step.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._parameters, self._clip, self._replicas = parameters, config.clip_grad, replicas
        self._adamw = torch.optim.AdamW(
            groups,
            lr=step.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def update(self) -> None:
        """Clip by the norm of all workers' gradients, and step."""
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if not self._replicas:
            norm = norm.square()
            dist.all_reduce(norm)
            norm = norm.sqrt()
        nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        self._adamw.step()
        self._adamw.zero_grad()


class Pipelined:
    """torch.distributed.pipelining: all micro-batches of a batch are as long as its longest."""

    def __init__(self, config: ModelConfig, plan: Plan, rank: int, step: StepSize) -> None:
        self._rank, self._count = rank, len(plan.stages)
        self._mine = {
            number: PlainStage(config, stage)
            for number, stage in enumerate(plan.stages)
            if rank in stage.group
        }
        self._trainer = Trainer(list(self._mine.values()), step, replicas=False)
        self._schedules: dict[tuple[int, int], _PipelineSchedule] = {}
        self._tokens = 1

    @property
    def modules(self) -> list[nn.Module]:
        """What this worker holds."""
        return list(self._mine.values())

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(logits, targets) / self._tokens

    def schedule(self, micro_batches: int, longest: int) -> _PipelineSchedule:
        """The schedule for one shape: its buffers are made for it."""
        key = micro_batches, longest
        if key not in self._schedules:
            stages: list[_PipelineStageBase] = [
                PipelineStage(m, n, self._count, CPU) for n, m in self._mine.items()
            ]
            self._schedules[key] = (
                Schedule1F1B(stages[0], micro_batches, self._loss, scale_grads=False)
                if self._count == dist.get_world_size()
                else ScheduleZBVZeroBubble(stages, micro_batches, self._loss, scale_grads=False)
            )
        return self._schedules[key]

    def train(self, batch: Rectangles, tokens: int, micro_batches: int) -> float:
        """One iteration; this worker's part of the loss."""
        self._tokens = tokens
        schedule = self.schedule(micro_batches, batch.inputs.shape[1])
        first, last = 0 in self._mine, self._count - 1 in self._mine
        losses: list[Tensor] = []
        schedule.step(
            *([batch.inputs] if first else []),
            target=batch.targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        self._trainer.update()
        return float(sum(loss.item() for loss in losses))


class Replicated:
    """DistributedDataParallel: samples sorted, each micro-batch as long as its own longest."""

    def __init__(self, config: ModelConfig, rank: int, step: StepSize) -> None:
        whole = PlainStage(config, Stage(0, config.layers.num_units, (rank,)))
        self._model = DistributedDataParallel(whole)
        self._trainer = Trainer([whole], step, replicas=True)
        self._workers = dist.get_world_size()

    def train(self, batch: Sequence[Rectangles], tokens: int) -> float:
        """One iteration over this worker's micro-batches; its part of the loss."""
        total = 0.0
        for number, part in enumerate(batch):
            self._model.require_backward_grad_sync = number == len(batch) - 1
            loss = loss_sum(self._model(part.inputs), part.targets) / tokens
            (loss * self._workers).backward()  # gradients are averaged
            total += loss.item()
        self._trainer.update()
        return total
