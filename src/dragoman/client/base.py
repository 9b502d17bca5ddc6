"""The common part of both clients: configuration, requests, and the state of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.client import replay
from dragoman.client import request as requests
from dragoman.client.config import ClientConfig, Timeouts, make_config
from dragoman.client.errors import (
    BrokenStreamError,
    ClientError,
    ErrorContext,
    Reply,
    StatusError,
    problem_with,
    show_value,
)
from dragoman.client.events import AnswerTree
from dragoman.client.raw import Question, RawParseOptions
from dragoman.client.replay import RequestOutcome
from dragoman.client.reply_reader import ReplyReader
from dragoman.client.request import Request
from dragoman.client.wire import problem_in
from dragoman.dialects.declarations import Dialect
from dragoman.types import Usage

# Requests with a single JSON document as reply.


class JsonReply(Struct):
    """A reply and its decoded body."""

    reply: Reply
    body: Any
    where: ErrorContext

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of a list that have an id."""
        data = self.body.get("data") if isinstance(self.body, dict) else None
        if not isinstance(data, list):
            raise _stranger(self.where)
        return [one for one in data if isinstance(one, dict) and isinstance(one.get("id"), str)]


class JsonExchange:
    """One such request, independent of sockets: both clients read their replies through it."""

    def __init__(self, setup: ClientConfig, method: str, path: str) -> None:
        self._setup = setup
        self._where = ErrorContext(f"{method} {setup.url}{path}")

    def read(self, response: httpx.Response) -> JsonReply:
        reply, data = Reply.of(response), response.content
        where = replace(self._where, status=reply.status, request_id=reply.request_id)
        begun = replace(where, beginning=self._setup.redact(show_value(data)))
        if not response.is_success:
            problem = problem_in(data)
            raise StatusError(where if problem else begun, problem, reply)
        try:
            return JsonReply(reply, msgspec.json.decode(data) if data else None, where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _stranger(begun) from error

    def make_error(self, error: httpx.HTTPError) -> ClientError:
        return problem_with(error, self._setup.url, self._where)


def _stranger(where: ErrorContext) -> BrokenStreamError:
    return BrokenStreamError("The server does not speak the OpenAI API; check the URL.", where)


# The state of a stream, independent of how it is read from a socket.


class BaseStream:
    def __init__(self, setup: ClientConfig, request: Request) -> None:
        self._setup = setup
        self._reading = ReplyReader(setup, request)
        self._questions = self._reading.questions()
        self._begun = False

    @property
    def reply(self) -> Reply | None:
        """Status, request id and rate limits, once the headers of the reply have arrived."""
        return self._reading.reply

    @property
    def answers(self) -> list[AnswerTree]:
        """The answers so far, one per choice."""
        return self._reading.fold.answers

    @property
    def usage(self) -> Usage | None:
        return self._reading.fold.usage

    def outcome(self, error: ClientError | None = None) -> RequestOutcome:
        return replay.outcome_of(self._reading, self._setup, error)

    def save(self, folder: str | Path) -> Path:
        """Save the request and its outcome; `dragoman replay` sends it again and shows the difference."""
        return replay.save(Path(folder), self._reading, self._setup, None)

    def _begin(self) -> None:
        if self._begun:
            raise RuntimeError("This stream has already been read; send the request again for another one.")
        self._begun = True

    def _failed(self, error: ClientError) -> None:
        """Save the failed request, once: several handlers may see the error."""
        if self._setup.failures is not None and error.saved_path is None:
            error.saved_path = replay.save(self._setup.failures, self._reading, self._setup, error)

    def _next_question(self, reply: httpx.Response | None) -> Question | None:
        """Return the next request that must be answered before the stream can be read, given the last
        reply.
        """
        result = None
        if reply is not None and reply.is_success:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                result = msgspec.json.decode(reply.content)
        try:
            return self._questions.send(result)
        except StopIteration:
            return None

    def _first(self) -> AnswerTree:
        answers = self.answers
        return answers[0] if answers else AnswerTree()


# Requests.


S = TypeVar("S")


class BaseClient(ABC, Generic[S]):
    """Base of both clients; `S` is their type of stream."""

    _transport: type[Any]
    """The httpx transport for unix sockets."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        key: str | None = None,
        *,
        timeouts: Timeouts | None = None,
        retries: int = 2,
        failures: str | Path | None = None,
    ) -> None:
        self._setup = make_config(url, key, timeouts, retries, failures)
        self._connect(self._setup.options(self._transport))

    @property
    def url(self) -> str:
        return self._setup.url

    @property
    def setup(self) -> ClientConfig:
        return self._setup

    @abstractmethod
    def _connect(self, options: dict[str, Any]) -> None:
        """Create the httpx client with these arguments."""

    @abstractmethod
    def stream(self, request: Request) -> S:
        """Create a stream; the request is sent when the stream is entered or read."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> S:
        return self.stream(requests.chat(messages, fields))

    def completions(
        self,
        prompt: str | Sequence[int],
        *,
        dialect: str | Dialect | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool | None = None,
        special_tokens: Mapping[int, str] | None = None,
        **fields: Any,
    ) -> S:
        """Request a completion. Without a dialect all of it is text; with one, or "auto", reasoning and calls
        are parsed.

        `tools` are the tools that the prompt describes, whose schemas type the arguments; `special_tokens`
        maps ids of control tokens to their text, so that the same characters in ordinary text remain text.
        """
        if dialect is None:
            return self.stream(requests.completions(prompt, fields))
        raw = RawParseOptions(
            dialect=dialect,
            tools=tools,
            starts_in_reasoning=starts_in_reasoning,
            special_tokens=special_tokens,
        )
        return self.stream(requests.completions(prompt, fields, raw))

    def responses(self, input: str | Sequence[Mapping[str, Any]], **fields: Any) -> S:
        return self.stream(requests.responses(input, fields))
