"""What a stream tells, piece by piece, whichever API it came through."""

from typing import Any, TypeAlias

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
