"""Conversion to and from Megatron-LM's formats, with megatron-core itself as the other side."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.checkpoint.conversion import pickles
from megatron_flex.checkpoint.conversion.arguments import config_of, megatron_arguments
from megatron_flex.checkpoint.conversion.flex import read_flex, write_flex
from megatron_flex.checkpoint.conversion.legacy import read_legacy, write_legacy
from megatron_flex.checkpoint.conversion.messages import receive, send
from megatron_flex.checkpoint.conversion.names import to_local, to_transformer_engine
from megatron_flex.checkpoint.conversion.shapes import check_weights, weight_shapes, with_state
from megatron_flex.checkpoint.conversion.shards import merge, split
from megatron_flex.checkpoint.conversion.torch_dist import read_torch_dist, write_torch_dist
from megatron_flex.checkpoint.conversion.weights import (
    Training,
    Weights,
    padded_size,
    state_name,
)
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import TRACKER
from megatron_flex.checkpoint.load import read_common
from megatron_flex.model.blocks import build_block
from megatron_flex.model.config import ModelConfig
from tests.unit.model.reference import bert_model, gpt_model, model_parallel
from tools.checkpoint import convert

ROOT = Path(__file__).resolve().parents[3]
CONVERT = ROOT / "tools" / "checkpoint" / "convert.py"

GPT = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=90,
    padded_vocab_size=96,
    max_position_embeddings=64,
    ffn_hidden_size=48,
    kv_channels=8,
    num_query_groups=2,
    swiglu=True,
)
LLAMA_LIKE = replace(
    GPT,
    position_embedding_type="rope",
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
    qk_layernorm=True,
    params_dtype="bfloat16",
)
QWEN_LIKE = replace(
    LLAMA_LIKE,
    qk_layernorm=False,
    add_qkv_bias=True,
    use_rope_scaling=True,
    rope_scaling_factor=32.0,
)
BERT = replace(
    GPT,
    num_query_groups=4,
    swiglu=False,
    causal=False,
    architecture="bert",
    num_tokentypes=2,
    binary_head=True,
)
CONFIGS = [
    pytest.param(GPT, id="gpt"),
    pytest.param(LLAMA_LIKE, id="llama-like"),
    pytest.param(BERT, id="bert"),
    pytest.param(QWEN_LIKE, id="qwen-like"),
    pytest.param(
        replace(GPT, swiglu=False, openai_gelu=True, apply_layernorm_1p=True), id="gpt-2-like"
    ),
]


def model_type(config: ModelConfig) -> str:
    return "BERT" if config.architecture == "bert" else "GPT"


def random_weights(config: ModelConfig) -> Weights:
    """Weights of iteration 7, of random values."""
    generator = torch.Generator().manual_seed(3)
    dtype = getattr(torch, config.params_dtype)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in weight_shapes(config).items()
    }
    return Weights(config, tensors, iteration=7, consumed_samples=100)


def assert_equal(actual: Weights, expected: Weights) -> None:
    assert actual.config == expected.config
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert actual.tensors[name].dtype == tensor.dtype
        assert torch.equal(actual.tensors[name], tensor), name
    assert (actual.iteration, actual.consumed_samples) == (7, 100)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """megatron-core's global state for one process, and no CUDA."""
    with (
        model_parallel(tmp_path_factory.mktemp("megatron")),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        yield


def reference(config: ModelConfig) -> torch.nn.Module:
    """megatron-core's own model."""
    model = (bert_model if config.architecture == "bert" else gpt_model)(config)
    return model.to(getattr(torch, config.params_dtype))


def assert_holds(model: torch.nn.Module, weights: Weights) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.tensors.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, weights.tensors[name]), name


# ---- what the weights of a model are ----------------------------------------------------------


@given(
    st.sampled_from(["learned_absolute", "rope", "none"]),
    st.sampled_from(["LayerNorm", "RMSNorm"]),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_the_shapes_are_those_of_the_model_that_is_trained(
    position: Any, normalization: Any, flags: list[bool]
) -> None:
    swiglu, untied, bias, norms, bert, qkv_bias, after = flags
    config = replace(
        BERT if bert else GPT,
        num_layers=2,
        position_embedding_type=position,
        normalization=normalization,
        swiglu=swiglu,
        untie_embeddings_and_output_weights=untied,
        add_bias_linear=bias,
        qk_layernorm=norms,
        add_qkv_bias=qkv_bias,
        apply_residual_connection_post_layernorm=after,
        apply_layernorm_1p=norms,
    )
    built = {
        name: tuple(parameter.shape)
        for unit in config.layers.units
        for slab in build_block(unit, config).slab_parameters().values()
        for name, parameter in slab.items()
    }
    assert weight_shapes(config) == built


def test_missing_superfluous_and_misshapen_weights_are_named() -> None:
    weights = random_weights(GPT)
    name = "decoder.layers.3.mlp.linear_fc1.bias"
    fewer = {n: t for n, t in weights.tensors.items() if n != name}
    with pytest.raises(CheckpointError, match=f"the weights lack {name}"):
        check_weights(replace(weights, tensors=fewer))
    with pytest.raises(CheckpointError, match=r"x \[1\] has no place"):
        check_weights(replace(weights, tensors={**weights.tensors, "x": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"is \[5\]; a model of this shape has \[96\]"):
        check_weights(replace(weights, tensors={**weights.tensors, name: torch.zeros(5)}))


def test_a_model_that_megatron_core_would_compute_otherwise_does_not_go_there(
    tmp_path: Path,
) -> None:
    weights = random_weights(replace(BERT, apply_residual_connection_post_layernorm=True))
    with pytest.raises(CheckpointError, match="accepts and ignores"):
        write_torch_dist(tmp_path, weights)
    with pytest.raises(CheckpointError, match="accepts and ignores"):
        write_legacy(
            tmp_path,
            weights,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            transformer_engine=False,
        )


# ---- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("swiglu", [False, True])
def test_tensors_split_over_ranks_merge_again(size: int, swiglu: bool) -> None:
    config = replace(GPT, swiglu=swiglu)
    for name, tensor in random_weights(config).tensors.items():
        parts = split(config, name, tensor, size)
        assert len(parts) == size
        assert torch.equal(merge(config, name, parts), tensor)


def test_each_rank_has_a_share_of_gate_and_value() -> None:
    gate, value = torch.arange(4.0), torch.arange(4.0) + 10
    parts = split(replace(GPT, swiglu=True), "mlp.linear_fc1.bias", torch.cat([gate, value]), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_names_translate_both_ways() -> None:
    for name in weight_shapes(BERT):
        assert to_local(to_transformer_engine(name)) == name
    fused = "decoder.layers.1.mlp.linear_fc1.layer_norm_bias"
    assert to_transformer_engine("decoder.layers.1.pre_mlp_layernorm.bias") == fused


@pytest.mark.parametrize("config", CONFIGS)
def test_megatrons_arguments_describe_the_model(config: ModelConfig) -> None:
    arguments = megatron_arguments(random_weights(config), ckpt_format="torch")
    assert config_of(arguments, model_type(config)) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts", 8), ("squared_relu", True), ("normalization", "GemmaNorm"),
     ("position_embedding_type", "relative"), ("params_dtype", torch.int8)],
)  # fmt: skip
def test_models_that_cannot_be_represented_are_refused(name: str, value: Any) -> None:
    arguments = megatron_arguments(random_weights(GPT), ckpt_format="torch")
    setattr(arguments, name, value)
    with pytest.raises(CheckpointError, match=str(value)):
        config_of(arguments, "GPT")


@pytest.mark.parametrize(("vocab", "by", "ranks", "size"), [(90, 8, 1, 96), (96, 8, 1, 96),
                                                            (90, 32, 4, 128)])  # fmt: skip
def test_the_vocabulary_is_padded_as_in_megatron(
    vocab: int, by: int, ranks: int, size: int
) -> None:
    assert padded_size(vocab, by, ranks) == size


def test_another_padding_keeps_the_rows_of_all_tokens() -> None:
    weights = random_weights(replace(GPT, untie_embeddings_and_output_weights=True))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        before, after = weights.tensors[name], weights.padded(128).tensors[name]
        assert after.shape == (128, 32)
        assert torch.equal(after[:90], before[:90])
        assert torch.equal(after[90:], before[89:90].expand(38, 32))
    assert weights.padded(128).config.padded_vocab_size == 128
    with pytest.raises(CheckpointError, match="cannot be cut to 89 rows"):
        weights.padded(89)


# ---- the protocol -----------------------------------------------------------------------------


def _messages(weights: Weights) -> list[Any]:
    queue: Queue[Any] = Queue()
    send(queue, weights)
    return list(queue.queue)


def _receive(messages: list[Any], *, checking: bool = True) -> Weights:
    queue: Queue[Any] = Queue()
    for message in messages:
        queue.put(message)
    return receive(queue, checking=checking)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_passes_through_the_messages_unchanged(config: ModelConfig) -> None:
    assert_equal(_receive(_messages(random_weights(config))), random_weights(config))


def test_the_messages_are_those_of_megatrons_protocol() -> None:
    metadata, *messages, done = _messages(random_weights(LLAMA_LIKE))
    assert done == "done"
    assert [m["name"] for m in messages] == [
        "embeddings",
        *(f"transformer layer {n}" for n in range(4)),
        "final norm",
        "output layer",
    ]
    assert messages[0].keys() == {"name", "word embeddings"}
    assert messages[1].keys() == {
        "name", "input norm weight", "post norm weight", "qkv weight", "dense weight",
        "mlp l0 weight W", "mlp l0 weight V", "mlp l1 weight", "q norm weight", "k norm weight",
    }  # fmt: skip
    assert (metadata.norm_has_bias, metadata.linear_bias, metadata.swiglu) == (False, False, True)
    assert (metadata.output_layer, metadata.true_vocab_size) == (True, 90)


def test_a_loader_that_says_little_about_the_model_is_understood() -> None:
    # As Megatron-LM's loaders of foreign models: attributes only, padded by a third party.
    config = replace(GPT, num_query_groups=4, ffn_hidden_size=128, swiglu=False)
    metadata, *messages = _messages(random_weights(config))
    del metadata.checkpoint_args, metadata.consumed_train_samples
    weights = _receive([metadata, *messages])
    assert weights.config == config
    assert weights.consumed_samples == 0


def test_values_without_a_place_are_refused_unless_checking_is_off() -> None:
    messages = _messages(random_weights(GPT))
    messages[2]["router weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="'router weight' in 'transformer layer 0'"):
        _receive(messages)
    assert_equal(_receive(messages, checking=False), random_weights(GPT))


def test_a_loader_that_fails_ends_the_saver() -> None:
    with pytest.raises(CheckpointError, match="the loader failed"):
        _receive([*_messages(random_weights(GPT))[:3], "exit"])
    messages = _messages(random_weights(GPT))
    del messages[4]
    with pytest.raises(CheckpointError, match=r"the weights lack decoder\.layers\.2"):
        _receive(messages)


def test_half_precision_weights_become_single_precision() -> None:
    metadata, *messages = _messages(random_weights(GPT))
    metadata.params_dtype = torch.float16
    for message in messages[:-1]:
        for key, tensor in message.items():
            message[key] = tensor.half() if isinstance(tensor, torch.Tensor) else tensor
    weights = _receive([metadata, *messages])
    assert weights.config.params_dtype == "float32"
    name = "embedding.word_embeddings.weight"
    assert torch.equal(weights.tensors[name], random_weights(GPT).tensors[name].half().float())


# ---- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_our_own_format_gives_the_weights_back(config: ModelConfig, tmp_path: Path) -> None:
    write_flex(tmp_path, random_weights(config))
    assert_equal(read_flex(tmp_path), random_weights(config))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_megatrons_rank_files_give_the_weights_back(
    config: ModelConfig, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    path = write_legacy(
        tmp_path,
        random_weights(config),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        transformer_engine=tensor == 2,
    )
    assert len(list(path.glob("mp_rank_*/model_optim_rng.pt"))) == tensor * pipeline
    weights = read_legacy(tmp_path, model_type(config))
    assert_equal(weights, random_weights(config))
    assert (weights.tensor_parallel_size, weights.pipeline_parallel_size) == (tensor, pipeline)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("config", CONFIGS)
def test_megatron_core_loads_our_rank_file(config: ModelConfig, tmp_path: Path) -> None:
    path = write_legacy(
        tmp_path,
        random_weights(config),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        transformer_engine=False,
    )
    content = torch.load(path / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 7)
    model = reference(config)
    model.load_state_dict(content["model"], strict=True)
    assert_holds(model, random_weights(config))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("config", CONFIGS)
def test_megatron_cores_rank_file_is_read(config: ModelConfig, tmp_path: Path) -> None:
    model: Any = reference(config)
    weights = random_weights(config)
    model.load_state_dict(dict(weights.tensors), strict=False)
    folder = tmp_path / "release" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / TRACKER).write_text("release")
    arguments = megatron_arguments(weights, ckpt_format="torch")
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7,
               "model": model.state_dict_for_save_checkpoint()}  # fmt: skip
    torch.save(content, folder / "model_optim_rng.pt")
    assert_equal(read_legacy(tmp_path, model_type(config)), weights)


def test_virtual_pipeline_stages_are_put_in_order(tmp_path: Path) -> None:
    # Two stages with two chunks of one layer each: stage 0 has layers 0 and 2, stage 1 has 1 and 3.
    weights = random_weights(GPT)
    folder = tmp_path / "iter_0000007"
    (tmp_path / TRACKER).write_text("7")
    for stage in (0, 1):
        content: dict[str, Any] = {
            "args": megatron_arguments(weights, ckpt_format="torch"),
            "checkpoint_version": 3.0,
            "iteration": 7,
        }
        for chunk in (0, 1):
            layer = 2 * chunk + stage
            prefix = f"decoder.layers.{layer}."
            state = {
                name.replace(prefix, "decoder.layers.0."): tensor
                for name, tensor in weights.tensors.items()
                if name.startswith(prefix)
                or (name.startswith("embedding") and layer == 0)
                or (name.startswith("decoder.final") and layer == 3)
            }
            content[f"model{chunk}"] = state
        (folder / f"mp_rank_00_{stage:03d}").mkdir(parents=True)
        torch.save(content, folder / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt")
    assert_equal(read_legacy(tmp_path, "GPT"), weights)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("config", CONFIGS)
def test_megatron_core_loads_our_distributed_checkpoint(
    config: ModelConfig, tmp_path: Path
) -> None:
    from megatron.core import dist_checkpointing

    path = write_torch_dist(tmp_path, random_weights(config))
    model: Any = reference(config)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))
    model.load_state_dict(loaded["model"], strict=True)
    assert_holds(model, random_weights(config))
    assert (loaded["iteration"], loaded["args"].num_layers) == (7, 4)
    assert_equal(read_torch_dist(tmp_path, model_type(config)), random_weights(config))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("config", CONFIGS)
def test_megatron_cores_distributed_checkpoint_is_read(config: ModelConfig, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    weights = random_weights(config)
    model: Any = reference(config)
    model.load_state_dict(dict(weights.tensors), strict=False)
    path = tmp_path / "iter_0000007"
    path.mkdir()
    (tmp_path / TRACKER).write_text("7")
    state = {
        "args": megatron_arguments(weights, ckpt_format="torch_dist"),
        "iteration": 7,
        "model": model.sharded_state_dict(),
    }
    dist_checkpointing.save(state, str(path))
    assert_equal(read_torch_dist(tmp_path, model_type(config)), weights)


# ---- files of others --------------------------------------------------------------------------


class _Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_code_in_a_file_of_others_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"a": torch.ones(3, dtype=torch.bfloat16), "b": _Dangerous(), "c": {1, "x"},
               "d": argparse.Namespace(e=SimpleNamespace(f=1), g=torch.float16)}  # fmt: skip
    torch.save(content, "file.pt")
    read = pickles.read(Path("file.pt"))
    assert torch.equal(read["a"], torch.ones(3, dtype=torch.bfloat16))
    assert isinstance(read["b"], pickles.Foreign)
    assert read["c"] == {1, "x"}
    assert read["d"].g == torch.float16
    assert isinstance(read["d"].e, pickles.Foreign)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Dangerous()))
    with open(".metadata", "rb") as file:
        assert isinstance(pickles.load_metadata(file), pickles.Foreign)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_a_truncated_file_of_others_is_a_clear_error(tmp_path: Path, size: int) -> None:
    torch.save({"a": torch.ones(3000)}, tmp_path / "file.pt")
    os.truncate(tmp_path / "file.pt", size)
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.pt"):
        pickles.read(tmp_path / "file.pt")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = write_legacy(
        tmp_path,
        random_weights(GPT),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        transformer_engine=True,
    )
    (path / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="tensor-parallel rank 1, pipeline stage 0"):
        read_legacy(tmp_path, "GPT")


@pytest.mark.parametrize(("tensor", "pipeline", "flag"), [(3, 1, "tensor"), (1, 3, "pipeline")])
def test_sizes_that_megatron_cannot_cut_are_refused(
    tensor: int, pipeline: int, flag: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"change --target-{flag}-parallel-size"):
        write_legacy(
            tmp_path,
            random_weights(GPT),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            transformer_engine=True,
        )
    assert not list(tmp_path.iterdir())


# ---- the command ------------------------------------------------------------------------------


def _convert(loader: str, source: Path, saver: str, target: Path, *flags: str) -> int:
    places = ["--load-dir", str(source), "--save-dir", str(target)]
    return convert.main(
        ["--model-type", "GPT", "--loader", loader, "--saver", saver, *places, *flags]
    )


def test_the_command_converts_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = random_weights(GPT)
    write_flex(tmp_path / "a", weights)
    steps = [
        ("flex", "a", "core", "b", "--target-tensor-parallel-size", "2",
         "--target-pipeline-parallel-size", "2"),
        ("mcore", "b", "torch_dist", "c"),
        ("torch_dist", "c", "flex", "d"),
    ]  # fmt: skip
    for loader, source, saver, target, *flags in steps:
        assert _convert(loader, tmp_path / source, saver, tmp_path / target, *flags) == 0
        assert f"wrote {tmp_path / target / 'iter_0000007'}" in capsys.readouterr().out
    # The padding is Megatron's now: 90 tokens, to a multiple of 128 for each of two ranks.
    assert_equal(read_flex(tmp_path / "d"), weights.padded(256))


@pytest.mark.parametrize("through", ["core", "torch_dist"])
@pytest.mark.parametrize(
    ("tokenizer", "flag"),
    [
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/data/tok.json"}, 90),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}, 90),
        ({"tokenizer_type": "NullTokenizer"}, 89),
        ({"tokenizer_type": "NullTokenizer", "vocab_extra_ids": 3}, 86),
    ],
)
def test_the_tokenizer_survives_the_way_there_and_back(
    tmp_path: Path, through: str, tokenizer: dict[str, Any], flag: int
) -> None:
    arguments = Namespace(**tokenizer, seq_length=24, make_vocab_size_divisible_by=8)
    weights = replace(random_weights(GPT), arguments=arguments)
    write_flex(tmp_path / "a", weights)
    assert _convert("flex", tmp_path / "a", through, tmp_path / "b") == 0
    assert _convert(through, tmp_path / "b", "flex", tmp_path / "c") == 0
    first, last = (read_common(tmp_path / name)["arguments"] for name in "ac")
    assert {name: last.get(name) for name in vars(arguments)} == vars(arguments)
    assert first["vocab_size"] == last["vocab_size"] == flag
    assert read_flex(tmp_path / "c").config.vocab_size == GPT.vocab_size == 90


@pytest.mark.parametrize(
    ("loader", "saver", "message"),
    [
        ("nothing", "flex", "convert: there is no loader 'nothing'"),
        ("flex", "json", "convert: there is no saver 'json'"),
        ("flex", "core", "convert: no checkpoint in"),
        ("core", "flex", "convert: no checkpoint in"),
    ],
)
def test_the_command_says_what_is_wrong(
    loader: str, saver: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _convert(loader, tmp_path / "a", saver, tmp_path / "b") == 1
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "b").exists()


def test_a_saver_that_fails_does_not_wait_for_its_loader(tmp_path: Path) -> None:
    write_flex(tmp_path / "a", random_weights(GPT))
    (tmp_path / "b").touch()
    assert _convert("flex", tmp_path / "a", "core", tmp_path / "b", "--max-queue-size", "6") == 1


def _run(load: Callable[..., None], save: Callable[..., None]) -> None:
    loader, saver = ModuleType("loader"), ModuleType("saver")
    loader.load_checkpoint, saver.save_checkpoint = load, save  # type: ignore[attr-defined]
    convert.convert(loader, saver, Namespace(max_queue_size=1))


def test_a_loader_that_has_said_all_is_let_come_to_its_end() -> None:
    saved, ended = threading.Event(), []

    def load(messages: Any, _: object) -> None:
        messages.put("done")
        saved.wait(30)
        time.sleep(0.05)
        ended.append(True)

    def save(messages: Any, _: object) -> None:
        assert messages.get() == "done"
        saved.set()

    _run(load, save)
    assert ended


def test_a_loader_whose_saver_has_failed_comes_to_its_next_message_and_no_further() -> None:
    ended: list[int] = []

    def load(messages: Any, _: object) -> None:
        try:
            for number in range(10**6):
                messages.put(number)
        finally:
            ended.append(number)

    def save(messages: Any, _: object) -> None:
        messages.get()
        raise CheckpointError("no room")

    with pytest.raises(CheckpointError, match="no room"):
        _run(load, save)
    assert len(ended) == 1
    assert ended[0] < 10


def test_a_plug_in_of_others_is_found_on_the_path(tmp_path: Path) -> None:
    write_flex(tmp_path / "a", random_weights(GPT))
    (tmp_path / "saver_names.py").write_text(
        "import json\n"
        "def add_arguments(parser): parser.add_argument('--indent', type=int, default=0)\n"
        "def save_checkpoint(queue, args):\n"
        "    names, message = [], queue.get()\n"
        "    while message != 'done':\n"
        "        names.append(getattr(message, 'model_type', None) or message['name'])\n"
        "        message = queue.get()\n"
        "    with open(args.save_dir, 'w') as file: json.dump([args.indent, *names], file)\n"
    )
    done = subprocess.run(
        [sys.executable, CONVERT, "--model-type", "GPT", "--loader", "flex", "--saver", "names",
         "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "out.json", "--indent", "4"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    layers = [f"transformer layer {number}" for number in range(4)]
    names = json.loads((tmp_path / "out.json").read_text())
    assert names == [4, "GPT", "embeddings", *layers, "final norm"]


# ---- the optimizer's state --------------------------------------------------------------------

SCHEDULE = {"max_lr": 1e-3, "min_lr": 1e-5, "lr_warmup_steps": 8, "num_steps": 56, "start_wd": 0.1,
            "lr_decay_style": "cosine", "lr_decay_steps": 80, "end_wd": 0.1, "wd_incr_steps": 80,
            "wd_incr_style": "constant"}  # fmt: skip


def trained(config: ModelConfig) -> Weights:
    """Random weights with an optimizer's state."""
    generator = torch.Generator().manual_seed(4)
    weights = random_weights(config)
    shapes = with_state(weight_shapes(config), config)
    state = {
        name: torch.rand(shape, generator=generator)
        for name, shape in shapes.items()
        if name not in weights.tensors
    }
    training = Training(7, SCHEDULE, (0.9, 0.95), 1e-6, 1.5e9)
    return replace(weights, tensors={**weights.tensors, **state}, training=training)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2), (1, 4)])
def test_rank_files_give_the_optimizers_state_back(
    config: ModelConfig, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    write_legacy(
        tmp_path,
        trained(config),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        transformer_engine=tensor == 2,
    )
    found = read_legacy(tmp_path, model_type(config), optimizer=True)
    assert_equal(found, trained(config))
    assert found.training == trained(config).training
    assert_equal(read_legacy(tmp_path, model_type(config)), random_weights(config))


@pytest.mark.parametrize("config", CONFIGS)
def test_distributed_checkpoints_and_messages_keep_the_optimizers_state(
    config: ModelConfig, tmp_path: Path
) -> None:
    write_torch_dist(tmp_path / "dist", trained(config))
    found = read_torch_dist(tmp_path / "dist", model_type(config), optimizer=True)
    assert_equal(found, trained(config))
    assert found.training == trained(config).training
    passed = _receive(_messages(found))
    assert_equal(passed, trained(config))
    write_flex(tmp_path / "flex", passed)
    again = read_flex(tmp_path / "flex", optimizer=True)
    assert_equal(again, trained(config))
    assert again.training == trained(config).training
    assert_equal(read_flex(tmp_path / "flex"), random_weights(config))


def their_optimizer(model: Any) -> Any:
    """megatron-core's own Adam of a float32 model, with PyTorch's AdamW inside."""
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-5, weight_decay=0.1)
    inner = torch.optim.AdamW(_get_param_groups([model], config, None), lr=1e-3)
    return FP32Optimizer(inner, config, lambda *_: None)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]])
def test_megatron_cores_optimizer_and_ours_have_the_same_state(
    config: ModelConfig, tmp_path: Path
) -> None:
    weights = trained(config)
    path = write_legacy(
        tmp_path / "ours", weights, tensor_parallel_size=1, pipeline_parallel_size=1,
        transformer_engine=False,
    )  # fmt: skip
    content = torch.load(path / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    model = reference(config)
    model.load_state_dict(content["model"], strict=True)
    assert list(dict(model.named_parameters())) == list(content["model"])
    original = torch.tensor
    with mock.patch.object(
        torch, "tensor", lambda *a, device=None, **k: original(*a, **k)
    ):  # megatron-core puts its loss scale on CUDA
        optimizer = their_optimizer(model)
    optimizer.load_state_dict(content["optimizer"])
    inner = optimizer.optimizer
    for name, parameter in model.named_parameters():
        state = inner.state[parameter]
        assert float(state["step"]) == 7.0
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[kind], weights.tensors[state_name(kind, name)]), name
    assert [g["wd_mult"] for g in inner.param_groups] == [1.0, 0.0]
    assert inner.param_groups[0]["betas"] == (0.9, 0.95)
    # And what it saves is read.
    folder = tmp_path / "theirs" / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "theirs" / TRACKER).write_text("7")
    saved = {**content, "optimizer": optimizer.state_dict(),
             "model": model.state_dict_for_save_checkpoint()}  # type: ignore[operator]  # fmt: skip
    torch.save(saved, folder / "model_optim_rng.pt")
    found = read_legacy(tmp_path / "theirs", model_type(config), optimizer=True)
    assert_equal(found, weights)
    assert found.training == weights.training


def test_an_optimizer_that_is_not_understood_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_legacy(
        tmp_path, trained(GPT), tensor_parallel_size=1, pipeline_parallel_size=1,
        transformer_engine=False,
    )  # fmt: skip
    file = path / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for change, reason in (
        ({"optimizer": [content["optimizer"]]}, "not Megatron-LM's plain Adam"),
        ({"optimizer": {"param_groups": content["optimizer"]["param_groups"]}}, "plain Adam"),
        ({"opt_param_scheduler": None}, "there is no opt_param_scheduler"),
    ):
        torch.save({**content, **change}, file)
        said: list[str] = []
        found = read_legacy(tmp_path, "GPT", optimizer=True, say=said.append)
        assert_equal(found, random_weights(GPT))
        assert found.training is None
        assert len(said) == 1
        assert reason in said[0]
