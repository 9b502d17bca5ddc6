"""What all measured parsers share: tasks come in on stdin, figures and answers go out on stdout, as JSON.

Only the standard library: this also runs in the environments of the peers.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

Delta: TypeAlias = tuple[list[int], str]
"""The ids of some tokens, and their text."""


class Task(NamedTuple):
    mode: str
    """`call`, `prose` or `reasoning`: which of its parsers a peer needs."""
    parser: str
    """What the peer calls the format."""
    tools: list[dict[str, Any]]
    vocabulary: dict[str, int]
    tokens: list[list[Any]]
    """Pairs of an id and its text."""
    chunk: int
    """Tokens in one delta."""
    passes: int


class ParseResult(NamedTuple):
    """What a parser made of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []  # noqa: RUF012
    """Names and arguments."""


class ParseRun(Protocol):
    """One answer that is about to be read. Only `run` is measured."""

    def run(self) -> None: ...

    def told(self) -> ParseResult: ...


def serve(begin: Callable[[Task, list[Delta]], ParseRun]) -> None:
    """Answer tasks until stdin ends."""
    # What a package prints must not get between the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = measure(begin, Task(**json.loads(line)))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def measure(begin: Callable[[Task, list[Delta]], ParseRun], task: Task) -> dict[str, Any]:
    chunks = [task.tokens[at : at + task.chunk] for at in range(0, len(task.tokens), task.chunk)]
    deltas = [([id_ for id_, _ in chunk], "".join(text for _, text in chunk)) for chunk in chunks]
    begin(task, deltas).run()  # warms up
    gc.collect()
    gc.freeze()
    spent = 0.0
    for _ in range(task.passes):
        reading = begin(task, deltas)
        began = time.process_time()
        reading.run()
        spent += time.process_time() - began
    parts = reading.told()
    tokens = len(task.tokens) * task.passes
    return {
        "us": spent / tokens * 1e6,
        "text": parts.text,
        "reasoning": parts.reasoning,
        "calls": parts.calls,
    }
