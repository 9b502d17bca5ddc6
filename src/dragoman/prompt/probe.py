"""Renders a chat template with answers of known words, so that the text around them can be extracted.

Differences between two renderings consist of whole markers: half of a `<tag>` is never common.

Rules of this file:
- a template that refuses an answer gives None for it, and nothing is concluded from that;
- all renderings of a template together have a limit, because a template is untrusted code.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.errors import TemplateError
from dragoman.prompt.prompt_builder import template_variables
from dragoman.prompt.template import ChatTemplate
from dragoman.prompt.traits import TemplateTraits, detect_traits
from dragoman.types import Conversation, Message, ToolCall

USER, TEXT, MIND = "probeUser", "probeText", "probeMind"
NAMES = ("probeFnA", "probeFnB")
KEYS = ("probeKeyA", "probeKeyB")
VALUES = ("probeValA", "probeValB")
IDS = ("probeid0a", "probeid0b")
"""Nine letters and digits, because some templates require that."""
NUMBER = 7
SECONDS = 2.0
"""CPU time for all renderings of one template."""
MOST_CHARACTERS = 8000
"""Maximum length of an answer of a few words; a longer one takes too long to search and is ignored."""

_PROPERTIES = {key: {"type": "string", "description": "A word."} for key in KEYS}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for name in NAMES
)
_THINKING = {"enable_thinking": True, "thinking": True}
# Some templates take their tools, or the time, as a text variable.
_TEXTS = {"functions": "", "datetime": "", "date_string": ""}

_Way: TypeAlias = tuple[tuple[dict[str, Any], ...], dict[str, str]]


class ProbeSample(Struct, frozen=True):
    """A probed answer, and what the template wrote after the user's message."""

    calls: tuple[ToolCall, ...]
    text: str


class TemplateProbe:
    """Renders known answers: `TemplateProbe(source).answer(text=TEXT)` is what a template writes for an
    answer of that text.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._template = ChatTemplate(source, special=special)
        self._deadline = time.thread_time() + SECONDS
        self._tools: tuple[dict[str, Any], ...] = TOOLS
        self._more: dict[str, str] = {}
        self._traits: TemplateTraits = detect_traits(source, self._render)
        self._choose_variables()

    def answer(
        self, *calls: ToolCall, text: str | None = None, mind: str | None = None, **kwargs: Any
    ) -> ProbeSample | None:
        """Return what is written for an answer, from the end of the user's text on."""
        message = Message(role="assistant", content=text, reasoning=mind, tool_calls=calls)
        return self._sample(message, kwargs)

    def generation(self, **kwargs: Any) -> str:
        """Return the end of the prompt, from the end of the user's text on."""
        sample = self._sample(None, kwargs)
        return "" if sample is None else sample.text

    def _sample(self, answer: Message | None, kwargs: dict[str, Any]) -> ProbeSample | None:
        question = Message(role="user", content=USER)
        conversation = Conversation(
            messages=(question,) if answer is None else (question, answer),
            tools=self._tools,
            add_generation_prompt=answer is None,
            template_kwargs={**self._more, **_THINKING, **kwargs},
        )
        try:
            text = self._render(template_variables(conversation, self._traits))
        except TemplateError:
            return None
        _, value, after = text.rpartition(USER)
        if not value or len(after) > MOST_CHARACTERS:
            return None
        return ProbeSample(answer.tool_calls if answer else (), after)

    def _render(self, variables: Mapping[str, Any]) -> str:
        if time.thread_time() > self._deadline:
            raise TemplateError("Analysing the chat template takes too long; simplify it.")
        return self._template.render(variables)

    def _choose_variables(self) -> None:
        """Find out what the template needs to write calls, or at least text: tools, no tools, or further text
        variables.
        """
        ways: tuple[_Way, ...] = ((TOOLS, {}), ((), {}), (TOOLS, _TEXTS))
        writes_text = None
        for way in ways:
            self._tools, self._more = way
            sample = self.answer(make_call(0))
            if sample is not None and NAMES[0] in sample.text:
                return
            sample = self.answer(text=TEXT)
            if writes_text is None and sample is not None and TEXT in sample.text:
                writes_text = way
        self._tools, self._more = writes_text or ways[0]


def make_call(number: int, arguments: str | None = None) -> ToolCall:
    """Build the first or the second call, by default with one argument of its own."""
    text = f'{{"{KEYS[0]}": "{VALUES[number]}"}}' if arguments is None else arguments
    return ToolCall(id=IDS[number], name=NAMES[number], arguments=text)


# Common prefixes and suffixes of two texts

_SEGMENT = re.compile(r"<[|｜]?[^<>\s]{1,64}>|\[/?[A-Z][A-Z_ ]*\]|\s|\w+|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """Split a text: `segments("a <b>\\n")` is `["a", " ", "<b>", "\\n"]`."""
    return _SEGMENT.findall(text)


def is_marker(part: str) -> bool:
    """Whether a segment is a tag of some kind."""
    return len(part) > 2 and part[0] in "<["


def common_prefix(one: str, other: str) -> str:
    """Return the common prefix in whole segments: `common_prefix("x<a>1", "x<b>1")` is
    `"x"`, without the `<`.
    """
    return "".join(_common_parts(segments(one), segments(other)))


def shared_end(one: str, other: str) -> str:
    """Return the common suffix in whole segments: `shared_end("1<a>\\n", "2<a>\\n")` is `"<a>\\n"`."""
    return "".join(reversed(list(_common_parts(reversed(segments(one)), reversed(segments(other))))))


def _common_parts(one: Iterable[str], other: Iterable[str]) -> Iterable[str]:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left


def without_end(text: str, end: str) -> str:
    return text[: len(text) - len(end)]
