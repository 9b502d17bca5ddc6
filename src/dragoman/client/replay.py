"""A saved request, sent again, and what is different now."""

import difflib
from collections.abc import Iterator

import msgspec

from dragoman.client.events import AnswerTree, Called
from dragoman.client.failures import Failure, Outcome
from dragoman.client.problems import ClientError
from dragoman.client.request import Request
from dragoman.client.sync_client import Client


def replay(failure: Failure, client: Client) -> Outcome:
    """What comes of the request now; a failure is an outcome too."""
    stream = client.stream(Request(failure.path, failure.body))
    try:
        for _ in stream:
            pass
    except ClientError as error:
        return stream.outcome(error)
    return stream.outcome()


def difference(before: Outcome, now: Outcome) -> list[str]:
    """The lines of a unified diff; none where nothing that matters has changed."""
    lines = difflib.unified_diff(
        list(tell_outcome(before)), list(tell_outcome(now)), "before", "now", n=3, lineterm=""
    )
    return list(lines)


def tell_outcome(outcome: Outcome) -> Iterator[str]:
    """An outcome as a person would tell it. What differs every time (ids of requests, dates) is left out."""
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
        if isinstance(part, Called):
            yield f"call {part.name}{'' if part.complete else ' (not complete)'}:"
            yield from _indent(part.arguments)
        elif part.text:
            yield f"{part.kind}:"
            yield from _indent(part.text)
    yield f"finish: {answer.finish or 'none'}"


def _indent(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.split("\n"))
