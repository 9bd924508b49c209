"""Our layer list against megatron-core's BertModel with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import loss_names
from megatron_flex.model.head import HeadBlock
from tests.close import assert_close, assert_numbers_close
from tests.unit.model import reference
from tests.unit.model.support import (
    build_model,
    hidden_states,
    make_batch,
    make_bert,
    named_parameters,
    run,
    split_batch,
)

GRID: dict[str, dict[str, Any]] = {
    "both heads": {},
    "without the binary head": {"binary_head": False, "num_tokentypes": 0},
    "untied": {"untie_embeddings_and_output_weights": True},
    "rope": {"position_embedding_type": "rope"},
    "no bias": {"add_bias_linear": False},
}


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with reference.model_parallel(tmp_path_factory.mktemp("store")), reference.rotary_on_cpu():
        yield


def call(model: torch.nn.Module, part: PackedBatch, types: bool, labels: bool) -> Any:
    """``BertModel`` on one unpacked sample: (logits or losses, binary logits or None)."""
    assert part.tokens is not None
    assert part.token_types is not None
    assert part.labels is not None
    return model(
        part.tokens[None],
        torch.ones(1, len(part.tokens)),
        tokentype_ids=part.token_types[None] if types else None,
        lm_labels=part.labels[None] if labels else None,
    )


@pytest.mark.parametrize("changes", GRID.values(), ids=GRID.keys())
@pytest.mark.parametrize("lengths", [(17,), (5, 1, 23, 9)], ids=["one sample", "packed"])
def test_logits_losses_and_gradients_equal_bertmodel(
    changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    config = make_bert(**changes)
    blocks = build_model(config)
    ours = named_parameters(blocks)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ours.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model = reference.bert_model(config)
    theirs = reference.copy_weights(ours, model)
    batch = make_batch(lengths, config)
    types = config.num_tokentypes > 0

    head = blocks[-1]
    assert isinstance(head, HeadBlock)
    hidden = hidden_states(blocks, batch)
    results = [call(model, part, types, labels=False) for part in split_batch(batch)]
    expected = torch.cat([logits[0] for logits, _ in results])
    assert_close(head.logits(hidden), expected, 3e-6)
    if config.binary_head:
        binary = torch.cat([logits for _, logits in results])
        normed = head.final_layernorm(hidden.squeeze(1))
        assert_close(head.binary_logits(normed, batch), binary, 7e-6)

    losses = run(blocks, batch)
    assert losses.shape == (len(loss_names(config)),)
    # Denominators of their own, as in training.
    weights = torch.tensor([1.0 / 31, 1.0 / 4])[: len(losses)]
    losses.backward(weights)
    totals = torch.zeros(len(losses))
    for part in split_batch(batch):
        lm, order = call(model, part, types, labels=True)
        totals[0] = totals[0] + (lm[0] * part.loss_mask).sum()
        if config.binary_head:
            assert part.sentence_order is not None
            totals[1] = totals[1] + torch.nn.functional.cross_entropy(order, part.sentence_order)
    totals.backward(weights)
    assert_numbers_close(losses.tolist(), totals.tolist(), 6e-6)
    for name, parameter in ours.items():
        grad = theirs[name].grad
        assert parameter.grad is not None, name
        assert grad is not None, name
        # That of the sentence order's bias is a difference of nearly equal sums.
        assert_close(parameter.grad, grad, 1e-5, name, least=0.1)


def test_a_sample_without_sentence_order_has_no_sop_loss() -> None:
    config = make_bert()
    blocks = build_model(config)
    batch = make_batch((5, 8), config)
    parts = split_batch(batch)
    assert batch.sentence_order is not None
    batch.sentence_order[0] = -1
    assert_close(run(blocks, batch)[1], run(blocks, parts[1])[1], 1e-6)
