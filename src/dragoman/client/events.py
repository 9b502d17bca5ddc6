"""The events of a stream, the same for all APIs, and the answer tree that they build."""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from dragoman.types import ToolCall, Usage


class Token(Struct):
    """One token. The token texts of an event add up to its text."""

    id: int | None
    """None if the server sends log probabilities without ids."""
    text: str = ""
    """If several ids share one text, it is at the last of them."""
    logprob: float | None = None
    top: list["Token"] = field(default_factory=list)
    """The most likely tokens at this position, if requested."""


class BaseDelta(Struct):
    """A fragment of text. `tokens` is empty if the server sends neither ids nor log probabilities."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class TextDelta(BaseDelta, tag=True):
    pass


class ReasoningDelta(BaseDelta, tag=True):
    pass


class RefusalDelta(BaseDelta, tag=True):
    pass


class MarkerTokens(BaseDelta, tag=True):
    """Tokens without text: markers, the end of a turn. `text` is empty."""


class CallStart(Struct, tag=True, kw_only=True):
    id: str | None
    name: str
    call: int
    """The number of the call in the answer, from 0."""
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class ArgumentsDelta(Struct, tag=True, kw_only=True):
    """A fragment of the arguments, or of a custom tool's input."""

    text: str
    call: int
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class CallEnd(Struct, tag=True, kw_only=True):
    """The call is complete, and may be executed while the stream continues."""

    value: ToolCall
    call: int
    choice: int = 0


class FinishEvent(Struct, tag=True, kw_only=True):
    reason: str
    """The finish reason in chat's terms: `stop`, `length`, `tool_calls`, or the server's own."""
    stop: str | int | None = None
    """The stop string or stop id that matched, if the server reports it."""
    choice: int = 0


class UsageEvent(Struct, tag=True):
    usage: Usage


class OtherEvent(Struct, tag=True):
    """Any other event of the Responses API, as received."""

    name: str
    data: dict[str, Any]


StreamEvent: TypeAlias = (
    TextDelta
    | ReasoningDelta
    | RefusalDelta
    | MarkerTokens
    | CallStart
    | ArgumentsDelta
    | CallEnd
    | FinishEvent
    | UsageEvent
    | OtherEvent
)


# The answer as a tree: reasoning, text and calls in order, with the tokens of each.


class TextPart(Struct, tag=True):
    """A run of one kind. `unseen` holds tokens without text that come before any other part."""

    kind: Literal["reasoning", "text", "refusal", "unseen"]
    text: str = ""
    tokens: list[Token] = field(default_factory=list)


class CallPart(Struct, tag=True):
    """A tool call; not `complete` if the answer was cut off in it."""

    id: str | None
    name: str
    arguments: str = ""
    complete: bool = False
    tokens: list[Token] = field(default_factory=list)


class AnswerTree(Struct):
    """One choice. Marker tokens belong to the parts that they open and close, layout between two parts to the
    first.
    """

    choice: int = 0
    parts: list[TextPart | CallPart] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def _all(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart) and part.kind == kind)

    @property
    def text(self) -> str:
        return self._all("text")

    @property
    def reasoning(self) -> str:
        return self._all("reasoning")

    @property
    def refusal(self) -> str:
        return self._all("refusal")

    @property
    def calls(self) -> list[ToolCall]:
        """The complete calls."""
        return [
            ToolCall(id=part.id, name=part.name, arguments=part.arguments)
            for part in self.parts
            if isinstance(part, CallPart) and part.complete
        ]

    @property
    def tokens(self) -> Iterator[Token]:
        return (token for part in self.parts for token in part.tokens)

    @property
    def ids(self) -> list[int]:
        """The sampled ids, if `return_token_ids` was requested and the server supports it."""
        return [token.id for token in self.tokens if token.id is not None]


_KINDS: dict[type, Literal["reasoning", "text", "refusal"]] = {
    TextDelta: "text",
    ReasoningDelta: "reasoning",
    RefusalDelta: "refusal",
}


class AnswerFold:
    """Builds answers from events. Texts are joined when they are read, not at every event."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._answers: dict[int, AnswerTree] = {}
        self._calls: dict[tuple[int, int], CallPart] = {}
        self._texts: dict[int, list[str]] = {}
        """Text fragments of growing parts, by the identity of the part."""

    @property
    def answers(self) -> list[AnswerTree]:
        for answer in self._answers.values():
            for part in answer.parts:
                pieces = self._texts.get(id(part))
                if pieces and isinstance(part, TextPart):
                    part.text = "".join(pieces)
                elif pieces and isinstance(part, CallPart):
                    part.arguments = "".join(pieces)
        return [self._answers[choice] for choice in sorted(self._answers)]

    def add(self, event: StreamEvent) -> None:
        match event:
            case TextDelta() | ReasoningDelta() | RefusalDelta():
                part = self._stretch(self._answer(event.choice), _KINDS[type(event)])
                self._grow(part, event.text, event.tokens)
            case MarkerTokens():
                self._after(self._answer(event.choice), event.tokens)
            case CallStart():
                called = CallPart(event.id, event.name, tokens=list(event.tokens))
                self._answer(event.choice).parts.append(called)
                self._calls[event.choice, event.call] = called
            case ArgumentsDelta():
                self._grow(self._calls[event.choice, event.call], event.text, event.tokens)
            case CallEnd():
                self._calls[event.choice, event.call].complete = True
            case FinishEvent():
                answer = self._answer(event.choice)
                answer.finish, answer.stop = event.reason, event.stop
            case UsageEvent():
                self.usage = event.usage

    def _answer(self, choice: int) -> AnswerTree:
        return self._answers.setdefault(choice, AnswerTree(choice))

    def _stretch(self, answer: AnswerTree, kind: Literal["reasoning", "text", "refusal"]) -> TextPart:
        last = answer.parts[-1] if answer.parts else None
        if isinstance(last, TextPart) and last.kind == kind:
            return last
        part = TextPart(kind)
        answer.parts.append(part)
        return part

    def _grow(self, part: TextPart | CallPart, text: str, tokens: list[Token]) -> None:
        self._texts.setdefault(id(part), []).append(text)
        part.tokens += tokens

    def _after(self, answer: AnswerTree, tokens: list[Token]) -> None:
        if not answer.parts:
            answer.parts.append(TextPart("unseen"))
        answer.parts[-1].tokens += tokens
