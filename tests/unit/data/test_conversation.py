"""Forms that chat data come in: each gives the same conversation."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flex.data.conversation import (
    FORMATS,
    Unusable,
    formats_of,
    read_conversation,
    read_question,
)

SAID: list[tuple[str, str]] = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
SYSTEM = ("system", "s")


def share(messages: list[tuple[str, str]], **names: str) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", **names}
    return [{"from": names.get(role, role), "value": text} for role, text in messages]


def said(record: dict[str, Any], form: str) -> list[tuple[str, str]]:
    found = read_conversation(record, form)
    return [(m["role"], m["content"]) for m in found.messages]


RECORDS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": [{"role": r, "content": t} for r, t in SAID]}],
    "conversations": [
        {"conversations": share(SAID)},
        {"conversation": share(SAID, user="user", assistant="assistant")},
        {"conversations": [{"role": r, "content": t} for r, t in SAID]},
    ],
    "alpaca": [{"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}],
    "prompt-completion": [
        {
            "prompt": [{"role": r, "content": t} for r, t in SAID[:3]],
            "completion": [{"role": "assistant", "content": "d"}],
        }
    ],
}


@pytest.mark.parametrize("form", FORMATS)
def test_each_form_is_found_and_read(form: str) -> None:
    for record in RECORDS[form]:
        assert formats_of(record) == (form,)
        assert said(record, form) == SAID
        answers = (3,) if form == "prompt-completion" else (1, 3)
        assert read_conversation(record, form).answers == answers
        if form != "messages":
            with_system = read_conversation({**record, "system": "s"}, form)
            assert said({**record, "system": "s"}, form) == [SYSTEM, *SAID]
            assert with_system.answers == tuple(i + 1 for i in answers)


def test_texts_of_one_turn() -> None:
    assert said({"prompt": "a", "completion": "b"}, "prompt-completion") == SAID[:2]
    alpaca = {"instruction": "x", "input": "y", "output": "b"}
    assert said(alpaca, "alpaca") == [("user", "x\ny"), SAID[1]]


def test_tools_of_each_form() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    asked = {"role": "user", "content": "a"}
    for calls in ([{"function": {"name": "f", "arguments": '{"x": 1}'}}], [{"function": call}]):
        record = {
            "messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}],
            "tools": '[{"name": "f"}]',
        }
        found = read_conversation(record, "messages")
        assert found.messages[1]["tool_calls"][0]["function"] == call
        assert found.tools == [{"name": "f"}]
    shared = {"conversations": [*share([("user", "a")]),
              {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
              {"from": "observation", "value": "r"}, *share([("assistant", "b")])]}  # fmt: skip
    found = read_conversation(shared, "conversations")
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert found.answers == (1, 3)


def test_parts_of_text_are_joined_and_nothing_is_left_of_null() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = {"messages": [{"role": "user", "content": parts, "name": None},
                           {"role": "assistant", "content": "c", "tool_calls": None}]}  # fmt: skip
    found = read_conversation(record, "messages")
    assert found.messages == [
        {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "form", "reason"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "conversations", "unknown role"),
        ({"instruction": 1, "output": "x"}, "alpaca", "key 'instruction' is not a string"),
        ({"instruction": "x"}, "alpaca", "no key 'output'"),
        ({"instruction": "a", "output": "x", "history": ["a"]}, "alpaca", "'history' is not"),
        ({"prompt": "a", "completion": 1}, "prompt-completion", "key 'prompt' is not a list"),
        ({**RECORDS["messages"][0], "tools": "["}, "messages", "'tools' is not JSON"),
        ({**RECORDS["messages"][0], "tools": {}}, "messages", "'tools' is not a list"),
        ({**RECORDS["messages"][0], "chat_template_kwargs": 1}, "messages", "is not an object"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages", "'tool_calls'"),
        ({"instruction": "a", "output": "x", "history": 5}, "alpaca", "'history' is not"),
        ({"instruction": "a", "output": "x", "history": {"a": "b"}}, "alpaca", "'history' is not"),
        ({"instruction": "a", "output": " \n"}, "alpaca", "an empty answer"),
        ({"instruction": "a", "output": "b", "history": [["a", ""]]}, "alpaca", "an empty answer"),
        ({"prompt": "a", "completion": ""}, "prompt-completion", "an empty answer"),
        ({**RECORDS["messages"][0], "tools": "[" * 200_000}, "messages", "'tools' is not JSON"),
        *(
            (
                {**RECORDS["messages"][0], "chat_template_kwargs": {key: []}},
                "messages",
                f"has '{key}'",
            )
            for key in ("messages", "tools", "add_generation_prompt")
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": "0"}]},
            "messages",
            "'weight'",
        ),
    ],
)
def test_what_is_no_conversation_says_why(record: dict[str, Any], form: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        read_conversation(record, form)


def test_calls_that_are_nested_without_end_stay_texts() -> None:
    deep = "[" * 200_000
    call = {"function": {"name": "f", "arguments": deep}}
    record = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert read_conversation(record, "messages").messages[0]["tool_calls"] == [call]
    shared = {"conversations": [{"from": "function_call", "value": deep}]}
    assert said(shared, "conversations") == [("assistant", deep)]


def test_a_question_ends_before_the_answer() -> None:
    asked = [{"role": r, "content": t} for r, t in SAID[:3]]
    found = read_question({"messages": asked, "tools": [1], "chat_template_kwargs": {"a": 1}})
    assert (found.messages, found.answers, found.tools, found.more) == (asked, (), [1], {"a": 1})
    found = read_question({"conversations": share(SAID[:1]), "system": "s"})
    assert [m["role"] for m in found.messages] == ["system", "user"]
    answered = {"messages": [{"role": "assistant", "content": "a"}]}
    for record, reason in (({"text": "a"}, "no list of messages"), (answered, "leave that out")):
        with pytest.raises(Unusable, match=reason):
            read_question(record)
