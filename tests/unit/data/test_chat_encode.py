"""Which tokens of conversations count: to the token, as written down by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from megatron_flex.data import turns
from megatron_flex.data.chat_encode import CHAT, ChatEncoder, ChatOptions, owners, sequences
from megatron_flex.data.encode import Document, EncodeOptions
from megatron_flex.data.jsonl import RawLine
from megatron_flex.data.turns import REWRITES, Turns
from megatron_flex.tokenizers.base import TokenizerError
from megatron_flex.tokenizers.chat_template import ChatTemplate, find_template
from megatron_flex.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_flex.tokenizers.null import NullTokenizer
from tests.oracles import chat as oracle
from tests.unit.data.chats import template, write_tokenizer

HELLO = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "how"},
    {"role": "assistant", "content": "fine"},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encoder(
    directory: Path, text: str | None = None, form: str = "messages", *, everything: bool = False,
    eod: bool = False,
) -> ChatEncoder:  # fmt: skip
    tokenizer = HuggingFaceTokenizer(str(directory))
    if text is not None:
        (directory / "given.jinja").write_text(text)
    given = None if text is None else str(directory / "given.jinja")
    source = find_template(tokenizer, directory, given)
    options = EncodeOptions((CHAT,), eod_keys=(CHAT,) if eod else ())
    return ChatEncoder(tokenizer, options, ChatOptions(form, source, everything))


def line(record: dict[str, Any] | str) -> RawLine:
    content = record if isinstance(record, str) else json.dumps(record)
    return RawLine("in.jsonl", 2, content.encode(), 0)


def documents(made: ChatEncoder, record: dict[str, Any]) -> list[Document]:
    found, notes = made.several(line(record))
    assert found is not None, notes
    return [document[CHAT] for document in found]


def mask_of(document: Document) -> list[bool]:
    return [i % 2 == 1 for i, length in enumerate(document.lengths) for _ in range(length)]


def parts(directory: Path, document: Document) -> list[str]:
    """The texts of a document's sequences: those at odd places count."""
    tokenizer = HuggingFaceTokenizer(str(directory))
    borders = np.cumsum([0, *document.lengths])
    return [
        tokenizer.decode(document.ids[a:b])
        for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", sorted(oracle.FORMATS))
def test_masks_are_those_written_down_by_hand(
    plain: Path, name: str, count: Callable[[int, int], int]
) -> None:
    made = encoder(plain, template(name))
    by_hand = tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json"))
    draw = random.Random(7)
    for _ in range(count(350, 3000)):
        messages, tools = oracle.random_conversation(draw, calls=name == "qwen-2.5")
        (document,) = documents(made, {"messages": messages, "tools": tools})
        pieces = list(oracle.FORMATS[name](messages, tools))  # type: ignore[operator]
        ids, mask = oracle.expected(by_hand, pieces)
        assert document.ids == ids
        assert mask_of(document) == mask


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello<|im_end|>",
            "\n<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n", "fine<|im_end|>"]),
        ("llama-3", [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n", "hello<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nhow<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n", "fine<|eot_id|>"]),
        ("qwen-2.5", [
            f"<|im_start|>system\n{oracle.QWEN_SYSTEM}<|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello<|im_end|>",
            "\n<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n", "fine<|im_end|>"]),
    ],
)  # fmt: skip
def test_two_turns_of_three_models(plain: Path, name: str, expected: list[str]) -> None:
    made = encoder(plain, template(name))
    (document,) = documents(made, {"messages": HELLO})
    assert parts(plain, document) == expected
    (ended,) = documents(encoder(plain, template(name), eod=True), {"messages": HELLO})
    assert ended.ids == [*document.ids, HuggingFaceTokenizer(str(plain)).eod]
    assert ended.lengths == [*document.lengths[:-1], document.lengths[-1] + 1]


def test_all_tokens_count_where_that_is_wanted_and_parts_end_with_turns(plain: Path) -> None:
    made = encoder(plain, template("chatml"), everything=True)
    (document,) = documents(made, {"messages": HELLO})
    assert parts(plain, document) == [
        "", "<|im_start|>user\nhi<|im_end|>\n", "", "<|im_start|>assistant\nhello<|im_end|>\n",
        "", "<|im_start|>user\nhow<|im_end|>\n", "", "<|im_start|>assistant\nfine<|im_end|>\n",
    ]  # fmt: skip


def test_a_message_of_weight_zero_and_what_comes_last_do_not_count(plain: Path) -> None:
    made = encoder(plain, template("chatml"))
    weighed = [*HELLO[:1], {**HELLO[1], "weight": 0}, *HELLO[2:], HELLO[0]]
    (document,) = documents(made, {"messages": weighed})
    said = parts(plain, document)
    assert len(said) == 2
    assert said[1] == "fine<|im_end|>"
    assert "hello<|im_end|>" in said[0]


MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        "{% if m['role'] == 'assistant' %}{%- generation -%}"
        "{{ m['content'] | trim + '<|eot_id|>' }}"
        "{%- endgeneration -%}{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", sorted(MARKED))
def test_generation_blocks_give_the_masks_of_transformers(plain: Path, name: str) -> None:
    marked, unmarked = encoder(plain, MARKED[name]), encoder(plain, template(name))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    draw = random.Random(3)
    for _ in range(40):
        messages, _ = oracle.random_conversation(draw, calls=False)
        (document,) = documents(marked, {"messages": messages})
        assert [document] == documents(unmarked, {"messages": messages})
        result = theirs.apply_chat_template(
            messages, chat_template=MARKED[name], return_dict=True, tokenize=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        count = len(document.ids)
        assert result["input_ids"][:count] == document.ids
        assert result["assistant_masks"] == [int(m) for m in mask_of(document)] + [0] * (
            len(result["input_ids"]) - count
        )


INDENTED = """
{% for m in messages %}
    {% if m.role == 'skipped' %}{% continue %}{% endif %}
    {{ m.role | upper }}: {{ m.content }}
    {%- if tools %}
        {{ tools | tojson(indent=2) }}
    {% endif %}
{% endfor %}
"""


@pytest.mark.parametrize("text", [template("qwen-2.5"), template("llama-3"), INDENTED])
def test_texts_are_those_of_transformers(plain: Path, text: str) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    (plain / "given.jinja").write_text(text)
    ours = ChatTemplate(
        find_template(HuggingFaceTokenizer(str(plain)), plain, str(plain / "given.jinja"))
    )
    draw = random.Random(4)
    for _ in range(20):
        messages, tools = oracle.random_conversation(draw, calls=True)
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                messages, tools=tools, chat_template=text, tokenize=False,
                add_generation_prompt=prompt,
            )  # fmt: skip
            found = ours.render(messages, tools=tools, add_generation_prompt=prompt)
            assert found.text == expected


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_rewrites_earlier_answers_makes_a_sample_of_each(plain: Path) -> None:
    made = encoder(plain, THINKING)
    record: dict[str, Any] = {"messages": [
        HELLO[0], {"role": "assistant", "content": "<think>a</think>hello"},
        HELLO[2], {"role": "assistant", "content": "fine"},
        HELLO[0], {"role": "assistant", "content": "<think>b</think>bye"},
    ]}  # fmt: skip
    found, notes = made.several(line(record))
    assert found is not None
    assert notes == (REWRITES,)
    first, second = (parts(plain, d[CHAT]) for d in found)
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert first == [start, "<think>a</think>hello<|im_end|>"]
    # The second answer is the same whether another follows or not; the third comes last.
    assert second == [
        start + "hello<|im_end|>\n<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n",
        "fine<|im_end|>",
        "\n" + start, "<think>b</think>bye<|im_end|>",
    ]  # fmt: skip
    assert made.several(line({"messages": HELLO}))[1] == ()


def test_an_end_token_that_only_the_last_answer_has_is_learnt_for_each(plain: Path) -> None:
    made = encoder(
        plain,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last and m.role =="
        " 'assistant' %}{{ eos_token }}"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    )
    found, notes = made.several(line({"messages": HELLO}))
    assert found is not None
    assert notes == (REWRITES,)
    assert [parts(plain, d[CHAT])[-1] for d in found] == [
        "hello<|endoftext|>", "fine<|endoftext|>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "record", "note"),
    [
        ("chatml", {"messages": HELLO[:1]}, "the assistant says nothing"),
        ("chatml", {"text": "a"}, "no key 'messages'"),
        ("chatml", {"messages": []}, "'messages' is empty"),
        ("chatml", {"messages": "a"}, "key 'messages' is not a list"),
        ("chatml", {"messages": ["a"]}, "a message is not an object"),
        ("chatml", {"messages": [{"content": "a"}]}, "a message has no role"),
        ("chatml", {"messages": [HELLO[0], {"role": "assistant", "content": " "}]},
         "an empty answer"),
        ("chatml", {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "content that is not text"),
        ("chatml", '{"messages": [{"role": "user", "content": "\\ud83d"},'
         ' {"role": "assistant", "content": "a"}]}', "invalid UTF-8"),
        ("chatml", "{", "broken JSON"),
        ("{% if messages[0].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}",
         {"messages": HELLO[1:]}, "chat template: no"),
        ("{{ messages[0].content | upper }}<e>", {"messages": HELLO[1:2]},
         "the chat template does not let the assistant begin"),
        ("{{ raise_exception('roles must take turns') }}", {"messages": HELLO},
         "chat template: roles must take turns"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}<answer>{% endif %}", {"messages": HELLO},
         "the chat template's generation prompt is not how it begins the answer"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<e>{% endfor %}"
         "{% if add_generation_prompt %}<assistant>{% endif %}",
         {"messages": [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": {}}}]}]},
         "the chat template prints nothing of an answer but its end"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_says_why(
    plain: Path, text: str, record: dict[str, Any] | str, note: str
) -> None:
    made = encoder(plain, text if "{" in text else template(text))
    found, notes = made.several(line(record))
    assert found is None
    assert notes[-1].startswith(note)


def test_the_assistant_may_begin_where_a_template_looks_at_the_first_message(plain: Path) -> None:
    (document,) = documents(encoder(plain, template("qwen-2.5")), {"messages": HELLO[1:]})
    assert parts(plain, document) == [
        f"<|im_start|>system\n{oracle.QWEN_SYSTEM}<|im_end|>\n<|im_start|>assistant\n",
        "hello<|im_end|>",
        "\n<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n",
        "fine<|im_end|>",
    ]


def test_how_answers_end_is_found_where_a_system_message_must_come_first(plain: Path) -> None:
    first = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + template("chatml")
    )
    made = encoder(plain, first)
    (document,) = documents(made, {"messages": [{"role": "system", "content": "s"}, *HELLO[:2]]})
    assert parts(plain, document)[1:] == ["hello<|im_end|>"]
    never = ChatTemplate(replace(find_template(NullTokenizer(4), None, None), text="{{ 1 / 0 }}"))
    assert "is not clear" in Turns(never).remark


LONG = {"chatml": template("chatml"), "llama-3": template("llama-3"), "qwen": template("qwen-2.5"),
        "marked": MARKED["chatml"], "marked, trimmed": MARKED["llama-3"]}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LONG))
def test_answers_of_long_conversations_are_found_as_those_of_short_ones(
    plain: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    made = encoder(plain, LONG[name])
    for calls in (False, True):
        messages: list[dict[str, Any]] = []
        while sum(m["role"] == "assistant" for m in messages) < 48:
            more, tools = oracle.random_conversation(draw, calls=calls and name == "qwen")
            messages += more if not messages else [m for m in more if m["role"] != "system"]
        record = {"messages": messages, "tools": tools}
        monkeypatch.setattr(turns, "MANY", 24)
        quick = made.several(line(record))
        monkeypatch.setattr(turns, "MANY", 1 << 30)
        assert quick == made.several(line(record))


@pytest.mark.parametrize("name", sorted(LONG))
def test_the_work_for_a_conversation_grows_with_its_turns(
    plain: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rendered = encoder(plain, LONG[name]), 0
    plainly = ChatTemplate.render

    def counted(self: ChatTemplate, *words: Any, **more: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return plainly(self, *words, **more)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    (document,) = documents(made, {"messages": HELLO * 300})
    assert sum(1 for length in document.lengths[1::2] if length) == 600
    assert rendered < 40


def test_where_long_conversations_are_rewritten_each_answer_is_looked_at(plain: Path) -> None:
    made = encoder(plain, THINKING)
    thought = {"role": "assistant", "content": "<think>a</think>hello"}
    record = {
        "messages": [m for i in range(30) for m in (HELLO[0], thought if i == 9 else HELLO[1])]
    }
    found, notes = made.several(line(record))
    assert found is not None
    assert len(found) == 2
    assert notes == (REWRITES,)
    # All of it is otherwise with every turn, and answers stand in it as they do in others.
    counting = encoder(plain, "{{ messages | length }}\n" + template("chatml"))
    found, notes = counting.several(line({"messages": HELLO * 13}))
    assert found is None
    assert notes == ("the chat template's generation prompt is not how it begins the answer",)


def test_only_one_of_several_templates_may_mark_what_is_generated(plain: Path) -> None:
    blocks = MARKED["chatml"].replace("{% generation %}", "{%+ generation %}")
    tools = [{"name": "f"}]
    expected = documents(encoder(plain, template("chatml")), {"messages": HELLO})
    for default, other in ((template("chatml"), blocks), (blocks, template("chatml"))):
        made = encoder(plain, default)
        chat = made._chat
        source = replace(chat.template, text=default, tools=other)
        made = ChatEncoder(HuggingFaceTokenizer(str(plain)), EncodeOptions((CHAT,)),
                           replace(chat, template=source))  # fmt: skip
        for record in ({"messages": HELLO}, {"messages": HELLO, "tools": tools}):
            found, notes = made.several(line(record))
            assert found is not None
            assert [d[CHAT] for d in found] == expected
            assert notes == ((turns.TOOLS_LEFT_OUT,) if "tools" in record else ())


def test_chatml_has_no_tools(plain: Path) -> None:
    made = encoder(plain)
    found, notes = made.several(line({"messages": HELLO, "tools": [{"name": "f"}]}))
    assert found is None
    assert notes == ("chat template: ChatML has no form for tools: give --chat-template",)


def test_where_templates_come_from(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(write_tokenizer(tmp_path / "none")))
    assert find_template(tokenizer, tmp_path / "none", None).own is False
    assert find_template(NullTokenizer(4), None, None).origin == "ChatML"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for name, value in (("one", "a"), ("several", named)):
        directory = write_tokenizer(tmp_path / name, chat_template=value)
        source = find_template(tokenizer, directory, None)
        assert source.text == "a"
        assert source.special["bos_token"] == "<|begin_of_text|>"
    assert ChatTemplate(source).render(HELLO, tools=[1]).text == "b"
    (directory / "chat_template.jinja").write_text("{{ bos_token }}c")
    source = find_template(tokenizer, directory, None)
    assert source.origin.endswith("chat_template.jinja")
    assert ChatTemplate(source).render(HELLO).text == "<|begin_of_text|>c"
    for content, message in (
        ("{% for %}", r"wrong\.jinja is no jinja2, line 1"),
        (None, r"--chat-template .*nowhere\.jinja cannot be read"),
    ):
        path = tmp_path / ("nowhere.jinja" if content is None else "wrong.jinja")
        if content is not None:
            path.write_text(content)
        with pytest.raises(TokenizerError, match=message):
            find_template(tokenizer, directory, str(path))
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    source = find_template(tokenizer, directory, None)
    assert [ChatTemplate(source).render(HELLO, tools=t).text[-1] for t in (None, [1])] == ["c", "d"]
    (directory / "chat_template.jinja").unlink()
    for wrong in (5, {"default": "a"}, ["a"], [{"name": "default"}]):
        write_tokenizer(directory, chat_template=wrong)
        with pytest.raises(TokenizerError, match="'chat_template' is neither a text nor a list"):
            find_template(tokenizer, directory, None)
    write_tokenizer(directory, chat_template=named[1:])
    with pytest.raises(TokenizerError, match="none is the default"):
        find_template(tokenizer, directory, None)


def test_runs_of_owners_are_sequences_of_which_every_second_counts() -> None:
    places = np.array([[0, 2], [2, 4], [4, 4], [4, 7], [7, 9], [9, 10]])
    assert owners(places, [(3, 4), (4, 7)]).tolist() == [0, 1, 2, 2, 0, 0]
    assert sequences(np.array([0, 1, 2, 2, 0, 0])) == [1, 1, 0, 2]
    assert sequences(np.array([1, 1, 0, 3])) == [0, 2, 1, 1]
    assert sequences(np.array([0, 0])) == []
    assert sequences(np.array([], dtype=np.int64)) == []
