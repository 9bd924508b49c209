"""The whole configuration of a run: one frozen value, the same on every worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_flex.config.checkpoint import CheckpointOptions
from megatron_flex.config.data import DataOptions
from megatron_flex.config.evaluation import EvaluationOptions
from megatron_flex.config.flexpipe import V_SCHEDULES, FlexpipeOptions
from megatron_flex.config.learning_rate import LearningRateOptions
from megatron_flex.config.logging import LoggingOptions
from megatron_flex.config.model import ModelOptions
from megatron_flex.config.option import Option, options
from megatron_flex.config.parallel import ParallelOptions
from megatron_flex.config.precision import PrecisionOptions
from megatron_flex.config.profiling import ProfilingOptions
from megatron_flex.config.recompute import RecomputeOptions
from megatron_flex.config.tokenizer import TokenizerOptions
from megatron_flex.config.training import TrainingOptions
from megatron_flex.data.cut import BY_WAY
from megatron_flex.model.config import ModelConfig, fp8_alignment

Architecture = Literal["gpt", "bert"]

GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "data": DataOptions,
    "tokenizer": TokenizerOptions,
    "training": TrainingOptions,
    "learning_rate": LearningRateOptions,
    "checkpoint": CheckpointOptions,
    "logging": LoggingOptions,
    "evaluation": EvaluationOptions,
    "profiling": ProfilingOptions,
    "parallel": ParallelOptions,
    "recompute": RecomputeOptions,
    "precision": PrecisionOptions,
    "flexpipe": FlexpipeOptions,
}
"""Field of :class:`Config` and class of each group, in the order of the documentation."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options, derived and checked; made by ``megatron_flex.arguments.parse``.

    Attributes:
        architecture: which model is trained; the entry point decides.
        world_size: number of workers.
        given: names of the fields that the command line set.
    """

    architecture: Architecture
    world_size: int
    model: ModelOptions
    data: DataOptions
    tokenizer: TokenizerOptions
    training: TrainingOptions
    learning_rate: LearningRateOptions
    checkpoint: CheckpointOptions
    logging: LoggingOptions
    evaluation: EvaluationOptions
    profiling: ProfilingOptions
    parallel: ParallelOptions
    recompute: RecomputeOptions
    precision: PrecisionOptions
    flexpipe: FlexpipeOptions
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model's shape with Megatron's derivations.

        Args:
            vocab_size: size of the tokenizer's vocabulary, without ``--vocab-extra-ids``.

        Raises:
            ValueError: when ``--padded-vocab-size`` is too small for the vocabulary.
        """
        m = self.model
        vocab_size += self.tokenizer.vocab_extra_ids
        multiple = m.make_vocab_size_divisible_by
        padded = self.tokenizer.padded_vocab_size or -(-vocab_size // multiple) * multiple
        bert = self.architecture == "bert"
        return ModelConfig(
            num_layers=m.num_layers,
            hidden_size=m.hidden_size,
            num_attention_heads=m.num_attention_heads,
            vocab_size=vocab_size,
            padded_vocab_size=padded,
            max_position_embeddings=m.max_position_embeddings,
            ffn_hidden_size=m.ffn_hidden_size,
            kv_channels=m.kv_channels,
            num_query_groups=(
                m.num_query_groups if m.group_query_attention else m.num_attention_heads
            ),
            position_embedding_type=m.position_embedding_type,
            rotary_base=m.rotary_base,
            rotary_percent=m.rotary_percent,
            use_rope_scaling=m.use_rope_scaling,
            rope_scaling_factor=m.rope_scaling_factor,
            normalization=m.normalization,
            norm_epsilon=m.norm_epsilon,
            swiglu=m.swiglu,
            openai_gelu=m.openai_gelu,
            apply_residual_connection_post_layernorm=m.apply_residual_connection_post_layernorm,
            apply_layernorm_1p=m.apply_layernorm_1p,
            untie_embeddings_and_output_weights=m.untie_embeddings_and_output_weights,
            add_bias_linear=m.add_bias_linear,
            add_qkv_bias=m.add_qkv_bias and not m.add_bias_linear,
            qk_layernorm=m.qk_layernorm,
            hidden_dropout=m.hidden_dropout,
            attention_dropout=m.attention_dropout,
            init_method_std=m.init_method_std,
            params_dtype="bfloat16" if self.precision.bf16 else "float32",
            seed=self.training.seed,
            causal=not bert,
            architecture=self.architecture,
            num_tokentypes=2 if bert and m.bert_binary_head else 0,
            binary_head=bert and m.bert_binary_head,
            transformer_impl=m.transformer_impl,
            fp8_format=self.precision.fp8_format,
            fp8_recipe=self.precision.fp8_recipe,
            persist_layer_norm=m.persist_layer_norm,
        )

    @property
    def alignment(self) -> int:
        """The tokens of every micro-batch are padded to a multiple of this."""
        given = self.flexpipe.flexpipe_align_tokens
        p = self.precision
        return fp8_alignment(p.fp8_format, p.fp8_recipe) if given is None else given

    @property
    def devices(self) -> int:
        """Devices of a plan: groups of workers that share each layer."""
        return self.world_size // self.parallel.tensor_model_parallel_size

    @property
    def schedule(self) -> str:
        """Name of the schedule of plans that name none."""
        f, p = self.flexpipe, self.parallel
        if f.flexpipe_schedule is not None:
            return f.flexpipe_schedule
        if f.flexpipe:
            return "auto"
        return "interleaved" if p.virtual_stages(self.model.num_layers) > 1 else "1f1b"

    @property
    def cut_by_batch(self) -> bool:
        """Whether the planner's process says how each batch is cut, on a plan that stays."""
        return self.flexpipe.flexpipe_batching in BY_WAY

    @property
    def asks_planner(self) -> bool:
        """Whether each batch is planned: on a layout chosen for it, or on a plan that stays."""
        return self.flexpipe.flexpipe or self.cut_by_batch

    @property
    def stages_per_worker(self) -> int:
        """Stages that each worker holds under the static plan of the flags."""
        if self.schedule in V_SCHEDULES:
            return 2
        return self.parallel.virtual_stages(self.model.num_layers)

    def values(self) -> dict[str, Any]:
        """All options by field name, and ``architecture`` and ``world_size``: plain values that
        JSON can hold, as the arguments dump and the checkpoint want them."""
        flat: dict[str, Any] = {
            "architecture": self.architecture,
            "world_size": self.world_size,
        }
        for name in GROUPS:
            group = getattr(self, name)
            for f in dataclasses.fields(group):
                value = getattr(group, f.name)
                flat[f.name] = list(value) if isinstance(value, tuple) else value
        return flat

    @classmethod
    def from_values(
        cls,
        architecture: Architecture,
        world_size: int,
        values: Mapping[str, Any],
        given: frozenset[str],
    ) -> Config:
        """Build all groups from options by field name; fields that are absent take defaults."""
        groups = {
            name: group(**{o.field: values[o.field] for o in options(group) if o.field in values})
            for name, group in GROUPS.items()
        }
        return cls(architecture=architecture, world_size=world_size, given=given, **groups)


def all_options() -> Iterator[Option]:
    """The options of all groups."""
    for group in GROUPS.values():
        yield from options(group)


def flag_of(field_name: str) -> str:
    """The usual flag of a field."""
    return _FLAGS[field_name]


_FLAGS = {option.field: option.flag for option in all_options()}
