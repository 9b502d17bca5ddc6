"""Failed requests on disk, for `dragoman replay`: request and outcome, without keys."""

import datetime
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct, field

from dragoman.client.config import ClientConfig
from dragoman.client.errors import ClientError, FileFormatError
from dragoman.client.events import AnswerTree, CallPart
from dragoman.client.reply_reader import ReplyReader
from dragoman.types import Usage

_SECRET = frozenset({"authorization", "api_key", "api-key", "x-api-key", "headers", "set-cookie", "cookie"})
_REMOVED = "[removed]"


class RequestOutcome(Struct, kw_only=True):
    """The outcome of a request."""

    status: int | None = None
    request_id: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    where: str | None = None
    beginning: str = ""
    """The first bytes of the reply, as text."""
    answers: list[AnswerTree] = field(default_factory=list)
    usage: Usage | None = None


class SavedFailure(Struct, kw_only=True):
    """A failed request with its outcome."""

    version: int = 1
    at: str
    url: str
    path: str
    body: dict[str, Any]
    outcome: RequestOutcome


def outcome_of(reading: ReplyReader, setup: ClientConfig, error: ClientError | None) -> RequestOutcome:
    reply = reading.reply
    return RequestOutcome(
        status=reply.status if reply else None,
        request_id=reply.request_id if reply else None,
        headers=without_secrets(dict(reply.headers)) if reply else {},
        error=setup.redact(error.message) if error else None,
        where=setup.redact(str(error.context)) if error else None,
        beginning=setup.redact(reading.beginning.decode("utf-8", "replace")),
        answers=reading.fold.answers,
        usage=reading.fold.usage,
    )


def save(folder: Path, reading: ReplyReader, setup: ClientConfig, error: ClientError | None) -> Path:
    """Write the request and its outcome to a new file that only its owner can read: prompts are private."""
    now = datetime.datetime.now(datetime.UTC)
    failure = SavedFailure(
        at=now.isoformat(timespec="seconds"),
        url=setup.url,
        path=reading.request.path,
        body=without_secrets(reading.request.body),
        outcome=outcome_of(reading, setup, error),
    )
    text = setup.redact(msgspec.json.format(msgspec.json.encode(failure), indent=1).decode())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y%m%d-%H%M%S}-{uuid4().hex[:8]}.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path


def load(path: Path) -> SavedFailure:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedFailure)
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a request saved by a client.") from error


def without_secrets(value: Any) -> Any:
    """Replace values under secret names at any depth: tools may contain some."""
    if isinstance(value, Mapping):
        return {
            name: _REMOVED if str(name).lower() in _SECRET else without_secrets(one)
            for name, one in value.items()
        }
    return [without_secrets(one) for one in value] if isinstance(value, list) else value


def difference(before: RequestOutcome, now: RequestOutcome) -> list[str]:
    """Compare two outcomes as the lines of a unified diff; empty if nothing relevant differs."""
    lines = difflib.unified_diff(
        list(tell_outcome(before)), list(tell_outcome(now)), "before", "now", n=3, lineterm=""
    )
    return list(lines)


def tell_outcome(outcome: RequestOutcome) -> Iterator[str]:
    """Format an outcome. Request ids, dates and other values that always differ are left out."""
    yield f"status: {outcome.status or 'none'}"
    if outcome.error is not None:
        yield f"error: {outcome.error}"
    for answer in outcome.answers:
        yield from _answer(answer, len(outcome.answers) > 1)
    if outcome.usage is not None:
        usage = msgspec.structs.asdict(outcome.usage)
        yield "usage: " + ", ".join(f"{name} {count}" for name, count in usage.items())


def _answer(answer: AnswerTree, numbered: bool) -> Iterator[str]:
    if numbered:
        yield f"choice {answer.choice}:"
    for part in answer.parts:
        if isinstance(part, CallPart):
            yield f"call {part.name}{'' if part.complete else ' (not complete)'}:"
            yield from _indent(part.arguments)
        elif part.text:
            yield f"{part.kind}:"
            yield from _indent(part.text)
    yield f"finish: {answer.finish or 'none'}"


def _indent(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.split("\n"))
