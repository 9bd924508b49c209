"""Completions against transformers', with and without kept keys, and how tokens are drawn."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_flex.checkpoint.conversion.flex import read_flex, write_flex
from megatron_flex.checkpoint.conversion.hugging_face.directory import read_hugging_face
from megatron_flex.data.prompts import Prompts, read_asked
from megatron_flex.loop.local_model import local_blocks
from megatron_flex.model.decode import complete, ended
from megatron_flex.model.head import HeadBlock
from megatron_flex.model.sampling import Sampler, Sampling
from megatron_flex.tokenizers.chat_template import find_template
from megatron_flex.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.unit.checkpoint.hugging_face import make, to_flex, to_hf
from tests.unit.data.chats import template, write_tokenizer
from tests.unit.model.support import build_model, hidden_states, make_batch, make_config
from tools import generate

PROMPTS = ("5 6 7 8 9 10 11 12", "3", "40 2 40 2 17")


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The tool's status, and what it says."""
    status = generate.main([str(word) for word in words])
    return status, capsys.readouterr().err


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def export(name: str, where: Path) -> Path:
    """A model as transformers made it, as our checkpoint, and as that is written back."""
    make(name).save_pretrained(where / "made")
    assert to_flex(where / "made", where / "flex") == 0
    assert to_hf(where / "flex", where / "hf") == 0
    return where


@pytest.fixture(scope="module", params=["llama 3", "qwen2, tied", "gpt2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models."""
    return export(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of them, where any will do."""
    return export("llama 3", tmp_path_factory.mktemp("small"))


def test_greedy_completions_are_those_of_transformers(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported / "hf").eval()
    model.generation_config.eos_token_id = None
    for source in (("--load", exported / "flex"), ("--load-hf", exported / "hf")):
        out = tmp_path / "out.jsonl"
        status, err = run(capsys, *source, "--prompts", *PROMPTS, "--num-tokens-to-generate", 24,
                          "--output-path", out)  # fmt: skip
        assert status == 0, err
        for text, found in zip(PROMPTS, records(out), strict=True):
            ids = torch.tensor([[int(word) for word in text.split()]])
            expected = model.generate(
                ids, max_new_tokens=24, do_sample=False, pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )[0, ids.shape[1] :].tolist()  # fmt: skip
            length = len(found["tokens"])  # GPT-2's end token is one of the ids
            assert found["tokens"] == expected[:length]
            assert length == 24 or found["ended"]


def test_kept_keys_change_nothing(exported: Path) -> None:
    blocks = local_blocks(read_hugging_face(exported / "hf", "GPT"), torch.device("cpu"))
    prompt = [5, 6, 7, 8]
    *_, found = complete(blocks, prompt, 20, lambda logits: int(logits.argmax()))
    config, known = blocks[0].config, list(prompt)
    head = blocks[-1]
    assert isinstance(head, HeadBlock)
    with torch.no_grad():
        for _ in range(20):
            batch = replace(make_batch([len(known)], config), tokens=torch.tensor(known))
            known.append(int(head.logits(hidden_states(blocks, batch))[-1].argmax()))
    assert list(found.tokens) == known[4:]
    assert found.stop == 0


def test_a_completion_ends_at_a_row_of_tokens_and_at_the_last_position() -> None:
    assert [ended([1, 2, 3], stops) for stops in ([(3,)], [(1, 2)], [(2, 3)], [()], [])] == [
        1, 0, 2, 0, 0,
    ]  # fmt: skip
    assert ended([1, 2, 3], [(9, 3)]) == 0
    config = make_config(max_position_embeddings=12)
    blocks = build_model(config)
    for block in blocks:
        block.eval()
    given: Iterator[int] = iter([7, 4, 9, 4, 9, 9])
    *_, found = complete(blocks, [1, 2], 6, lambda _: next(given), stops=[(4, 9), (3,)])
    assert (found.tokens, found.stop, found.said) == ((7, 4, 9), 2, (7,))
    *_, found = complete(blocks, [1] * 9, 50, lambda _: 5)
    assert found.tokens == (5, 5, 5)
    (one,) = complete(blocks, [1] * 11, 50, lambda _: 5)
    assert one.tokens == (5,)
    for prompt, reason in (([], "is empty"), ([1] * 12, "has 12 tokens")):
        with pytest.raises(ValueError, match=reason):
            next(complete(blocks, prompt, 1, lambda _: 5))


def test_a_seed_and_a_prompt_decide_what_is_drawn(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(*words: object) -> list[list[int]]:
        out = tmp_path / "drawn.jsonl"
        status, err = run(capsys, "--load", small / "flex", "--num-tokens-to-generate", 12,
                          "--output-path", out, *words)  # fmt: skip
        assert status == 0, err
        return [record["tokens"] for record in records(out)]

    same = ("--prompts", "5 6 7", "5 6 7")
    first = drawn(*same, "--temperature", 0.9, "--top-p", 0.95)
    assert first == drawn(*same, "--temperature", 0.9, "--top-p", 0.95)
    assert first[0] != first[1]
    assert first[:1] == drawn("--prompts", "5 6 7", "--temperature", 0.9, "--top-p", 0.95)
    assert first != drawn(*same, "--temperature", 0.9, "--top-p", 0.95, "--seed", 2)
    assert drawn(*same, "--top-k", 1) == drawn(*same)
    assert drawn(*same, "--temperature", 1e-300) == drawn(*same)


def test_tokens_are_drawn_from_those_that_transformers_leaves() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3
    for sampling in (
        Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8), Sampling(1.0, top_k=20, top_p=0.6),
    ):  # fmt: skip
        left = logits[None] / sampling.temperature
        if sampling.top_k:
            left = transformers.TopKLogitsWarper(sampling.top_k)(None, left)
        if sampling.top_p:
            left = transformers.TopPLogitsWarper(sampling.top_p)(None, left)
        expected = left[0].softmax(0)
        sampler, count = Sampler(sampling, 0), 4000
        found = torch.zeros(50)
        for _ in range(count):
            found[sampler.choose(logits)] += 1
        assert set(found.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
        assert (found / count - expected).abs().max() < 0.05


def test_conversations_end_with_the_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make("qwen2", vocab_size=420, max_position_embeddings=256)
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", template("qwen-2.5"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"),
        chat_template=template("qwen-2.5"),
    )
    said = [{"role": "user", "content": "who are you"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"messages": said}) + '\n{"text": "a text"}\nas it is\n'
    )
    out = tmp_path / "out.jsonl"
    status, err = run(capsys, "--load-hf", tmp_path / "hf", "--prompt-file",
                      tmp_path / "asked.jsonl", "--output-path", out)  # fmt: skip
    assert status == 0, err
    found = records(out)
    assert [r["prompt"] for r in found] == [text, "a text", "as it is"]
    assert found[0]["prompt_tokens"] == tokenizer(text).input_ids
    ours = HuggingFaceTokenizer(str(tmp_path / "hf"))
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")]
    source = find_template(ours, tmp_path / "hf", None)
    assert Prompts(ours, source).stops() == [(end,) for end in ends]
    assert Prompts(ours, None).stops() == [(ends[0],)]
    # All logits are equal: the first token is taken, and the directory says that it ends texts.
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    for end in (0, [7, 0]):
        (tmp_path / "hf" / "generation_config.json").write_text(
            json.dumps({**config, "eos_token_id": end})
        )
        status, err = run(capsys, "--load-hf", tmp_path / "hf", "--chat", "--prompts",
                          "who are you", "--output-path", out)  # fmt: skip
        assert status == 0, err
        assert [records(out)[0][key] for key in ("prompt", "tokens", "ended")] == [text, [0], True]


def test_a_prompt_is_a_line_whatever_the_files_name(tmp_path: Path) -> None:
    for name in ("asked.txt", "asked.jsonl", "asked"):
        (tmp_path / name).write_text('one text\n\n{"text": "another"}\nand one more')
        found = read_asked(str(tmp_path / name), "--prompt-file")
        assert found == ["one text", "another", "and one more"]
    (tmp_path / "marked").write_text('{"text": "after a mark"}\n', encoding="utf-8-sig")
    assert read_asked(str(tmp_path / "marked"), "--prompt-file") == ["after a mark"]


def test_models_and_tokenizers_that_do_not_fit_are_named(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("bert").save_pretrained(tmp_path / "bert")
    status, err = run(capsys, "--load-hf", tmp_path / "bert", "--prompts", "1")
    assert (status, err.count("only a GPT completes texts")) == (1, 1)
    other = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model")
    write_tokenizer(tmp_path / "other")
    status, err = run(capsys, "--load", small / "flex", *other, tmp_path / "other",
                      "--prompts", "hello there")  # fmt: skip
    assert status == 1
    assert "and the model knows 90: the tokenizer is not the model's" in err


def test_a_tokenizer_beside_the_checkpoints_is_found_from_anywhere(
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="runs/tokenizer")
    weights = replace(read_flex(small / "flex"), arguments=known, companions=None)
    saved = tmp_path / "there" / "runs" / "saved"
    write_flex(saved, weights)
    words = ("--load", saved, "--prompts", "1", "--num-tokens-to-generate", 1)
    monkeypatch.chdir(small)
    status, err = run(capsys, *words)
    assert status == 1
    assert f"--tokenizer-model runs/tokenizer: no such file in {small}: give the path" in err
    (saved.parent / "tokenizer").mkdir()
    write_tokenizer(saved.parent / "tokenizer")
    assert read_flex(saved).arguments.tokenizer_model == str(saved.parent / "tokenizer")
    monkeypatch.chdir(tmp_path / "there")
    assert read_flex(saved).arguments.tokenizer_model == "runs/tokenizer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is nothing to complete"),
        (("--prompts", "1", "--top-p", "2"), "--top-p must be from 0 to 1"),
        (("--prompts", "1", "--top-k", "3", "--temperature", "0"), "have no effect"),
        (("--prompts", "1", "--num-tokens-to-generate", "0"), "must be at least 1"),
        (("--prompts", "x"), "takes texts of token ids"),
        (("--prompts", "1", "--temperature", "nan"), "--temperature must be at least 0"),
        (("--prompts", "1", "--output-path", "/nowhere/x"), "a directory that is there"),
        (("--prompts", ""), "has no tokens"),
        (("--prompts", "1", "--chat-template", "x"), "add --chat"),
        (("--prompts", " ".join(["1"] * 64)), "has 64 tokens"),
        (("--prompts", "1", "--ckpt-step", "9"), "9"),
        (("--prompt-file", "/nowhere"), "--prompt-file /nowhere: cannot read it"),
    ],
)
def test_what_cannot_be_is_one_message(
    small: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = run(capsys, "--load", small / "flex", *words)
    assert status == 1
    assert message in err
    assert err.count("\n") == 1
