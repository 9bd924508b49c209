"""Flags of Transformer Engine's layers, of fp8 and of aligned micro-batches."""

from __future__ import annotations

import pytest

from megatron_flex.loop.cutting import run_cut
from megatron_flex.planner.flops import cost_coefficients
from tests.unit.config.commands import config, refusal

ENGINE = "--transformer-impl transformer_engine"
FP8 = (
    f"{ENGINE} --bf16 --fp8-format hybrid --micro-batch-tokens 4096 --seq-length 1024"
    " --hidden-size 128"
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--fp8-format e4m3 --bf16", "needs Transformer Engine: add --transformer-impl"),
        (f"{ENGINE} --fp8-format e4m3", "--fp8-format e4m3 needs --bf16"),
        ("--fp8-recipe mxfp8", "no effect without --fp8-format"),
        (f"{FP8} --fp8-recipe delayed", "would depend on the plan"),
        (f"{FP8} --fp8-recipe custom", "use tensorwise, blockwise or mxfp8"),
        (f"{FP8} --fp8-recipe blockwise --hidden-size 192 --num-attention-heads 3",
         "widths that are multiples of 128, but --hidden-size is 192"),
        (f"{FP8} --fp8-recipe blockwise --flexpipe-align-tokens 64", "is no multiple of 128"),
        (f"{FP8} --fp8-recipe blockwise --micro-batch-tokens 100",
         "--micro-batch-tokens 100 is less than --fp8-recipe blockwise"),
        ("--flexpipe-align-tokens 4096", "but there are --max-position-embeddings"),
        ("--flexpipe-align-tokens 8 --flexpipe-slice-tokens 4", "-slice-tokens 4 is less"),
        ("--flexpipe-align-tokens 0", "must be at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(more: str, message: str) -> None:
    assert message in refusal(more)


def test_dynapipe_is_not_aligned() -> None:
    more = "--flexpipe-batching dynapipe --flexpipe-align-tokens 8"
    assert "fills a worker's memory to the token" in refusal(
        more, without=("--micro-batch-tokens",)
    )


def test_workers_do_not_share_its_layers() -> None:
    text = refusal(f"{ENGINE} --tensor-model-parallel-size 2", world_size=2)
    assert "remove --tensor-model-parallel-size 2, or use --transformer-impl local" in text


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("", 1),
        (ENGINE, 1),
        (FP8, 16),
        (f"{FP8} --fp8-recipe mxfp8", 32),
        (f"{FP8} --fp8-recipe blockwise", 128),
        (f"{FP8} --fp8-recipe blockwise --flexpipe-align-tokens 256", 256),
        ("--flexpipe-align-tokens 8 --micro-batch-tokens 100", 8),
    ],
)
def test_micro_batches_are_aligned_as_the_recipe_needs_it(more: str, tokens: int) -> None:
    found = config(more)
    model = found.model_config(1000)
    cut = run_cut(found, cost_coefficients(model), model, None)
    assert found.alignment == cut.align == tokens
    assert cut.tokens is not None
    assert cut.tokens % tokens == 0
    assert model.alignment in (1, tokens, tokens // 2)
