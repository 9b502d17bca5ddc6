"""Server-sent events as a chat API sends them: bytes in, the data of whole events out."""

import msgspec
from msgspec import Struct, field

DONE = b"[DONE]"


class Events:
    """Feed it bytes however they are cut.

    >>> events = Events()
    >>> events.feed(b"data: a"), events.feed(b"b\\n\\n: ping\\n\\n")
    ([], [b'ab'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        # Only the two ends of line that HTTP servers use. A text splitter would also cut at U+2028, which
        # JSON strings may hold as it is.
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Every API spoken here writes one line of data per event, so an event is complete with its line.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(Struct):
    index: int = 0
    delta: Delta = field(default_factory=Delta)
    text: str = ""
    finish_reason: str | None = None


class Cached(Struct):
    cached_tokens: int | None = 0


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None


class Problem(Struct):
    message: str = "The server did not say what is wrong."


class Chunk(Struct):
    """The fields of a chat or completions chunk that the command line looks at."""

    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    error: Problem | None = None


read_chunk = msgspec.json.Decoder(Chunk).decode
