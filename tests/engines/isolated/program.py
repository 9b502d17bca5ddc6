"""The process of an engine that says what it is told, begun by `opened`.

What it is told at first is how it is to behave.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dragoman.engines.isolated import IsolatedEngine, child, wire
from dragoman.engines.isolated.engine import die_with_parent
from dragoman.engines.protocol import Tokenizer
from dragoman.engines.scripted import ByteTokenizer, Script, ScriptedEngine, say
from dragoman.errors import BadRequest, ModelFileError
from dragoman.media import Media
from dragoman.types import Job

COMMAND = (sys.executable, "-m", "tests.engines.isolated.program")


class CountingEngine(ScriptedEngine):
    """`embed` tells how many continuations are at work."""

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        if not prompts:
            raise BadRequest("There is nothing to embed.", param="input", code="empty")
        return [[float(self.live)] for _ in prompts]

    def media_token_ids(self, media: Media) -> list[int]:
        if media.detail == "low":
            raise BadRequest("This cannot be seen.", code="unseen")
        return list(media.data)


def script(job: Job) -> Script:
    if job.media:
        return say(" ".join(f"{span.start}:{span.media.data.decode()}" for span in job.media))
    match job.cache_salt:
        case "crash":
            return say("hello", fault="crash", fault_at=2)
        case "endless":
            return Script([97] * 1_000_000)
        case "refused":
            raise BadRequest("No.", param="prompt", code="no")
        case "broken":
            raise ZeroDivisionError("a secret")
    return say("hello")


def open_told(how: str) -> CountingEngine:
    if how == "abort":
        os.abort()
    if how == "refuse":
        raise ModelFileError("There is no such file.")
    return CountingEngine(script, interval=0.001, modalities=("image",))


def opened(how: str = "", tokenizer: Tokenizer | None = None) -> IsolatedEngine:
    return IsolatedEngine.open(COMMAND, how, lambda: tokenizer or ByteTokenizer())


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked yet how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


if __name__ == "__main__":
    link, lifeline = map(int, sys.argv[1:])
    die_with_parent(lifeline)
    with socket.socket(fileno=link) as connection:
        told = msgspec.msgpack.decode(wire.receive(connection), type=str)
        if told == "babble":
            connection.sendall(wire.frame(wire.Pong(1)))
        sys.exit(child.serve(connection, lambda: open_told(told)))
