"""Converted checkpoints loaded by megatron-core's GPTModel, cut over four processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flex.checkpoint.conversion.legacy import read_legacy, write_legacy
from megatron_flex.checkpoint.conversion.torch_dist import read_torch_dist, write_torch_dist
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.model.config import ModelConfig
from tests.distributed.pool import WorkerPool
from tests.unit.checkpoint.test_conversion import GPT, random_weights


def _model(config: ModelConfig) -> Any:
    """This rank's part of a GPTModel under tensor parallelism 2, pipeline parallelism 2."""
    from megatron.core import parallel_state

    from tests.unit.model.reference import gpt_model

    parallel_state.initialize_model_parallel(2, 2)
    return gpt_model(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )


def _load_both(
    rank_files: str, distributed: str, config: ModelConfig, again: str
) -> dict[str, torch.Tensor]:
    """Load this rank's file and the distributed checkpoint; both must give the same weights.

    And save them under ``again`` as megatron-core does, in both formats.
    """
    from megatron.core import dist_checkpointing, parallel_state

    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
    ):
        model = _model(config)
        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        path = Path(rank_files) / f"mp_rank_{tensor:02d}_{stage:03d}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        assert content["args"].tensor_model_parallel_size == 2
        model.load_state_dict(content["model"], strict=True)
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.zero_()
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, distributed)
        model.load_state_dict(loaded["model"], strict=True)
        own = Path(again) / "ranks" / "iter_0000005" / path.parent.name
        own.mkdir(parents=True)
        torch.save({**content, "model": model.state_dict_for_save_checkpoint()}, own / path.name)
        folder = Path(again) / "distributed" / "iter_0000005"
        folder.mkdir(parents=True, exist_ok=True)
        states = {"model": model.sharded_state_dict(), "args": content["args"], "iteration": 5}
        # It writes in processes of its own, which the pool's workers may not have.
        process: Any = multiprocessing.current_process()
        with mock.patch.dict(process._config, daemon=False):
            dist_checkpointing.save(states, str(folder))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, first[name]), (dist.get_rank(), name)
    assert any(parameter.any() for parameter in model.parameters())
    return first


def _paths(weights: Weights, directory: Path) -> tuple[str, str]:
    rank_files = write_legacy(
        directory / "ranks",
        weights,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        transformer_engine=False,
    )
    return str(rank_files), str(write_torch_dist(directory / "distributed", weights))


def test_megatron_core_loads_both_formats_cut_two_by_two(
    workers: WorkerPool, tmp_path: Path
) -> None:
    for tied in (True, False):
        config = dataclasses.replace(GPT, untie_embeddings_and_output_weights=not tied)
        weights = random_weights(config)
        again = tmp_path / str(tied) / "again"
        paths = _paths(weights, tmp_path / str(tied))
        parts = workers.run(4, _load_both, *paths, config, str(again))
        for read, name in ((read_legacy, "ranks"), (read_torch_dist, "distributed")):
            found = read(again / name, "GPT", iteration=5, true_vocab_size=config.vocab_size)
            assert found.tensors.keys() == weights.tensors.keys(), name
            for key, tensor in weights.tensors.items():
                assert torch.equal(found.tensors[key], tensor), (name, key)
        embedding = weights.tensors["embedding.word_embeddings.weight"]
        output = embedding if tied else weights.tensors["output_layer.weight"]
        # Ranks 0 and 1 are the first stage, 2 and 3 the last.
        for rank, half in enumerate(embedding.chunk(2)):
            assert torch.equal(parts[rank]["embedding.word_embeddings.weight"], half)
        for rank, half in enumerate(output.chunk(2)):
            assert torch.equal(parts[2 + rank]["output_layer.weight"], half)
        third = weights.tensors["decoder.layers.2.mlp.linear_fc2.weight"]
        whole = [parts[rank]["decoder.layers.0.mlp.linear_fc2.weight"] for rank in (2, 3)]
        assert torch.equal(torch.cat(whole, 1), third)
