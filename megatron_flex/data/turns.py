"""Which characters of a conversation the loss is on, by its chat template.

Where the template says it (``{% generation %}``), it is known. Else an answer is what stands
between the conversation up to it, with the generation prompt, and the conversation up to its end:
the template renders both. That needs what comes later to change nothing before, which is looked at
for every answer. Where a template writes earlier answers otherwise than the last one (it leaves out
their reasoning, say), each such answer becomes a sample of its own, in the words in which the model
meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megatron_flex.data.conversation import ASSISTANT, Conversation, Unusable
from megatron_flex.tokenizers.chat_template import ChatTemplate, Rendered, Span, TemplateError

REWRITES = (
    "the chat template writes earlier answers otherwise than the last one: such an answer is a"
    " sample of its own"
)
_PROBE = "chat-template-probe"
_ASKED = {"role": "user", "content": "a"}
_ANSWERED = {"role": ASSISTANT, "content": _PROBE}


@dataclass(frozen=True)
class Marked:
    """A text, and which parts of it count, in order: at least one for each turn that does."""

    text: str
    spans: tuple[Span, ...]


class Turns:
    """Finds what counts with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tail, self._gap, self.remark = self._look()

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
        if prompt == before and head.strip() and not self._template.marks:
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
        for number in range(1, count):
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

    def _spans(self, prefixes: _Prefixes, number: int, whole: Rendered) -> list[Span] | None:
        """Where message ``number`` is in ``whole``; ``None`` if that is not as when it was last."""
        marks = self._template.marks
        before = prefixes.upto(number, prompt=not marks).text
        after = prefixes.upto(number + 1).text
        if not (whole.text.startswith(after) and after.startswith(before)):
            return None
        if marks:
            return [(a, b) for a, b in whole.spans if len(before) <= a and b <= len(after)]
        end = len(after)
        if self._gap and after.endswith(self._tail):
            end -= self._gap
        if after[len(before) : end].strip() in ("", self.end):
            raise Unusable(
                "the chat template prints nothing of an answer but its end (it is empty, or all of"
                " it is tool calls that the template does not know)"
            )
        return [(len(before), end)]


class _Prefixes:
    """The beginnings of a conversation, each rendered once."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template, self._conversation = template, conversation
        self._known: dict[tuple[int, bool], Rendered] = {}

    def upto(self, count: int, *, prompt: bool = False) -> Rendered:
        """The first ``count`` messages, with the generation prompt or without."""
        if count == 0 and not prompt and self._template.marks:
            return Rendered("")  # spans are known, and many templates look at the first message
        key = count, prompt
        if key not in self._known:
            c = self._conversation
            self._known[key] = self._template.render(
                c.messages[:count], tools=c.tools, add_generation_prompt=prompt, **c.more
            )
        return self._known[key]
