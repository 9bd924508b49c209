"""Our layer list against megatron-core's GPTModel with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.head import HeadBlock
from tests.close import assert_close
from tests.unit.model import reference
from tests.unit.model.support import (
    build_model,
    hidden_states,
    make_batch,
    make_config,
    named_parameters,
    run,
    split_batch,
)

GRID: dict[str, dict[str, Any]] = {
    "absolute, tied": {},
    "absolute, untied": {"untie_embeddings_and_output_weights": True},
    "rope": {"position_embedding_type": "rope"},
    "rope on half the channels": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_base": 500,
    },
    "rope, scaled": {
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "kv_channels": 16,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
    },
    "no positions": {"position_embedding_type": "none"},
    "grouped queries": {"num_query_groups": 2},
    "one query group, untied, rope": {
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "swiglu without bias": {"swiglu": True, "add_bias_linear": False},
    "RMSNorm": {"normalization": "RMSNorm", "norm_epsilon": 1e-6},
    "query and key norms": {"qk_layernorm": True},
    "a Llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
    },
    "wide heads": {"kv_channels": 24},
    "GELU by tanh": {"openai_gelu": True},
    "a bias for queries, keys and values alone": {"add_bias_linear": False, "add_qkv_bias": True},
}


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with reference.model_parallel(tmp_path_factory.mktemp("store")), reference.rotary_on_cpu():
        yield


def logits_of(model: torch.nn.Module, part: PackedBatch) -> torch.Tensor:
    """``GPTModel``'s logits of one unpacked sample, ``[length, padded vocabulary]``."""
    assert part.tokens is not None
    positions = torch.arange(len(part.tokens))[None]
    return model(part.tokens[None], positions, attention_mask=None)[0]


def randomize(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Biases and norms too, so that each takes part."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("changes", GRID.values(), ids=GRID.keys())
@pytest.mark.parametrize("lengths", [(17,), (5, 1, 23, 9)], ids=["one sample", "packed"])
def test_logits_losses_and_gradients_equal_gptmodel(
    changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    config = make_config(**changes)
    blocks = build_model(config)
    ours = named_parameters(blocks)
    randomize(ours)
    model = reference.gpt_model(config)
    theirs = reference.copy_weights(ours, model)
    batch = make_batch(lengths, config)
    assert batch.labels is not None
    assert batch.loss_mask is not None

    head = blocks[-1]
    assert isinstance(head, HeadBlock)
    hidden = hidden_states(blocks, batch)
    expected = torch.cat([logits_of(model, part) for part in split_batch(batch)])
    assert_close(head.logits(hidden), expected, 3e-6)

    loss = run(blocks, batch)
    loss.backward()
    total = reference.gpt_loss(model, batch)
    total.backward()
    assert loss.shape == (1,)
    assert_close(loss[0], total, 2e-6)
    for name, parameter in ours.items():
        theirs_grad = theirs[name].grad
        assert parameter.grad is not None, name
        assert theirs_grad is not None, name
        if name.endswith("k_layernorm.bias"):
            # It adds the same to all scores of a query: zero in theory and noise in practice.
            assert parameter.grad.norm() < 1e-5
        else:
            assert_close(parameter.grad, theirs_grad, 1e-5, name)


def test_padded_vocabulary_rows_stay_out_of_the_loss() -> None:
    config: ModelConfig = make_config(vocab_size=50, padded_vocab_size=64)
    blocks = build_model(config)
    ours = named_parameters(blocks)
    model = reference.gpt_model(config)
    reference.copy_weights(ours, model)
    batch = make_batch((11, 6), config)
    assert batch.labels is not None
    assert batch.loss_mask is not None
    logits = torch.cat([logits_of(model, part) for part in split_batch(batch)])[:, :50]
    losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
    loss = run(blocks, batch)
    assert_close(loss[0], (losses * batch.loss_mask).sum(), 1e-6)
    loss.backward()
    grad = ours["embedding.word_embeddings.weight"].grad
    assert grad is not None
    assert torch.count_nonzero(grad[50:]) == 0
    assert torch.count_nonzero(grad[:50]) > 0
