"""From what a client kept of an answer to its text, its counts and the times of its events."""

import httptools
import msgspec
from msgspec import Struct, field

from bench.client import Trace
from bench.errors import BenchError


class Delta(Struct):
    content: str | None = None


class Choice(Struct):
    delta: Delta = field(default_factory=Delta)
    finish_reason: str | None = None


class Details(Struct):
    cached_tokens: int | None = None


class TextDelta(Struct):
    """That of Messages."""

    text: str = ""


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    """What Responses and Messages call completion tokens."""
    prompt_tokens_details: Details | None = None


class Response(Struct):
    """That of Responses."""

    usage: Usage | None = None


class Chunk(Struct):
    """A chunk of Chat Completions, or an event of Responses or Messages."""

    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    response: Response | None = None
    type: str = ""
    delta: str | TextDelta | None = None


class Answer(Struct):
    sent: float
    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each of the texts came. A server may join tokens, and some tokens have no text."""
    usage: Usage = field(default_factory=Usage)
    finish: str | None = None
    most: int | None = None
    """The tokens that were asked for at most."""
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> int:
        """As the server counts them; as many as were asked for where it tells no more than that they were.

        Events are never counted: it is for the server to say how many tokens an event has.
        """
        if counted := self.usage.completion_tokens or self.usage.output_tokens:
            return counted
        if self.finish == "length" and self.most:
            return self.most
        raise BenchError("The server does not tell how many tokens an answer has.")

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens that came after `start` and not after `end`; each event stands for an equal share."""
        share = self.tokens / len(self.times)
        return share * sum(start < moment <= end for moment in self.times)


TOLD = ("response.output_text.delta", "content_block_delta")
_decode = msgspec.json.Decoder(Chunk).decode


def read(trace: Trace, most: int | None = None) -> Answer:
    """Raises BenchError when it is not a complete streamed answer. `most`: tokens that were asked for."""
    reader = _Reader(trace, most)
    parser = httptools.HttpResponseParser(reader)
    for reader.now, data in zip(trace.times, trace.data, strict=True):
        parser.feed_data(data)
    if parser.get_status_code() != 200:
        raise BenchError(f"HTTP {parser.get_status_code()}: {reader.rest[:500].decode(errors='replace')}")
    if not reader.answer.done or not reader.answer.times:
        raise BenchError("An answer broke off or has no text.")
    return reader.answer


class _Reader:
    """httptools calls `on_body`."""

    def __init__(self, trace: Trace, most: int | None) -> None:
        self.answer = Answer(trace.sent, most=most)
        self.now = 0.0
        self.rest = b""

    def on_body(self, body: bytes) -> None:
        *events, self.rest = (self.rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: [DONE]"):
                self.answer.done = True
            elif payload := event.partition(b"data: ")[2]:
                self._add(_decode(payload))

    def _add(self, chunk: Chunk) -> None:
        for choice in chunk.choices:
            self.answer.finish = choice.finish_reason or self.answer.finish
            if choice.delta.content:
                self.answer.texts.append(choice.delta.content)
                self.answer.times.append(self.now)
        text = chunk.delta.text if isinstance(chunk.delta, TextDelta) else chunk.delta
        if chunk.type in TOLD and text:
            self.answer.texts.append(text)
            self.answer.times.append(self.now)
        if chunk.type == "message_stop":
            self.answer.done = True
        usage = chunk.usage or (chunk.response.usage if chunk.response else None)
        if usage is not None:
            self.answer.usage = usage
