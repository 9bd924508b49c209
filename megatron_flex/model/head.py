"""The output head: final norm, output layer, losses. GPT's and BERT's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import WORD_EMBEDDING, Block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Unit
from megatron_flex.model.loss import VocabularyPart, token_cross_entropy
from megatron_flex.model.megatron import (
    BertLMHead,
    ColumnLinear,
    Pooler,
    Ranks,
    transformer_config,
)
from megatron_flex.model.modules import layer_modules
from megatron_flex.model.tape import Linear, linear
from megatron_flex.model.tensor_cut import vocabulary_rows
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.model.tensor_regions import unite


class HeadBlock(Block):
    """Maps ``[T, 1, H]`` to the loss sums of the micro-batch, in the order of ``loss_names``.

    GPT: final norm and output layer. BERT adds the masked-language-model transform, a bias of the
    output layer and, with ``binary_head``, the sentence-order classifier on each first token.
    """

    def __init__(self, unit: Unit, config: ModelConfig, group: TensorGroup = SOLO) -> None:
        super().__init__(unit, config, group)
        mcore = transformer_config(config)
        bert = config.architecture == "bert"
        modules = layer_modules(config)
        norm = partial(
            modules.alone,
            config=modules.core(config),
            hidden_size=config.hidden_size,
            eps=config.norm_epsilon,
        )
        self.final_layernorm = norm()
        self.lm_head = BertLMHead(config.hidden_size, mcore) if bert else None
        if self.lm_head is not None:
            self.lm_head.dense = Linear(config.hidden_size, config.hidden_size)
            self.lm_head.layer_norm = norm()
        self.output_layer = ColumnLinear(
            config.hidden_size,
            config.padded_vocab_size,
            config=mcore,
            init_method=mcore.init_method,
            bias=bert,
            tp_group=Ranks(group),
        )
        first, self._rows = vocabulary_rows(config, group.index, group.size)
        self._part = VocabularyPart(group, first, config.vocab_size) if group.size > 1 else None
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

    def _logits(self, normed: Tensor, tokens: int | None = None) -> Tensor:
        """``[T, H] -> [T, vocabulary]``. The weight is cut, not the logits: no second buffer.

        Of the part of the vocabulary that is here, and of all ``tokens`` of the micro-batch.
        """
        x = normed if self.lm_head is None else self.lm_head(normed)
        layer = self.output_layer
        group = None if self._part is None else self.group
        return linear(x, layer.weight, layer.bias, rows=self._rows, group=group, tokens=tokens)

    def logits(self, hidden: Tensor, tokens: int | None = None) -> Tensor:
        """``[T, 1, H] -> [T, vocabulary]``, without the padded rows of the vocabulary.

        Of the part of the vocabulary that is here, and of all ``tokens`` of the micro-batch.
        """
        return self._logits(self.final_layernorm(hidden.squeeze(1)), tokens)

    def likeliest(self, hidden: Tensor, tokens: int) -> int:
        """The likeliest token after the last of ``tokens``, on every worker of the group."""
        group = self.group
        if not group.sequence_parallel:
            hidden, tokens = hidden[-1:], 1
        part = self.logits(hidden, tokens)[-1].double()
        if group.size == 1:
            return int(part.argmax())
        first = vocabulary_rows(self.config, group.index, group.size)[0]
        mine = part.new_full((1, 2), -torch.inf)
        if len(part):
            mine[0, 0], place = part.max(0)
            mine[0, 1] = first + place
        each = group.gather(mine)
        return int(each[each[:, 0].argmax(), 1])

    def token_losses(self, normed: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, H] -> [T]`` float32 language-model loss of each token, after the final norm.

        Weighted by the loss mask.
        """
        if batch.labels is None or batch.loss_mask is None:
            raise ValueError("the head needs the labels and the loss mask of the micro-batch")
        logits = self._logits(normed, len(batch.labels))
        return token_cross_entropy(logits, batch.labels, batch.loss_mask, self._part)

    def binary_logits(self, normed: Tensor, batch: PackedBatch) -> Tensor:
        """``[T, H] -> [samples, 2]`` logits of the sentence-order head, after the final norm."""
        if self.pooler is None or self.binary_head is None:
            raise ValueError("this model has no sentence-order head")
        context = self.context(batch, normed.device)
        if self.group.sequence_parallel:
            normed = unite(normed, self.group, context.tokens)
        first = normed.index_select(0, context.first_tokens)
        logits: Tensor = self.binary_head(self.pooler(first.unsqueeze(0)))
        return logits

    def forward(self, hidden: Tensor | None, batch: PackedBatch) -> Tensor:
        """``[T, 1, H]`` -> ``[number of losses]`` float32 sums over the micro-batch."""
        if hidden is None:
            raise ValueError("the head needs the hidden states of the unit before it")
        normed = self.final_layernorm(hidden.squeeze(1))
        losses = self.token_losses(normed, batch).sum(dim=0, keepdim=True)
        if self.binary_head is None:
            return losses
        if batch.sentence_order is None:
            raise ValueError("the sentence-order head needs a target for each sample")
        # As in Megatron, -1 marks a sample without a target.
        order = cross_entropy(
            self.binary_logits(normed, batch).float(),
            batch.sentence_order,
            ignore_index=-1,
            reduction="sum",
        )
        return torch.cat([losses, order.view(1)])
