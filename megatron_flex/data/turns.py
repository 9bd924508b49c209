"""Which characters of a conversation the loss is on, by its chat template.

Where the template says it (``{% generation %}``), it is known. Else an answer is what stands
between the conversation up to it, with the generation prompt, and the conversation up to its end:
the template renders both. That needs what comes later to change nothing before, which is looked at
for every answer. Where a template writes earlier answers otherwise than the last one (it leaves out
their reasoning, say), each such answer becomes a sample of its own, in the words in which the model
meets it.

To render every beginning of a conversation takes time by the square of its turns. One of many turns
is rendered once more with other answers, which shows where they are, and only some answers of each
kind are looked at as above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_flex.data.conversation import ASSISTANT, Conversation, Message, Unusable
from megatron_flex.tokenizers.chat_template import ChatTemplate, Rendered, Span, TemplateError

REWRITES = (
    "the chat template writes earlier answers otherwise than the last one: such an answer is a"
    " sample of its own"
)
TOOLS_LEFT_OUT = "the chat template does not look at tools: those of the line are left out"
MANY = 24
"""Answers from which on a conversation is not rendered up to each."""

_PROBE = "chat-template-probe"
_ASKED = {"role": "user", "content": "a"}
_ANSWERED = {"role": ASSISTANT, "content": _PROBE}
_LOOKED_AT = 2  # answers of a kind, at its beginning and at its end
_BORDERS = 256  # turns that a long conversation is cut after, where all of it counts


@dataclass(frozen=True)
class Marked:
    """A text, and which parts of it count, in order: at least one for each turn that does."""

    text: str
    spans: tuple[Span, ...]


class Turns:
    """Finds what counts with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._prompt = ""  # what comes before an answer
        self._tail, self._gap, self.remark = self._look()

    @property
    def start(self) -> str:
        """What the template puts before an answer (the generation prompt)."""
        return self._prompt

    @property
    def end(self) -> str:
        """What ends an answer; empty if that is not known, or blanks do."""
        return self._tail.rstrip()

    def _look(self) -> tuple[str, int, str]:
        """How answers end: what follows their text, how many characters of it belong to no turn
        (blanks after an end token); and a sentence if answers begin with what nobody says."""
        for asked in ([_ASKED], [{"role": "system", "content": "a"}, _ASKED]):
            try:
                before = self._template.render(asked).text
                prompt = self._template.render(asked, add_generation_prompt=True).text
                whole = self._template.render([*asked, _ANSWERED]).text
            except TemplateError:
                continue
            if _PROBE in whole:
                break
        else:
            return (
                "",
                0,
                "how the chat template ends answers is not clear: blanks after them may count",
            )
        at = whole.rfind(_PROBE)
        tail = whole[at + len(_PROBE) :]
        end = tail.rstrip()
        head = whole[len(prompt) : at] if whole.startswith(prompt) else ""
        remark = ""
        self._prompt = prompt.removeprefix(before) if prompt.startswith(before) else ""
        if prompt == before and head.strip() and not self._template.marks():
            remark = (
                f"the chat template has no generation prompt: {head!r} before each answer counts in"
                " the loss as well"
            )
        return tail, len(tail) - len(end) if end else 0, remark

    def everything(self, conversation: Conversation) -> list[Marked]:
        """The whole conversation; parts end where turns do, as far as the template shows it."""
        prefixes = _Prefixes(self._template, conversation)
        count = len(conversation.messages)
        text = prefixes.upto(count).text
        ends = {len(text)}
        for number in range(1, count, -(-count // _BORDERS)):
            try:
                part = prefixes.upto(number).text
            except TemplateError:  # it does not take such a conversation
                continue
            if part and text.startswith(part):
                ends.add(len(part))
        borders = [0, *sorted(ends)]
        return [Marked(text, tuple(pairwise(borders)))]

    def answers(self, conversation: Conversation) -> list[Marked]:
        """The conversation with its answers marked; several texts where one cannot have them all.

        Raises:
            Unusable: the template does not show where an answer is.
            TemplateError: the template refuses the conversation.
        """
        prefixes = _Prefixes(self._template, conversation)
        waiting = list(conversation.answers)
        found: list[Marked] = []
        while waiting:
            last = waiting[-1]
            whole = prefixes.upto(last + 1)
            here = self._at_once(prefixes, waiting, whole)
            if here is None:
                here = {i: self._spans(prefixes, i, whole) for i in waiting}
            if here[last] is None:
                raise Unusable(
                    "the chat template's generation prompt is not how it begins the answer"
                )
            spans = [span for i in waiting for span in here[i] or ()]
            if not spans:
                raise Unusable("the chat template marks nothing of an answer")
            found.append(Marked(whole.text, tuple(spans)))
            waiting = [i for i in waiting if here[i] is None]
        return found[::-1]

    def _at_once(
        self, prefixes: _Prefixes, waiting: Sequence[int], whole: Rendered
    ) -> dict[int, list[Span] | None] | None:
        """Where many answers are in ``whole``; ``None``: few, or it must be looked at for each."""
        if len(waiting) < MANY:
            return None
        messages = prefixes.conversation.messages[: waiting[-1] + 1]
        marks = self._template.marks(prefixes.conversation.tools)
        found = self._marked(messages, whole) if marks else self._placed(prefixes, waiting, whole)
        if found is None:
            return None
        kinds: dict[object, list[int]] = {}
        for number in waiting:
            kinds.setdefault(_kind(messages, number), []).append(number)
        for alike in kinds.values():
            for number in {*alike[:_LOOKED_AT], *alike[-_LOOKED_AT:]}:
                if self._spans(prefixes, number, whole) != found[number]:
                    return None
        return {number: found[number] for number in waiting}

    def _marked(self, messages: Sequence[Message], whole: Rendered) -> dict[int, list[Span]] | None:
        """Where the template marks one span for each message of the assistant."""
        said = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if len(said) != len(whole.spans):
            return None
        return {number: [span] for number, span in zip(said, whole.spans, strict=True)}

    def _placed(
        self, prefixes: _Prefixes, waiting: Sequence[int], whole: Rendered
    ) -> dict[int, list[Span]] | None:
        """Where answers stand word by word, between the generation prompt and their usual end."""
        if not (self._prompt and self._tail):
            return None
        conversation = prefixes.conversation
        messages = list(conversation.messages[: waiting[-1] + 1])
        for number in waiting:
            messages[number] = {**messages[number], "content": f"{_PROBE}-{number}-"}
        try:
            shown = self._template.render(
                messages, tools=conversation.tools, more=conversation.more
            ).text
        except TemplateError:
            return None
        found: dict[int, list[Span]] = {}
        at = place = 0  # in what is shown, and in the whole
        for number in waiting:
            word = messages[number]["content"]
            next_at = shown.find(word, at)
            before = shown[at:next_at]
            if next_at < 0 or not whole.text.startswith(before, place):
                return None
            place, at = place + len(before), next_at + len(word)
            content = conversation.messages[number]["content"]
            if not whole.text.startswith(content, place):
                content = content.strip()
            end = place + len(content)
            if not (
                before.endswith(self._prompt)
                and whole.text.startswith(content, place)
                and whole.text.startswith(self._tail, end)
            ):
                return None
            found[number] = [(place, end + len(self._tail) - self._gap)]
            place = end
        return found if whole.text[place:] == shown[at:] else None

    def _spans(self, prefixes: _Prefixes, number: int, whole: Rendered) -> list[Span] | None:
        """Where message ``number`` is in ``whole``; ``None`` if that is not as when it was last."""
        marks = self._template.marks(prefixes.conversation.tools)
        after = prefixes.upto(number + 1).text
        try:
            start = len(before := prefixes.upto(number, prompt=not marks).text)
        except TemplateError:
            if number:
                raise
            # Many templates look at the first message, which is this one.
            said = prefixes.conversation.messages[0]["content"].strip()
            at = after.find(self._prompt)
            start = at + len(self._prompt)
            if at < 0 or not self._prompt or not after.startswith(said, start):
                raise Unusable("the chat template does not let the assistant begin") from None
            before = after[:start]
        if not (whole.text.startswith(after) and after.startswith(before)):
            return None
        if marks:
            return [(a, b) for a, b in whole.spans if len(before) <= a and b <= len(after)]
        end = len(after)
        if self._gap and after.endswith(self._tail):
            end -= self._gap
        if after[start:end].strip() in ("", self.end):
            raise Unusable(
                "the chat template prints nothing of an answer but its end (it is empty, or all of"
                " it is tool calls that the template does not know)"
            )
        return [(start, end)]


def _kind(messages: Sequence[Message], number: int) -> object:
    """What may decide how a template writes an answer, beside its words."""
    message: Mapping[str, Any] = messages[number]
    before = messages[number - 1]["role"] if number else None
    after = messages[number + 1]["role"] if number + 1 < len(messages) else None
    return before, after, "<" in message["content"], tuple(sorted(message))


class _Prefixes:
    """The beginnings of a conversation, each rendered once."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template, self.conversation = template, conversation
        self._known: dict[tuple[int, bool], Rendered] = {}

    def upto(self, count: int, *, prompt: bool = False) -> Rendered:
        """The first ``count`` messages, with the generation prompt or without."""
        if count == 0 and not prompt and self._template.marks(self.conversation.tools):
            return Rendered("")  # spans are known, and many templates look at the first message
        key = count, prompt
        if key not in self._known:
            c = self.conversation
            self._known[key] = self._template.render(
                c.messages[:count], tools=c.tools, add_generation_prompt=prompt, more=c.more
            )
        return self._known[key]
