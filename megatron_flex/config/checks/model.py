"""Flags of the model."""

from __future__ import annotations

from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of


def model_problems(config: Config) -> Problems:
    m = config.model
    rope = m.position_embedding_type == "rope"
    yield from without(
        config,
        "--position-embedding-type rope",
        rope,
        ("rotary_base", "rotary_percent", "use_rope_scaling"),
    )
    yield from without(config, "--use-rope-scaling", m.use_rope_scaling, ("rope_scaling_factor",))
    if m.swiglu and m.openai_gelu:
        yield "--openai-gelu has no effect with --swiglu, whose gate has SiLU: remove one of them"
    yield from without(
        config, "--group-query-attention", m.group_query_attention, ("num_query_groups",)
    )
    groups = m.num_query_groups if m.group_query_attention else m.num_attention_heads
    if m.num_attention_heads % groups:
        yield (
            f"--num-attention-heads {m.num_attention_heads} is not a multiple of"
            f" --num-query-groups {groups}"
        )
    if rope and (int(m.kv_channels * m.rotary_percent) % 2 or m.kv_channels * m.rotary_percent < 2):
        yield (
            f"rotary embeddings need an even number of channels, not"
            f" {int(m.kv_channels * m.rotary_percent)} (--rotary-percent of {m.kv_channels}"
            " channels a head): change --kv-channels or --rotary-percent"
        )
    longest = config.data.max_sample_length
    if m.position_embedding_type != "none" and m.max_position_embeddings < max(
        longest, m.seq_length
    ):
        most = f"--max-position-embeddings is {m.max_position_embeddings}: raise it, or"
        if config.checkpoint.load_hf is not None or config.checkpoint.use_checkpoint_args:
            most = f"the model has {m.max_position_embeddings} positions:"
        yield (
            f"samples may have {max(longest, m.seq_length)} tokens, but {most} lower --seq-length"
            " and --max-sample-length"
        )
    if config.architecture != "bert":
        for name in ("bert_binary_head", "mask_prob"):
            if name in config.given:
                yield f"{flag_of(name)} is for BERT: remove it, or start pretrain_bert.py"
