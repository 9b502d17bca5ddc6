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

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import END_ID, Script, ScriptedEngine
from dragoman.http.server import serve
from dragoman.media import Media
from dragoman.media.decode import MediaDecoder
from dragoman.settings import Settings
from dragoman.types import Job
from tests.attacks.audit import audit
from tests.attacks.watch import Watch
from tests.support.parrot import NAME, START_ID, TEMPLATE

LETTERS = 26
FOLDER = str(Path(__file__).parent)
"""From which "adapters" are loaded."""
BEAT_S = 0.005
"""How often the loop is asked whether it is late."""


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
    busy_max_ms: float
    """How much of such a lag this process computed; the rest it waited for others on the machine."""
    stalled: str
    """Where it was when it was late, if it is watched."""


class _ForgottenJobs(list[Job]):
    """Jobs are kept for tests in the same process; here they would look like a leak."""

    def append(self, job: Job) -> None:
        pass


def _repeated(job: Job) -> Script:
    """The last message without its role; a prompt that is no conversation, as it is."""
    # By calls that cost next to nothing: the loop of this server is measured.
    backwards = job.prompt[::-1]
    end = _index(backwards, END_ID, 0)
    start = _index(backwards, START_ID, end)
    if start < len(backwards):
        numbers = job.prompt[len(backwards) - start : len(backwards) - end - 1]
        numbers = numbers[_index(numbers, 10, 0) + 1 :] or numbers
    else:
        numbers = job.prompt
    return Script([*(id_ for id_ in numbers[: job.sampling.max_tokens] if id_ < 256), END_ID])


def _index(ids: Sequence[int], wanted: int, begin: int) -> int:
    """Where it is; behind the last if it is nowhere."""
    try:
        return ids.index(wanted, begin)
    except ValueError:
        return len(ids)


def _vector(ids: Sequence[int]) -> list[float]:
    return [1.0 + ids.count(97 + letter) for letter in range(LETTERS)]


class Target(ScriptedEngine):
    """The vector of a text is how often it has each letter."""

    def __init__(
        self,
        interval: float,
        context: int = 4096,
        *,
        watched: bool = False,
        slots: int | None = None,
        sees: bool = False,
    ) -> None:
        card = ModelCard(name=NAME, max_model_len=context, templates={"default": TEMPLATE}, constrains=True)
        card.modalities = frozenset({"image", "audio"} if sees else ())
        self._decoder = MediaDecoder() if sees else None
        card.slots = card.max_concurrent_embeds = slots
        super().__init__(_repeated, card=card, interval=interval)
        self.jobs = _ForgottenJobs()
        self._lags: deque[float] = deque(maxlen=100_000)
        self._busy = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._watch = Watch() if watched else None

    def media_token_ids(self, media: Media) -> list[int]:
        """Decoded first, as by an engine with a model."""
        if self._decoder is not None:
            how = self._decoder
            how.decode_image(media) if media.kind == "image" else how.decode_audio(media, 16_000)
        return super().media_token_ids(media)[:4]

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [await asyncio.to_thread(_vector, ids) for ids in prompts]

    async def load_adapter(self, name: str, path: str) -> None:
        """Whatever it is."""

    async def unload_adapter(self, name: str) -> None:
        pass

    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().add_reader(sys.stdin, self._tell)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _beat(self) -> None:
        while True:
            began, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(BEAT_S)
            self._lags.append(time.perf_counter() - began - BEAT_S)
            self._busy = max(self._busy, min(self._lags[-1], time.process_time() - computed))
            if self._watch:
                self._watch.beat()

    def _tell(self) -> None:
        if not sys.stdin.readline():
            asyncio.get_running_loop().remove_reader(sys.stdin)
            return
        lags = sorted(self._lags) or [0.0]
        self._lags.clear()
        self._busy, busy = 0.0, self._busy
        state = State(
            live=self.live,
            tasks=len(asyncio.all_tasks()) - len(self._tasks),
            descriptors=len(os.listdir("/proc/self/fd")),
            memory=resident(),
            lag_p99_ms=1000 * lags[99 * len(lags) // 100],
            lag_max_ms=1000 * lags[-1],
            busy_max_ms=1000 * busy,
            stalled=self._watch.told() if self._watch else "",
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
    engine = Target(
        given.pop("interval", 0.0),
        given.pop("context", 4096),
        watched=given.pop("watched", False),
        slots=given.pop("engine_slots", None),
        sees=given.pop("sees", False),
    )
    if "audit" in given:
        audit(Path(given.pop("audit")))
    settings = msgspec.convert({"port": 0, "store": "memory", "lora_dir": FOLDER, **given}, Settings)
    serve(engine, settings, on_ready=lambda url: print(url, flush=True))
