"""GPT and BERT in plain PyTorch and float64, and AdamW beside them: what training should compute.

Written from the formulas, one sample at a time, with nothing of the package but the names of
parameters. Without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_flex.data.packed import PackedBatch
    from megatron_flex.model.config import ModelConfig

Weights = Mapping[str, Tensor]


def norm(w: Weights, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension."""
    weight = w[f"{name}.weight"] + (1.0 if config.apply_layernorm_1p else 0.0)
    if config.normalization == "RMSNorm":
        scale = (x.square().mean(-1, keepdim=True) + config.norm_epsilon).rsqrt()
        return x * scale * weight
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    return x * weight + w[f"{name}.bias"]


def dense(w: Weights, name: str, x: Tensor) -> Tensor:
    """A linear layer, with a bias if it has one."""
    y = x @ w[f"{name}.weight"].T
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias


def gelu(x: Tensor) -> Tensor:
    """The exact form, by the error function."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def rotated(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotary positions on ``[tokens, heads, channels]``; halves are paired, as in GPT-NeoX."""
    width = int(x.shape[2] * config.rotary_percent)
    inverse = config.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
    a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attention(w: Weights, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    """Grouped-query attention of one sample; a group's rows are its queries, its key, its value."""
    groups, depth = config.num_query_groups, config.kv_channels
    share = config.num_attention_heads // groups
    qkv = dense(w, f"{name}.linear_qkv", x).view(len(x), groups, share + 2, depth)
    outputs = []
    for group in range(groups):
        q, k = qkv[:, group, :share], qkv[:, group, share : share + 1]
        if config.qk_layernorm:
            q, k = (norm(w, f"{name}.{n}_layernorm", y, config) for n, y in (("q", q), ("k", k)))
        if config.position_embedding_type == "rope":
            q, k = rotated(q, config), rotated(k, config)
        for head in range(share):
            scores = q[:, head] @ k[:, 0].T / math.sqrt(depth)
            if config.causal:
                allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
                scores = torch.where(allowed, scores, -torch.inf)
            outputs.append(scores.softmax(-1) @ qkv[:, group, share + 1])
    return dense(w, f"{name}.linear_proj", torch.cat(outputs, dim=-1))


def mlp(w: Weights, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    """Two linear layers with gelu or SwiGLU between them."""
    x = dense(w, f"{name}.linear_fc1", x)
    if config.swiglu:
        gate, value = x.chunk(2, dim=-1)
        return dense(w, f"{name}.linear_fc2", gate * gate.sigmoid() * value)
    return dense(w, f"{name}.linear_fc2", gelu(x))


def sample_losses(
    w: Weights,
    config: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    types: Tensor | None,
    order: int | None,
) -> list[Tensor]:
    """Sums of all losses of one sample."""
    words = w["embedding.word_embeddings.weight"]
    x = words[tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: len(tokens)]
    if config.num_tokentypes:
        assert types is not None
        x = x + w["embedding.tokentype_embeddings.weight"][types]
    bert = config.architecture == "bert"
    stack = "encoder" if bert else "decoder"
    for layer in range(config.num_layers):
        at = f"{stack}.layers.{layer}"
        x = x + attention(
            w, f"{at}.self_attention", norm(w, f"{at}.input_layernorm", x, config), config
        )
        x = x + mlp(w, f"{at}.mlp", norm(w, f"{at}.pre_mlp_layernorm", x, config), config)
    x = norm(w, f"{stack}.final_layernorm", x, config)
    y = x
    if bert:
        y = norm(w, "lm_head.layer_norm", gelu(dense(w, "lm_head.dense", x)), config)
    output = w.get("output_layer.weight", words)
    logits = y @ output.T
    if bert:
        logits = logits + w["output_layer.bias"]
    logits = logits[:, : config.vocab_size]
    losses = [-(logits.log_softmax(-1)[torch.arange(len(tokens)), labels] * mask).sum()]
    if config.binary_head:
        pooled = torch.tanh(dense(w, "pooler.dense", x[0]))
        classes = dense(w, "binary_head", pooled).log_softmax(-1)
        losses.append(-classes[order] if order in (0, 1) else 0.0 * classes.sum())
    return losses


def loss_sums(w: Weights, config: ModelConfig, batch: PackedBatch) -> list[Tensor]:
    """Sums of all losses of a packed micro-batch, as if its samples came one by one."""
    assert batch.tokens is not None
    assert batch.labels is not None
    assert batch.loss_mask is not None
    sums: list[Tensor] = []
    first = 0
    for number, length in enumerate(batch.lengths):
        rows = slice(first, first + length)
        losses = sample_losses(
            w,
            config,
            batch.tokens[rows],
            batch.labels[rows],
            batch.loss_mask[rows].double(),
            None if batch.token_types is None else batch.token_types[rows],
            None if batch.sentence_order is None else int(batch.sentence_order[number]),
        )
        sums = [a + b for a, b in zip(sums, losses, strict=True)] if sums else losses
        first += length
    return sums


@dataclass(frozen=True)
class Step:
    """What an iteration gives: means of all losses, and the norm of the gradient unclipped."""

    losses: tuple[float, ...]
    grad_norm: float


class Training:
    """AdamW with clipping by the global norm, all in float64.

    Attributes:
        weights, exp_avg, exp_avg_sq: by parameter name.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self.weights = {n: t.detach().double().clone() for n, t in weights.items()}
        self.exp_avg = {n: torch.zeros_like(t) for n, t in self.weights.items()}
        self.exp_avg_sq = {n: torch.zeros_like(t) for n, t in self.weights.items()}
        self.updates = 0

    def means(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Means of all losses over all their targets in ``batches``: tokens, and then samples."""
        sums = [loss_sums(self.weights, self._config, b) for b in batches]
        counts = [sum(float(b.loss_mask.sum()) for b in batches if b.loss_mask is not None)]
        if self._config.binary_head:
            orders = [b.sentence_order for b in batches if b.sentence_order is not None]
            counts.append(float(sum(int((o >= 0).sum()) for o in orders)))
        columns = zip(*sums, strict=True)
        return [torch.stack(list(s)).sum() / n for s, n in zip(columns, counts, strict=True)]

    def step(
        self,
        batches: Sequence[PackedBatch],
        *,
        learning_rate: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float,
        clip_grad: float,
    ) -> Step:
        """One iteration on a global batch."""
        for tensor in self.weights.values():
            tensor.requires_grad_()
        means = self.means(batches)
        found = torch.autograd.grad(sum(means, torch.zeros(())), list(self.weights.values()))
        gradients = dict(zip(self.weights, found, strict=True))
        total = math.sqrt(sum(float(g.square().sum()) for g in found))
        self.updates += 1
        for name, g in gradients.items():
            w, g = self.weights[name].detach(), g * min(1.0, clip_grad / total)
            m = self.exp_avg[name] = beta1 * self.exp_avg[name] + (1 - beta1) * g
            v = self.exp_avg_sq[name] = beta2 * self.exp_avg_sq[name] + (1 - beta2) * g * g
            # Biases and norms are not decayed.
            decay = weight_decay if w.dim() > 1 else 0.0
            m, v = m / (1 - beta1**self.updates), v / (1 - beta2**self.updates)
            self.weights[name] = w - learning_rate * (m / (v.sqrt() + eps) + decay * w)
        return Step(tuple(float(x.detach()) for x in means), total)
