"""What a stream tells, piece by piece, whichever API it came through; and the tree that it folds to."""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from dragoman.types import ToolCall, Usage


class Token(Struct):
    """One token. The texts of a piece's tokens, put together, are its text."""

    id: int | None
    """None where the server tells log probabilities and no ids."""
    text: str = ""
    """Where several ids came with one text that nobody has divided, it is all at the last of them."""
    logprob: float | None = None
    top: list["Token"] = field(default_factory=list)
    """The likeliest tokens at this place, if they were asked for."""


class Piece(Struct):
    """A piece of text. `tokens` is empty where the server tells neither ids nor log probabilities."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class Text(Piece, tag=True):
    pass


class Reasoning(Piece, tag=True):
    pass


class Refusal(Piece, tag=True):
    pass


class Unseen(Piece, tag=True):
    """Tokens that have no text of their own: markers, the end of a turn. `text` is empty."""


class CallBegan(Struct, tag=True, kw_only=True):
    id: str | None
    name: str
    call: int
    """Its number in the answer, from 0."""
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class CallArguments(Struct, tag=True, kw_only=True):
    """A piece of the arguments, or of the text that a custom tool takes."""

    text: str
    call: int
    tokens: list[Token] = field(default_factory=list)
    choice: int = 0


class CallDone(Struct, tag=True, kw_only=True):
    """The call is complete, and may be made while the stream goes on."""

    value: ToolCall
    call: int
    choice: int = 0


class Finished(Struct, tag=True, kw_only=True):
    reason: str
    """In the words of chat: `stop`, `length`, `tool_calls`, or whatever else the server says."""
    stop: str | int | None = None
    """The stop string or stop id that was met, where the server tells it."""
    choice: int = 0


class Used(Struct, tag=True):
    usage: Usage


class Other(Struct, tag=True):
    """An event of the Responses API that is none of the above, as it came."""

    name: str
    data: dict[str, Any]


StreamEvent: TypeAlias = (
    Text | Reasoning | Refusal | Unseen | CallBegan | CallArguments | CallDone | Finished | Used | Other
)


# The answer as a tree: what was thought, said and called, in order, and the tokens of each.


class Spoken(Struct, tag=True):
    """A stretch of one kind. `unseen` is what comes before any text: tokens that have none."""

    kind: Literal["reasoning", "text", "refusal", "unseen"]
    text: str = ""
    tokens: list[Token] = field(default_factory=list)


class Called(Struct, tag=True):
    """A tool call; not `complete` if the answer was cut short in it."""

    id: str | None
    name: str
    arguments: str = ""
    complete: bool = False
    tokens: list[Token] = field(default_factory=list)


class AnswerTree(Struct):
    """One choice. Markers are on the parts that they open and close, layout between two on the first."""

    choice: int = 0
    parts: list[Spoken | Called] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def _all(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Spoken) and part.kind == kind)

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
        """The calls that are complete."""
        return [
            ToolCall(id=part.id, name=part.name, arguments=part.arguments)
            for part in self.parts
            if isinstance(part, Called) and part.complete
        ]

    @property
    def tokens(self) -> Iterator[Token]:
        return (token for part in self.parts for token in part.tokens)

    @property
    def ids(self) -> list[int]:
        """What the engine said, if the server was asked for `return_token_ids` and knows it."""
        return [token.id for token in self.tokens if token.id is not None]


_KINDS: dict[type, Literal["reasoning", "text", "refusal"]] = {
    Text: "text",
    Reasoning: "reasoning",
    Refusal: "refusal",
}


class AnswerFold:
    """Grows the answers by events. Texts are joined when they are looked at, not at every event."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._answers: dict[int, AnswerTree] = {}
        self._calls: dict[tuple[int, int], Called] = {}
        self._texts: dict[int, list[str]] = {}
        """Pieces of the parts that still grow, by the part's identity."""

    @property
    def answers(self) -> list[AnswerTree]:
        for answer in self._answers.values():
            for part in answer.parts:
                pieces = self._texts.get(id(part))
                if pieces and isinstance(part, Spoken):
                    part.text = "".join(pieces)
                elif pieces and isinstance(part, Called):
                    part.arguments = "".join(pieces)
        return [self._answers[choice] for choice in sorted(self._answers)]

    def add(self, event: StreamEvent) -> None:
        match event:
            case Text() | Reasoning() | Refusal():
                part = self._stretch(self._answer(event.choice), _KINDS[type(event)])
                self._grow(part, event.text, event.tokens)
            case Unseen():
                self._after(self._answer(event.choice), event.tokens)
            case CallBegan():
                called = Called(event.id, event.name, tokens=list(event.tokens))
                self._answer(event.choice).parts.append(called)
                self._calls[event.choice, event.call] = called
            case CallArguments():
                self._grow(self._calls[event.choice, event.call], event.text, event.tokens)
            case CallDone():
                self._calls[event.choice, event.call].complete = True
            case Finished():
                answer = self._answer(event.choice)
                answer.finish, answer.stop = event.reason, event.stop
            case Used():
                self.usage = event.usage

    def _answer(self, choice: int) -> AnswerTree:
        return self._answers.setdefault(choice, AnswerTree(choice))

    def _stretch(self, answer: AnswerTree, kind: Literal["reasoning", "text", "refusal"]) -> Spoken:
        last = answer.parts[-1] if answer.parts else None
        if isinstance(last, Spoken) and last.kind == kind:
            return last
        part = Spoken(kind)
        answer.parts.append(part)
        return part

    def _grow(self, part: Spoken | Called, text: str, tokens: list[Token]) -> None:
        self._texts.setdefault(id(part), []).append(text)
        part.tokens += tokens

    def _after(self, answer: AnswerTree, tokens: list[Token]) -> None:
        if not answer.parts:
            answer.parts.append(Spoken("unseen"))
        answer.parts[-1].tokens += tokens
