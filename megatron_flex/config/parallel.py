"""Flags of tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option
from megatron_flex.schedule.pipeline_layout import rows_of


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the model is laid out on the workers, when --flexpipe-plan does not say it in full."""

    tensor_model_parallel_size: int = option(1, at_least=1)
    """Workers that share each layer: neighbours on one server, which are one device of a plan. The
    number of workers must be a multiple of it. The word auto leaves it to the cost model, which
    decides by the first batches before the run starts, and prints its reasons."""

    sequence_parallel: bool = False
    """Divide the tokens among these workers wherever layers are not divided, which needs less
    memory."""

    pipeline_model_parallel_size: int = option(1, at_least=1)
    """Number of pipeline stages. The number of workers must be a multiple of it. Layers are cut by
    their cost, so their number need not be."""

    pipeline_model_parallel_layout: str | None = None
    """The layers of every stage, as in Megatron-LM: E embedding, t layer, L output, | between
    stages, such as "Et*3|(tt|)*2t*3L". With a multiple of --pipeline-model-parallel-size stages,
    each worker holds several in turn."""

    num_layers_per_virtual_pipeline_stage: int | None = option(None, at_least=1)
    """Layers of a stage where each worker holds several in turn (interleaved schedule): gives the
    number of stages, by --num-layers. They are cut by cost, so their sizes may differ."""

    num_virtual_stages_per_pipeline_rank: int | None = option(None, at_least=1)
    """Stages that each worker holds in turn (interleaved schedule)."""

    decoder_first_pipeline_num_layers: int | None = option(None, at_least=0)
    """Layers of the first stage."""

    decoder_last_pipeline_num_layers: int | None = option(None, at_least=0)
    """Layers of the last stage."""

    account_for_embedding_in_pipeline_split: bool = option(True, always=True)
    """Count the embedding in the cut: always, at its cost."""

    account_for_loss_in_pipeline_split: bool = option(True, always=True)
    """Count the output layer in the cut: always, at its cost."""

    overlap_grad_reduce: bool = option(True, always=True)
    """Reduce a block's gradients while the backward pass goes on: always, where the schedule
    leaves room."""

    use_distributed_optimizer: bool = False
    """Split the optimizer state of every block over its replicas, in all plans. A plan may say it
    of single units instead: "0:8@0,1 ; shard 1-6"."""

    overlap_param_gather: bool = option(True, always=True)
    """Gather split blocks' parameters while other blocks are updated and the next iteration
    begins: always."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Communication library; gloo for workers on CPUs."""

    distributed_timeout_minutes: int = option(10, at_least=1)
    """Longest wait for another worker; where all write or read a checkpoint, at least 30."""

    use_cpu_initialization: bool = option(True, always=True)
    """Draw the weights on the CPU: always, so that they depend on the seed alone."""

    @property
    def device_note(self) -> str:
        """What to add where a text counts devices as workers; empty where they are the same."""
        size = self.tensor_model_parallel_size
        if size == 1:
            return ""
        return f"; with --tensor-model-parallel-size {size} each of these is {size} workers"

    def virtual_stages(self, num_layers: int) -> int:
        """Stages that each worker holds in turn, by these flags; 1 where they say nothing.

        Rounded down where they do not divide; the checks of the arguments refuse that.
        """
        size, layout = self.pipeline_model_parallel_size, self.pipeline_model_parallel_layout
        if layout is not None:
            return max(1, len(rows_of(layout)) // size)
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            return max(1, num_layers // (size * self.num_layers_per_virtual_pipeline_stage))
        return 1
