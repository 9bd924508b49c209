"""Conversion from and to Hugging Face's directories, with transformers as the other side."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megatron_flex.arguments import parse
from megatron_flex.checkpoint import writer
from megatron_flex.checkpoint.conversion.flex import write_flex
from megatron_flex.checkpoint.conversion.hugging_face.directory import (
    read_config,
    read_hugging_face,
)
from megatron_flex.checkpoint.conversion.hugging_face.files import plan_shards
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import read_common
from megatron_flex.config.config import Config
from megatron_flex.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_flex.tokenizers.sentence_piece import SentencePieceTokenizer
from tests.unit.checkpoint.hugging_face import (
    MODELS,
    assert_same_bits,
    flex_weights,
    make,
    our_logits,
    stored,
    their_logits,
    to_flex,
    to_hf,
)
from tests.unit.model.support import make_batch
from tools import train_tokenizer
from tools.train_tokenizer import train

LENGTHS = (40, 7, 1, 23)
TOKENIZER = Path(__file__).resolve().parents[2] / "data/tokenizer_with_truncation/tokenizer.json"


def is_bert(name: str) -> bool:
    return "bert" in name


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_and_the_way_back_has_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    model = make(name)
    there, here, back = tmp_path / "there", tmp_path / "here", tmp_path / "back"
    model.save_pretrained(there)
    assert to_flex(there, here, bert=is_bert(name)) == 0
    weights = flex_weights(here)
    batch = make_batch(LENGTHS, weights.config)
    ours, our_order = our_logits(weights, batch)
    theirs, their_order = their_logits(model, batch, token_types=weights.config.num_tokentypes > 0)
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    if weights.config.use_rope_scaling:  # samples are long enough to tell
        plain = replace(weights, config=replace(weights.config, use_rope_scaling=False))
        assert (our_logits(plain, batch)[0] - theirs).abs().max() > 1e-3
    if their_order is not None:
        assert our_order is not None
        torch.testing.assert_close(our_order, their_order, rtol=0, atol=1e-4)

    assert to_hf(here, back, bert=is_bert(name)) == 0
    assert_same_bits(stored(back), stored(there))
    config = json.loads((there / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == config
    again = getattr(transformers, MODELS[name][0]).from_pretrained(back)
    assert torch.equal(their_logits(again.eval(), batch, token_types=False)[0],
                       their_logits(model, batch, token_types=False)[0])  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_trained_here_is_described_without_a_config_json(
    name: str, tmp_path: Path
) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "there")
    weights = read_hugging_face(tmp_path / "there", "BERT" if is_bert(name) else "GPT")
    # From scratch: no companions, and a padded vocabulary.
    alone = Weights(weights.config, dict(weights.tensors.items())).padded(128)
    write_flex(tmp_path / "here", alone)
    assert to_hf(tmp_path / "here", tmp_path / "back", bert=is_bert(name)) == 0
    assert_same_bits(stored(tmp_path / "back"), stored(tmp_path / "there"))
    found = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    again = getattr(transformers, found.architectures[0]).from_pretrained(tmp_path / "back")
    batch = make_batch(LENGTHS, weights.config)
    expected = their_logits(model, batch, token_types=False)[0]
    torch.testing.assert_close(
        their_logits(again.eval(), batch, token_types=False)[0], expected, rtol=0, atol=1e-5
    )


def test_shards_bfloat16_and_half_precision(tmp_path: Path) -> None:
    for dtype, words in ((torch.bfloat16, ()), (torch.float16, ("--params-dtype", "float16"))):
        folder = tmp_path / str(dtype)
        make("qwen2").to(dtype).save_pretrained(folder / "there", max_shard_size="20KB")
        assert len(list((folder / "there").glob("*.safetensors"))) > 3
        assert to_flex(folder / "there", folder / "here") == 0
        precision = "bfloat16" if dtype is torch.bfloat16 else "float32"
        assert flex_weights(folder / "here").config.params_dtype == precision
        assert to_hf(folder / "here", folder / "back", "--max-shard-size", "20KB", *words) == 0
        assert len(list((folder / "back").glob("model-*-of-*.safetensors"))) > 3
        assert_same_bits(stored(folder / "back"), stored(folder / "there"))
        index = json.loads((folder / "back" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == stored(folder / "there").keys()
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "back")
        assert again.dtype == dtype


def test_old_names_and_superfluous_tensors(tmp_path: Path) -> None:
    """What published files have: gamma and beta, no prefix, masks, and a tied copy."""
    for name in ("bert", "gpt2"):
        there = tmp_path / name
        make(name).save_pretrained(there)
        old = {}
        for key, tensor in stored(there).items():
            key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
            key = key.replace("LayerNorm.bias", "LayerNorm.beta").removeprefix("transformer.")
            old[key] = tensor
        if name == "gpt2":
            old["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            old["lm_head.weight"] = old["wte.weight"].clone()
        else:
            old["bert.embeddings.position_ids"] = torch.arange(64)[None]
        expected = stored(there)
        save_file(old, there / "model.safetensors")
        assert to_flex(there, tmp_path / f"{name} here", bert=name == "bert") == 0
        back = tmp_path / f"{name} back"
        assert to_hf(tmp_path / f"{name} here", back, bert=name == "bert") == 0
        assert_same_bits(stored(back), expected)


_DECODER = {
    "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32,
}  # fmt: skip
_LLAMA = _DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                     "pretraining_tp": 1, "rms_norm_eps": 1e-05}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2 7B": (
        {**_LLAMA, "_name_or_path": "x", "intermediate_size": 11008, "num_key_value_heads": 32,
         "max_position_embeddings": 4096, "rope_scaling": None, "tie_word_embeddings": False,
         "vocab_size": 32000},
        {"rotary_base": 10000, "use_rope_scaling": False, "num_query_groups": 32},
    ),
    "Llama 3.1 8B": (
        {**_LLAMA, "attention_bias": False, "mlp_bias": False, "intermediate_size": 14336,
         "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
         "tie_word_embeddings": False, "vocab_size": 128256},
        {"rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 8.0,
         "num_query_groups": 8, "kv_channels": 128, "untie_embeddings_and_output_weights": True},
    ),
    "Mistral 7B v0.3": (
        {**_DECODER, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
         "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
         "tie_word_embeddings": False, "vocab_size": 32768},
        {"rotary_base": 1000000, "norm_epsilon": 1e-5},
    ),
    "Qwen2.5 7B": (
        {**_DECODER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
         "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
         "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
         "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False,
         "use_sliding_window": False, "vocab_size": 152064},
        {"add_qkv_bias": True, "add_bias_linear": False, "qk_layernorm": False},
    ),
    "Qwen3 8B": (
        {**_DECODER, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
         "attention_bias": False, "head_dim": 128, "intermediate_size": 12288,
         "max_position_embeddings": 40960, "max_window_layers": 36, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
         "vocab_size": 151936},
        {"add_qkv_bias": False, "qk_layernorm": True, "norm_epsilon": 1e-6},
    ),
    "GPT-2": (
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
         "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
         "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
         "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
         "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
         "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
         "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
         "vocab_size": 50257},
        {"openai_gelu": True, "ffn_hidden_size": 3072,
         "untie_embeddings_and_output_weights": False},
    ),
    "BERT base uncased": (
        {"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
         "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
         "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
         "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
         "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
         "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
         "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522},
        {"norm_epsilon": 1e-12, "apply_residual_connection_post_layernorm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_as_published_models_have_them(name: str) -> None:
    values, expected = PUBLISHED[name]
    config = read_config(values)
    assert {field: getattr(config, field) for field in expected} == expected


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    config = getattr(transformers, MODELS[name][1])(**MODELS[name][2])
    return {**config.to_dict(), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama 2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama 2", {"attention_bias": True}, "attention_bias=True and mlp_bias=False"),
        ("llama 2", {"quantization_config": {"bits": 4}}, "quantization_config=.* not known"),
        ("llama 2", {"logit_scale": 0.5}, "--ignore-fields logit_scale"),
        ("llama 2", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "'yarn'"),
        ("llama 2", {"rope_theta": 1e4, "rope_parameters": None,
                     "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("llama 2", {"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta=10000.5"),
        ("llama 3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0,
                     "low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        ("llama 2", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
         "partial_rotary_factor=0.5"),
        ("mistral", {"sliding_window": 16}, "--max-position-embeddings 16"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window=16"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size=3"),
        ("bert", {"model_type": "roberta"}, "'roberta' is not known"),
    ],
)  # fmt: skip
def test_fields_that_change_the_result_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    read_config(values_of(name))
    with pytest.raises(CheckpointError, match=message):
        read_config(values_of(name, **changes))


def test_a_window_does_not_matter_where_no_sample_is_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make("mistral", sliding_window=32)
    there, here = tmp_path / "there", tmp_path / "here"
    model.save_pretrained(there)
    assert to_flex(there, here) == 1
    assert "sliding_window=32 for 64 positions" in capsys.readouterr().err
    assert not here.exists() or not list(here.glob("iter*"))
    assert to_flex(there, here, "--max-position-embeddings", 32) == 0
    weights = flex_weights(here)
    assert weights.config.max_position_embeddings == 32
    batch = make_batch((32, 9), weights.config)
    torch.testing.assert_close(
        our_logits(weights, batch)[0], their_logits(model, batch, token_types=False)[0],
        rtol=0, atol=1e-4,
    )  # fmt: skip


def test_wrong_directories_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"

    def refused(target: str, expected: str, *words: object, **kwargs: bool) -> None:
        assert to_flex(there, tmp_path / target, *words, **kwargs) == 1
        assert expected in capsys.readouterr().err

    refused("a", "has no config.json")
    make("qwen2").save_pretrained(there)
    refused("a", "give --model-type GPT", bert=True)
    tensors = stored(there)
    fewer = {n: t for n, t in tensors.items() if n != "model.layers.1.self_attn.k_proj.bias"}
    save_file(fewer, there / "model.safetensors")
    refused("a", "lack model.layers.1.self_attn.k_proj.bias")
    save_file({**tensors, "score.weight": torch.zeros(2, 2)}, there / "model.safetensors")
    refused("a", "score.weight [2, 2] has no place")
    assert to_flex(there, tmp_path / "b", "--no-checking") == 0
    save_file({**tensors, "model.norm.weight": torch.zeros(2)}, there / "model.safetensors")
    refused("a", "decoder.final_layernorm.weight is [2]")
    (there / "model.safetensors").write_bytes(b"nothing")
    refused("a", "cannot read")
    (there / "model.safetensors").unlink()
    refused("a", "has no model.safetensors")

    assert to_hf(tmp_path / "b", tmp_path / "c") == 0
    assert to_hf(tmp_path / "b", tmp_path / "c") == 1
    assert "is not empty" in capsys.readouterr().err
    assert to_hf(tmp_path / "b", tmp_path / "d", "--hf-model-type", "llama") == 1
    assert "this model is no llama: add_qkv_bias is True" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_bert_without_the_other_head_must_have_no_token_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = make("bert, masked only")
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight.fill_(0.5)
    model.save_pretrained(tmp_path / "there")
    assert to_flex(tmp_path / "there", tmp_path / "here", bert=True) == 1
    assert "has no sentence-order head" in capsys.readouterr().err


def test_tokenizer_files_go_along_and_the_checkpoint_names_them(tmp_path: Path) -> None:
    there, here, back = tmp_path / "there", tmp_path / "here", tmp_path / "back"
    make("qwen2", vocab_size=400).save_pretrained(there)
    (there / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    (there / "chat_template.jinja").write_text("{{ messages }}")
    (there / "README.md").write_text("not carried")
    assert to_flex(there, here) == 0
    shutil.rmtree(there)
    arguments = read_common(here)["arguments"]
    assert arguments["vocab_extra_ids"] == 80  # rows of the model without a token
    assert arguments["tokenizer_model"] == str(here / "hugging_face" / "tokenizer.json")
    config = parse(
        f"--use-checkpoint-args --load {here} --data-path x --seq-length 32 --lr 1e-3"
        " --micro-batch-tokens 64 --global-batch-size 4 --train-iters 1".split(),
        world_size=1,
        saved_values=partial(_arguments_of, here),
    )
    dropped = parse(
        f"--use-checkpoint-args --load {here} --data-path x --seq-length 32 --lr 1e-3"
        " --micro-batch-tokens 64 --global-batch-size 4 --train-iters 1 --hidden-dropout 0.25"
        " --tokenizer-model moved.json".split(),
        world_size=1,
        saved_values=partial(_arguments_of, here),
    )
    assert (dropped.model.hidden_dropout, dropped.tokenizer.tokenizer_model) == (0.25, "moved.json")
    model = config.model_config(320)
    assert (model.vocab_size, model.padded_vocab_size) == (400, 400)
    assert to_hf(here, back) == 0
    names = {path.name for path in back.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "README.md" not in names
    assert transformers.AutoTokenizer.from_pretrained(back).vocab_size >= 320


@pytest.mark.parametrize("name", ["gpt2", "llama 3", "qwen2"])
def test_a_sentencepiece_model_is_exported_as_transformers_reads_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [path.read_text() for path in (Path(__file__), Path(train_tokenizer.__file__))]
    model = tmp_path / "any name.model"
    model.write_bytes(train(texts, 420, "bpe", ["<|im_start|>", "<|im_end|>"]))
    make(name, vocab_size=420).save_pretrained(tmp_path / "there")
    weights = read_hugging_face(tmp_path / "there", "GPT")
    arguments = Namespace(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model), vocab_extra_ids=0
    )
    scratch = replace(weights, arguments=arguments, companions=None)
    write_flex(tmp_path / "here", scratch)
    assert to_hf(tmp_path / "here", tmp_path / "back") == 0
    remark = "takes the tokenizer of any qwen2 for Qwen's own" in capsys.readouterr().out
    assert remark is (name == "qwen2")
    kind = transformers.PreTrainedTokenizerFast if remark else transformers.AutoTokenizer
    theirs = kind.from_pretrained(tmp_path / "back")
    ours = SentencePieceTokenizer(str(model))
    for text in (*texts, "<|im_start|>user\n a  b\t1234 é\U0001f642<|im_end|>\n"):
        assert theirs.encode(text) == ours.encode(text)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert config.eos_token_id == theirs.eos_token_id == ours.eod
    # Back again, it is read from tokenizer.json and has the same ids.
    assert to_flex(tmp_path / "back", tmp_path / "again") == 0
    found = read_common(tmp_path / "again")["arguments"]
    assert found["tokenizer_type"] == "HuggingFaceTokenizer"
    again = HuggingFaceTokenizer(found["tokenizer_model"])
    assert again.encode(texts[0]) == ours.encode(texts[0])
    assert again.eod == ours.eod


def test_a_tokenizer_that_does_not_fit_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("qwen2").save_pretrained(tmp_path / "there")
    (tmp_path / "there" / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    assert to_flex(tmp_path / "there", tmp_path / "here") == 0
    assert "has 320 ids here and the model 90 rows" in capsys.readouterr().out
    assert read_common(tmp_path / "here")["arguments"]["tokenizer_type"] == "NullTokenizer"


def _arguments_of(directory: Path, _: Config) -> dict[str, Any]:
    arguments: dict[str, Any] = read_common(directory)["arguments"]
    return arguments


def test_use_checkpoint_args_sets_all_that_a_converted_model_needs(tmp_path: Path) -> None:
    for name in MODELS:
        make(name).save_pretrained(tmp_path / name / "there")
        assert to_flex(tmp_path / name / "there", tmp_path / name / "here", bert=is_bert(name)) == 0
        config = parse(
            f"--use-checkpoint-args --load {tmp_path.as_posix()} --mock-data --seq-length 32"
            " --micro-batch-tokens 64 --global-batch-size 4 --train-iters 1 --lr 1e-3".split(),
            architecture="bert" if is_bert(name) else "gpt",
            world_size=1,
            saved_values=partial(_arguments_of, tmp_path / name / "here"),
        )
        assert config.tokenizer.vocab_size == 89  # and the end token
        expected = flex_weights(tmp_path / name / "here").config
        ours = config.model_config(90)
        assert replace(ours, init_method_std=expected.init_method_std) == expected


def test_shards_are_cut_between_tensors() -> None:
    forms = {str(i): torch.empty(10, device="meta") for i in range(5)}
    assert [list(s.forms) for s in plan_shards(forms, 80)] == [["0", "1"], ["2", "3"], ["4"]]
    assert [s.file for s in plan_shards(forms, 200)] == ["model.safetensors"]
    assert len(plan_shards(forms, 1)) == 5


def _peak_above(start: int) -> int:
    """Bytes by which the memory of this process has been above ``start`` since the last reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0]) - start


def _reset_peak() -> int:
    """Forget the peak; returns the bytes in memory now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset here: {error}")
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmRSS:")[1].split()[0])


def test_a_few_layers_are_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LAZY_FILE", 1)
    name, layers = "llama 2", 24
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": layers}
    model = make(name, **sizes)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path / "there")
    del model
    start = _reset_peak()
    assert to_flex(tmp_path / "there", tmp_path / "here") == 0
    assert _peak_above(start) < 8 * layer
    start = _reset_peak()
    assert to_hf(tmp_path / "here", tmp_path / "back") == 0
    assert _peak_above(start) < 8 * layer
