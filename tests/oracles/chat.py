"""Conversations as three published models read them, and which characters count, written by hand.

No template is run here: each model's format is spelled out, piece by piece, with whether the piece
is the assistant's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import tokenizers

Message = dict[str, Any]
Piece = tuple[str, bool]

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are"
    " provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments"
    " within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
_WORDS = [
    *("hello", " there", "\n", "\n\n", " ", "  ", "42", "naïve", "数据", "\U0001f642", "e\u0301"),
    *("<|user|>", "assistant", "</s>", "def f(x):", "\t", ".", "ROLE", "{{ x }}", "{% y %}"),
]


def chatml(messages: list[Message], tools: None = None) -> Iterator[Piece]:
    for m in messages:
        yield f"<|im_start|>{m['role']}\n", False
        yield f"{m['content']}<|im_end|>", m["role"] == "assistant"
        yield "\n", False


def llama3(messages: list[Message], tools: None = None) -> Iterator[Piece]:
    yield "<|begin_of_text|>", False
    for m in messages:
        yield f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False
        yield f"{m['content'].strip()}<|eot_id|>", m["role"] == "assistant"


def qwen(messages: list[Message], tools: list[Any] | None = None) -> Iterator[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else QWEN_SYSTEM
    yield f"<|im_start|>system\n{system}", False
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        yield _TOOLS + listed + _CALLS, False
    else:
        yield "<|im_end|>\n", False
    previous = ""
    for m in messages[1:] if messages[0]["role"] == "system" else messages:
        role, content = m["role"], m["content"]
        if previous == "tool" and role != "tool":
            yield "<|im_end|>\n", False
        if role == "tool":
            start = "" if previous == "tool" else "<|im_start|>user"
            yield f"{start}\n<tool_response>\n{content}\n</tool_response>", False
        elif role == "assistant" and m.get("tool_calls"):
            text = "".join(
                '\n<tool_call>\n{"name": "' + c["function"]["name"] + '", "arguments": '
                + json.dumps(c["function"]["arguments"], ensure_ascii=False) + "}\n</tool_call>"
                for c in m["tool_calls"]
            )  # fmt: skip
            text = ("\n" + content if content else "") + text
            yield f"<|im_start|>assistant{text[0]}", False
            yield f"{text[1:]}<|im_end|>", True
            yield "\n", False
        else:
            yield f"<|im_start|>{role}\n", False
            yield f"{content}<|im_end|>", role == "assistant"
            yield "\n", False
        previous = role
    if previous == "tool":
        yield "<|im_end|>\n", False


FORMATS = {"chatml": chatml, "llama-3": llama3, "qwen-2.5": qwen}


def text_of(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def expected(tokenizer: tokenizers.Tokenizer, pieces: list[Piece]) -> tuple[list[int], list[bool]]:
    """Token ids of the whole, and whether each has a character that counts; what is after the last
    one that does is left out."""
    counts = [flag for text, flag in pieces for _ in text]
    encoded = tokenizer.encode(text_of(pieces), add_special_tokens=False)
    mask = [any(counts[a:b]) for a, b in encoded.offsets]
    while mask and not mask[-1]:
        mask.pop()
    return encoded.ids[: len(mask)], mask


def random_text(draw: random.Random, longest: int) -> str:
    return "".join(draw.choices(_WORDS, k=draw.randint(1, longest)))


def random_conversation(
    draw: random.Random, *, calls: bool, longest: int = 12
) -> tuple[list[Message], list[Any] | None]:
    """Messages that a format takes, with at least one answer; with ``calls`` also tools."""
    messages: list[Message] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": random_text(draw, longest)})
    tools = None
    if calls and draw.random() < 0.5:
        tools = [{"type": "function", "function": {"name": "größe", "parameters": {"n": 1}}}]
    for _ in range(draw.randint(1, 5)):
        for _ in range(draw.choice((1, 1, 1, 2))):
            messages.append({"role": "user", "content": random_text(draw, longest)})
        while calls and draw.random() < 0.4:
            call = {"name": "größe", "arguments": {"text": random_text(draw, 3)}}
            said = random_text(draw, 3) if draw.random() < 0.5 else ""
            several = [{"type": "function", "function": call}] * draw.randint(1, 2)
            messages.append({"role": "assistant", "content": said, "tool_calls": several})
            messages += [{"role": "tool", "content": random_text(draw, 3)}] * len(several)
        answer = ("" if draw.random() < 0.5 else "\n") + "x" + random_text(draw, longest)
        messages.append({"role": "assistant", "content": answer})
    if draw.random() < 0.3:
        messages.append({"role": "user", "content": random_text(draw, longest)})
    return messages, tools
