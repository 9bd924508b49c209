"""The output head: final norm, output layer, losses. GPT's and BERT's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import WORD_EMBEDDING, Block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Unit
from megatron_flex.model.loss import token_cross_entropy
from megatron_flex.model.megatron import (
    BertLMHead,
    ColumnLinear,
    Pooler,
    SoloGroup,
    WrappedTorchNorm,
    transformer_config,
)
from megatron_flex.model.tape import Linear, linear


class HeadBlock(Block):
    """Maps ``[T, 1, H]`` to the loss sums of the micro-batch, in the order of ``loss_names``.

    GPT: final norm and output layer. BERT adds the masked-language-model transform, a bias of the
    output layer and, with ``binary_head``, the sentence-order classifier on each first token.
    """

    def __init__(self, unit: Unit, config: ModelConfig) -> None:
        super().__init__(unit, config)
        mcore = transformer_config(config)
        bert = config.architecture == "bert"
        self.final_layernorm = WrappedTorchNorm(mcore, config.hidden_size, eps=config.norm_epsilon)
        self.lm_head = BertLMHead(config.hidden_size, mcore) if bert else None
        if self.lm_head is not None:
            self.lm_head.dense = Linear(config.hidden_size, config.hidden_size)
        self.output_layer = ColumnLinear(
            config.hidden_size,
            config.padded_vocab_size,
            config=mcore,
            init_method=mcore.init_method,
            bias=bert,
            tp_group=SoloGroup(),
        )
        self.pooler = self.binary_head = None
        if config.binary_head:
            self.pooler = Pooler(config.hidden_size, mcore.init_method, mcore)
            self.pooler.dense = Linear(config.hidden_size, config.hidden_size)
            self.binary_head = Linear(config.hidden_size, 2)

    def full_names(self) -> dict[str, str]:
        """Megatron's names; the final norm belongs to the stack of layers."""
        names = {}
        for local, _ in self.named_parameters():
            if local == "output_layer.weight" and self.config.layers.tied:
                names[WORD_EMBEDDING] = local
            elif local.startswith("final_layernorm."):
                names[f"{self.stack}.{local}"] = local
            else:
                names[local] = local
        return names

    def _logits(self, normed: Tensor) -> Tensor:
        """``[T, H] -> [T, vocabulary]``. The weight is cut, not the logits: no second buffer."""
        x = normed if self.lm_head is None else self.lm_head(normed)
        layer = self.output_layer
        return linear(x, layer.weight, layer.bias, rows=self.config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, 1, H] -> [T, vocabulary]``, without the padded rows of the vocabulary."""
        return self._logits(self.final_layernorm(hidden.squeeze(1)))

    def _token_losses(self, normed: Tensor, batch: PackedBatch) -> Tensor:
        if batch.labels is None or batch.loss_mask is None:
            raise ValueError("the head needs the labels and the loss mask of the micro-batch")
        return token_cross_entropy(self._logits(normed), batch.labels, batch.loss_mask)

    def token_losses(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """``[T]`` float32 language-model loss of each token, weighted by the loss mask."""
        return self._token_losses(self.final_layernorm(hidden.squeeze(1)), batch)

    def binary_logits(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, 1, H] -> [samples, 2]`` logits of the sentence-order head."""
        return self._binary_logits(self.final_layernorm(hidden.squeeze(1)), batch)

    def _binary_logits(self, normed: Tensor, batch: PackedBatch) -> Tensor:
        if self.pooler is None or self.binary_head is None:
            raise ValueError("this model has no sentence-order head")
        first = normed.index_select(0, self.context(batch, normed.device).first_tokens)
        logits: Tensor = self.binary_head(self.pooler(first.unsqueeze(0)))
        return logits

    def forward(self, hidden: Tensor | None, batch: PackedBatch) -> Tensor:
        """``[T, 1, H]`` -> ``[number of losses]`` float32 sums over the micro-batch."""
        if hidden is None:
            raise ValueError("the head needs the hidden states of the unit before it")
        normed = self.final_layernorm(hidden.squeeze(1))
        losses = self._token_losses(normed, batch).sum(dim=0, keepdim=True)
        if self.binary_head is None:
            return losses
        if batch.sentence_order is None:
            raise ValueError("the sentence-order head needs a target for each sample")
        # As in Megatron, -1 marks a sample without a target.
        order = cross_entropy(
            self._binary_logits(normed, batch).float(),
            batch.sentence_order,
            ignore_index=-1,
            reduction="sum",
        )
        return torch.cat([losses, order.view(1)])
