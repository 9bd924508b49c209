"""What Transformer Engine's layers, fp8 and aligned micro-batches need of the other flags."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_flex.config.config import Config, flag_of
from megatron_flex.config.flexpipe import PADDED
from megatron_flex.model.config import FP8_ALIGNMENT


def layer_problems(config: Config) -> Iterator[str]:
    """Sentences that name the flags and say what to change."""
    m, p = config.model, config.precision
    engine = m.transformer_impl == "transformer_engine"
    size = config.parallel.tensor_model_parallel_size
    if engine and size > 1:
        yield (
            f"--transformer-impl transformer_engine has whole layers on each worker: remove"
            f" --tensor-model-parallel-size {size}, or use --transformer-impl local"
        )
    if p.fp8_format is None:
        if "fp8_recipe" in config.given:
            yield "--fp8-recipe has no effect without --fp8-format: remove it, or add --fp8-format"
    else:
        yield from _fp8(config, engine=engine)
    yield from _alignment(config)


def _fp8(config: Config, *, engine: bool) -> Iterator[str]:
    m, p = config.model, config.precision
    flag = f"--fp8-format {p.fp8_format}"
    if not engine:
        yield f"{flag} needs Transformer Engine: add --transformer-impl transformer_engine"
    if not p.bf16:
        yield f"{flag} needs --bf16: weights, and what is not multiplied, are in bfloat16"
    unit = FP8_ALIGNMENT[p.fp8_recipe]
    groups = m.num_query_groups if m.group_query_attention else m.num_attention_heads
    query = m.num_attention_heads * m.kv_channels
    widths = {
        "--hidden-size": m.hidden_size,
        "--ffn-hidden-size": m.ffn_hidden_size,
        "--num-attention-heads times --kv-channels": query,
        "the projection to queries, keys and values": query + 2 * groups * m.kv_channels,
    }
    for name, width in widths.items():
        if width % unit:
            yield (
                f"--fp8-recipe {p.fp8_recipe} needs widths that are multiples of {unit}, but"
                f" {name} is {width}: change it"
            )


def _alignment(config: Config) -> Iterator[str]:
    align, f = config.alignment, config.flexpipe
    if align == 1:
        return
    given = f.flexpipe_align_tokens is not None
    cause = f"{flag_of('flexpipe_align_tokens')} {align}"
    unit = FP8_ALIGNMENT[config.precision.fp8_recipe]
    if not given:
        cause = (
            f"--fp8-recipe {config.precision.fp8_recipe}, which needs multiples of {align} tokens,"
        )
    elif config.precision.fp8_format is not None and align % unit:
        yield (
            f"{cause} is no multiple of {unit}, which --fp8-recipe {config.precision.fp8_recipe}"
            " needs: change or remove it"
        )
    if f.flexpipe_batching == "dynapipe":
        yield (
            f"{cause} does not go with --flexpipe-batching dynapipe, which fills a worker's memory"
            " to the token: choose another"
        )
    slices = f.flexpipe_slice_tokens
    for name, tokens in (
        ("micro_batch_tokens", config.data.micro_batch_tokens),
        ("flexpipe_slice_tokens", int(slices) if slices.isdecimal() else None),
    ):
        if tokens and tokens < align:
            yield f"{flag_of(name)} {tokens} is less than {cause} leaves room for: raise it"
    positions = config.model.max_position_embeddings
    if config.model.position_embedding_type != "learned_absolute":
        return
    if f.flexpipe_batching in PADDED and positions % align:
        yield (
            f"{cause} pads samples to more than --max-position-embeddings {positions}: make that a"
            f" multiple of {align}"
        )
    elif positions < align:
        yield (
            f"{cause} pads with up to {align - 1} tokens, but there are --max-position-embeddings"
            f" {positions}: raise it"
        )
