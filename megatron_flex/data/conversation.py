"""Conversations as people write them down: the forms that chat data have, read as one.

==================== ==========================================================================
``messages``         ``[{"role": "user", "content": "…"}, …]``, as for OpenAI's and Hugging Face's
``conversations``    ShareGPT: ``[{"from": "human", "value": "…"}, {"from": "gpt", …}, …]``
``alpaca``           ``instruction``, ``input`` (may be missing) and ``output``; ``history``
``prompt-completion`` texts, or lists of messages, of which only the completion's count
==================== ==========================================================================

Beside them a record may have ``system`` (a text), ``tools`` (a list, or its JSON text) and
``chat_template_kwargs`` (what else the template is told).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
Message = dict[str, Any]

ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
EMPTY_ANSWER = "an empty answer"
_KNOWN = {"user", ASSISTANT, "system", "tool", "function", "developer"}


class Unusable(ValueError):
    """Why a record is no conversation that can be trained on."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each with ``role``, and ``content`` or ``tool_calls``.
        answers: numbers of the assistant's messages that the loss is on.
        tools: what the assistant may call.
        more: what else the template is told.
    """

    messages: list[Message]
    answers: tuple[int, ...]
    tools: list[Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def _messages(record: Record) -> tuple[list[Message], int]:
    return [_message(m) for m in _list(record, "messages")], 0


def _conversations(record: Record) -> tuple[list[Message], int]:
    key = "conversations" if "conversations" in record else "conversation"
    return [_message(m) for m in _list(record, key)], 0


def _alpaca(record: Record) -> tuple[list[Message], int]:
    messages = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [None]:
        if not (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        ):
            raise Unusable("'history' is not a list of pairs of texts")
        messages += [_said("user", pair[0]), _answered(pair[1])]
    asked = [_text(record, "instruction")]
    if record.get("input"):
        asked.append(_text(record, "input"))
    messages.append(_said("user", "\n".join(asked)))
    return [*messages, _answered(_text(record, "output"))], 0


def _prompt_completion(record: Record) -> tuple[list[Message], int]:
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return [_said("user", record["prompt"]), _answered(record["completion"])], 0
    prompt = [_message(m) for m in _list(record, "prompt")]
    return prompt + [_message(m) for m in _list(record, "completion")], len(prompt)


_READERS: dict[str, Callable[[Record], tuple[list[Message], int]]] = {
    "messages": _messages,
    "conversations": _conversations,
    "alpaca": _alpaca,
    "prompt-completion": _prompt_completion,
}
FORMATS = tuple(_READERS)


def formats_of(record: Record) -> tuple[str, ...]:
    """The forms that a record seems to have, by its keys."""
    fits = {
        "messages": isinstance(record.get("messages"), list),
        "conversations": isinstance(record.get("conversations", record.get("conversation")), list),
        "alpaca": "instruction" in record and "output" in record,
        "prompt-completion": "prompt" in record and "completion" in record,
    }
    return tuple(name for name in FORMATS if fits[name])


def form_of(record: Record, usual: str) -> str:
    """The form of a record: its own where it seems to have exactly one, else the usual one."""
    forms = formats_of(record)
    return forms[0] if len(forms) == 1 else usual


def read_conversation(record: Record, form: str) -> Conversation:
    """The conversation of a record.

    Raises:
        Unusable: it is none, or the assistant says nothing in it.
    """
    messages, first = _READERS[form](record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and form != "messages":
        messages, first = [_said("system", system), *messages], first + 1
    answers = tuple(
        i
        for i, message in enumerate(messages)
        if i >= first and message["role"] == ASSISTANT and message.get("weight", 1) != 0
    )
    if not answers:
        raise Unusable("the assistant says nothing")
    return Conversation(messages, answers, _tools(record), _more(record))


def read_question(record: Record) -> Conversation:
    """A conversation that the assistant is to go on with; nothing in it is an answer to learn.

    Raises:
        Unusable: it is none, or the assistant has answered already.
    """
    forms = [form for form in formats_of(record) if form in ("messages", "conversations")]
    if not forms:
        raise Unusable("it has no list of messages")
    messages, _ = _READERS[forms[0]](record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and forms[0] != "messages":
        messages = [_said("system", system), *messages]
    if messages[-1]["role"] == ASSISTANT:
        raise Unusable("it ends with an answer: leave that out")
    return Conversation(messages, (), _tools(record), _more(record))


def _more(record: Record) -> dict[str, Any]:
    """What else the template is told."""
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise Unusable("'chat_template_kwargs' is not an object")
    for key in ("messages", "tools"):
        if key in more:
            raise Unusable(f"'chat_template_kwargs' has '{key}', which is a key of the line itself")
    if "add_generation_prompt" in more:
        raise Unusable("'chat_template_kwargs' has 'add_generation_prompt', which is not for data")
    return more


def _tools(record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise Unusable("'tools' is not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise Unusable("'tools' is not a list")
    return tools or None


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _answered(content: str) -> Message:
    if not content.strip():
        raise Unusable(EMPTY_ANSWER)
    return _said(ASSISTANT, content)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise Unusable(f"key '{key}' is not a string" if key in record else f"no key '{key}'")
    return value


def _list(record: Record, key: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise Unusable(f"no key '{key}'" if key not in record else f"key '{key}' is not a list")
    if not value:
        raise Unusable(f"'{key}' is empty")
    return value


def _message(given: Any) -> Message:
    """A message with a role; ShareGPT's names become the usual ones."""
    if not isinstance(given, dict):
        raise Unusable("a message is not an object")
    message = {key: value for key, value in given.items() if value is not None}
    named = message.pop("from", None)
    role = message.get("role", named)
    if not isinstance(role, str):
        raise Unusable("a message has no role")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    message["role"] = _ROLES.get(role, role)
    if "role" not in given and message["role"] not in _KNOWN:
        raise Unusable(f"unknown role '{role}'")
    message["content"] = content = _content(message)
    if role == "function_call" and "tool_calls" not in message:
        _call(message, content)
    calls = message.get("tool_calls")
    if not isinstance(calls or [], list):
        raise Unusable("'tool_calls' is not a list")
    if calls:
        message["tool_calls"] = [_parsed(call) for call in calls]
    elif message["role"] == ASSISTANT and not (content.strip() or message.get("reasoning_content")):
        raise Unusable(EMPTY_ANSWER)
    if not isinstance(message.get("weight", 1), int | float):
        raise Unusable("a message's 'weight' is not a number")
    return message


def _content(message: Message) -> str:
    content = message.get("content", "")
    if isinstance(content, list):  # parts, as multi-modal models take them
        parts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable("content that is not text")
        content = "".join(parts)
    if not isinstance(content, str):
        raise Unusable("content that is not text")
    return content


def _call(message: Message, content: str) -> None:
    """ShareGPT's ``function_call`` is the JSON of one call or of several."""
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError):
        return
    calls = calls if isinstance(calls, list) else [calls]
    if all(isinstance(call, dict) and "name" in call for call in calls):
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        message["content"] = ""


def _parsed(call: Any) -> Any:
    """A call whose arguments are an object, as templates expect; OpenAI's are JSON text."""
    if not isinstance(call, dict):
        raise Unusable("a tool call is not an object")
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _parsed(inner)}
    if isinstance(call.get("arguments"), str):
        try:
            return {**call, "arguments": json.loads(call["arguments"])}
        except (ValueError, RecursionError):
            return call
    return call
