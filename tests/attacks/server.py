"""A server in a process of its own, to be attacked: `python -m tests.attacks.server SETTINGS`.

Its model says what it is told and gives vectors. It prints its address, and, for every line that it is sent,
how it is doing.
"""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dragoman.cli.engine import template_of
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import END_ID, Script, ScriptedEngine
from dragoman.http.server import serve
from dragoman.settings import Settings
from dragoman.types import Job
from tests.attacks.audit import audit
from tests.support.parrot import NAME, START_ID, TEMPLATE

LETTERS = 26
BEAT_S = 0.01


class State(msgspec.Struct):
    """What a server says of itself."""

    live: int
    """Continuations that are being computed."""
    tasks: int
    descriptors: int
    memory: int
    """Bytes that are resident."""
    lag_p99_ms: float
    """How late the event loop was since it was asked last."""
    lag_max_ms: float


class _Forgotten(list[Job]):
    """Jobs are kept for tests in the same process; here they would look like a leak."""

    def append(self, job: Job) -> None:
        pass


def _repeated(job: Job) -> Script:
    """The last message without its role; a prompt that is no conversation, as it is."""
    ids = list(job.prompt)
    ends = [at for at, id_ in enumerate(ids) if id_ == END_ID]
    starts = [at for at, id_ in enumerate(ids) if id_ == START_ID and ends and at < ends[-1]]
    if starts:
        said = ids[starts[-1] + 1 : ends[-1]]
        newline = said.index(10) if 10 in said else -1
        ids = said[newline + 1 :]
    return Script([*(id_ for id_ in ids if id_ < 256), END_ID])


class Target(ScriptedEngine):
    """The vector of a text is how often it has each letter."""

    def __init__(self, interval: float) -> None:
        card = ModelCard(name=NAME, max_model_len=4096, templates={"default": TEMPLATE}, constrains=True)
        super().__init__(_repeated, card=card, interval=interval)
        self.jobs = _Forgotten()
        self._lags: deque[float] = deque(maxlen=100_000)
        self._tasks: list[asyncio.Task[None]] = []

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1.0 + list(ids).count(97 + letter) for letter in range(LETTERS)] for ids in prompts]

    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().add_reader(sys.stdin, self._tell)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self._lags.append(time.perf_counter() - began - BEAT_S)

    def _tell(self) -> None:
        if not sys.stdin.readline():
            asyncio.get_running_loop().remove_reader(sys.stdin)
            return
        lags = sorted(self._lags) or [0.0]
        self._lags.clear()
        state = State(
            live=self.live,
            tasks=len(asyncio.all_tasks()) - len(self._tasks),
            descriptors=len(os.listdir("/proc/self/fd")),
            memory=resident(),
            lag_p99_ms=1000 * lags[99 * len(lags) // 100],
            lag_max_ms=1000 * lags[-1],
        )
        print(msgspec.json.encode(state).decode(), flush=True)


def resident(pid: int | str = "self") -> int:
    """The bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def told(lines: Iterator[str]) -> State:
    return msgspec.json.decode(next(lines), type=State)


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1])
    pace = given.pop("interval", 0.0)
    if "audit" in given:
        audit(Path(given.pop("audit")))
    settings = msgspec.convert({"port": 0, "store": "memory", **given}, Settings)
    serve(Target(pace), settings, template=template_of(settings), on_ready=lambda url: print(url, flush=True))
