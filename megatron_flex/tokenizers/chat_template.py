"""Chat templates: programs in jinja2 that write a conversation as a model reads it.

As transformers runs them (``transformers.utils.chat_template_utils``): sandboxed, with the filter
``tojson``, ``raise_exception``, ``strftime_now``, loop controls and ``{% generation %}`` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_flex.tokenizers import special_tokens
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError

Span = tuple[int, int]
"""First character and one after the last."""

# Characters that no text has, around what the assistant generates.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_BEYOND = "{{ raise_exception('ChatML has no form for tools: give --chat-template') }}"
CHATML = (
    "{% if tools %}" + _BEYOND + "{% endif %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}" + _BEYOND + "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For tokenizers without a template of their own."""


class TemplateError(ValueError):
    """A conversation that the template refuses, in its own words."""


@dataclass(frozen=True)
class TemplateSource:
    """A chat template as files have it.

    Attributes:
        text: the program.
        origin: where it comes from, for messages.
        tools: another program for conversations with tools; ``None`` if there is none.
        special: special tokens by name, such as ``bos_token``; the program may use them.
        own: it is the tokenizer's or the user's, not the built-in one.
        now: what the program is told of the date; one for a whole run.
    """

    text: str
    origin: str
    tools: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    own: bool = True
    now: datetime = field(default_factory=datetime.now)


def home(path: str | None) -> Path | None:
    """Where a tokenizer's files lie, by ``--tokenizer-model`` or ``--vocab-file``."""
    if path is None:
        return None
    return Path(path) if Path(path).is_dir() else Path(path).parent


def find_template(
    tokenizer: Tokenizer, directory: Path | None, given: str | None
) -> TemplateSource:
    """The template of ``--chat-template``, else that beside the tokenizer, else ChatML.

    Args:
        tokenizer: knows special tokens where no file does.
        directory: where the tokenizer's files lie.
        given: a file.

    Raises:
        TokenizerError: a file cannot be read or is no template.
    """
    special = dict(getattr(tokenizer, "named", {}))
    if directory is not None:
        named = special_tokens.read(directory).named
        special |= {key: text for key, text in named.items() if text is not None}
    if given is not None:
        source = TemplateSource(_read(Path(given), "--chat-template "), given, special=special)
    else:
        source = _beside(directory, special) or TemplateSource(
            CHATML, "ChatML", special=special, own=False
        )
    ChatTemplate(source)
    return source


def _beside(directory: Path | None, special: Mapping[str, str]) -> TemplateSource | None:
    if directory is None:
        return None
    path = directory / "chat_template.jinja"
    if path.is_file():
        tools = directory / "additional_chat_templates" / "tool_use.jinja"
        found = _read(tools) if tools.is_file() else None
        return TemplateSource(_read(path), str(path), found, special)
    path = directory / "tokenizer_config.json"
    found = json.loads(_read(path)).get("chat_template") if path.is_file() else None
    if isinstance(found, str):
        return TemplateSource(found, str(path), special=special)
    if not found:
        return None
    if not isinstance(found, list) or not all(_is_named(item) for item in found):
        raise TokenizerError(
            f"{path}: 'chat_template' is neither a text nor a list of texts with names: correct it,"
            " or give a file as --chat-template"
        )
    named = {item["name"]: item["template"] for item in found}
    if "default" not in named:
        raise TokenizerError(
            f"{path} has chat templates {', '.join(named)}, and none is the default: write the one"
            " to use into a file and give it as --chat-template"
        )
    return TemplateSource(named["default"], str(path), named.get("tool_use"), special)


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item.get(key), str) for key in ("name", "template")
    )


def _read(path: Path, flag: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{flag}{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class Rendered:
    """A conversation as text; ``spans`` is what ``{% generation %}`` blocks wrote."""

    text: str
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class _Program:
    """A compiled template: whether it has ``{% generation %}`` blocks, and looks at ``tools``."""

    run: jinja2.Template
    marks: bool
    takes_tools: bool


class ChatTemplate:
    """Renders conversations.

    Raises:
        TokenizerError: the template is not in jinja2's language.
    """

    def __init__(self, source: TemplateSource) -> None:
        self._source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = source.now.strftime
        self._plain = self._tools = self._compiled(environment, source.text)
        if source.tools is not None:
            self._tools = self._compiled(environment, source.tools)

    def _compiled(self, environment: jinja2.Environment, text: str) -> _Program:
        try:
            tree = environment.parse(text)
            marks = any(
                isinstance(call.call.node, nodes.ExtensionAttribute)
                for call in tree.find_all(nodes.CallBlock)
            )
            return _Program(
                environment.from_string(text),
                marks,
                "tools" in meta.find_undeclared_variables(tree),
            )
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template of {self._source.origin} is no jinja2, line {error.lineno}:"
                f" {error}"
            ) from error

    def _program(self, tools: Sequence[Any] | None) -> _Program:
        return self._tools if tools else self._plain

    def marks(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether it says itself what the assistant generates, with such tools."""
        return self._program(tools).marks

    def takes(self, tools: Sequence[Any] | None) -> bool:
        """Whether it looks at the tools, or there are none."""
        return not tools or self._tools.takes_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of a conversation; ``more`` is what else the template is told.

        Raises:
            TemplateError: the template refuses it, or fails.
        """
        program = self._program(tools)
        known = {
            "documents": None,
            **self._source.special,
            **(more or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = program.run.render(known)
        # A template's mistake can be any error, such as adding nothing to a text.
        except Exception as error:
            reason = str(error) if isinstance(error, TemplateError) else repr(error)
            raise TemplateError(reason.partition("\n")[0][:200]) from error
        return _unmarked(text) if program.marks else Rendered(text)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: what is between is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _unmarked(text: str) -> Rendered:
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, part in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", text)):
        parts.append(part)
        if number % 2 and part:
            spans.append((length, length + len(part)))
        length += len(part)
    if len(parts) % 2 == 0:
        raise TemplateError("a text has the characters U+FDD0 or U+FDD1")
    return Rendered("".join(parts), tuple(spans))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
