"""An engine for exact tests: it answers with a given script, at a given pace, and with faults on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from typing import Literal, TypeAlias

from msgspec import Struct, field

from dragoman.engines.protocol import JobHandle, ModelCard, encode_bytes
from dragoman.engines.steps import iterate
from dragoman.errors import EngineFailed
from dragoman.media import Media, MediaKind
from dragoman.types import FinishReason, Job, Sink, Step, TokenLogprob

Fault: TypeAlias = Literal["exception", "hang", "crash"]

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIGHTED = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)
"""Chat template for models that take images and audio."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLACE_ID = 256 + SPECIAL.index("<|endoftext|>")
PIXELS, MOST_PLACED = 32, 256
END_ID = 256 + SPECIAL.index("<|im_end|>")


class ByteTokenizer:
    """Tokenizer with one id per byte, then the special tokens, then any words that a script wants as one
    id.
    """

    def __init__(self, words: Sequence[str | bytes] = ()) -> None:
        extra = [word.encode() if isinstance(word, str) else word for word in words]
        self.pieces = [bytes([byte]) for byte in range(256)] + [text.encode() for text in SPECIAL] + extra
        self.special_ids: Mapping[str, int] = {text: 256 + number for number, text in enumerate(SPECIAL)}
        self.bos_id: int | None = None
        self.eos_id: int | None = END_ID
        self.end_ids = frozenset({256, END_ID})
        self.add_bos = False
        self.infill: tuple[int, int, int] | None = None

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)


class Script(Struct, frozen=True):
    """The answer to one job."""

    ids: Sequence[int]
    burst: int = 1
    """Ids per step."""
    finish: FinishReason = "stop"
    fault: Fault | None = None
    fault_at: int = 0
    """Number of ids after which the fault occurs."""


def say(text: str, *, burst: int = 1, fault: Fault | None = None, fault_at: int = 0) -> Script:
    """Return the script for a text: `say("hi")` is two bytes and the end of the turn."""
    return Script([*text.encode(), END_ID], burst, fault=fault, fault_at=fault_at)


class _ScriptedJob(Struct):
    job: Job
    sink: Sink
    script: Script
    said: int = 0
    open: set[int] = field(default_factory=set)

    def cancel(self, index: int | None = None) -> None:
        self.open = set() if index is None else self.open - {index}


class ScriptedEngine:
    """Engine that follows scripts. `interval` is the number of seconds between steps; 0 is as fast as the
    event loop.
    """

    def __init__(
        self,
        script: Script | Callable[[Job], Script],
        *,
        interval: float = 0.0,
        tokenizer: ByteTokenizer | None = None,
        card: ModelCard | None = None,
        modalities: Iterable[MediaKind] = (),
    ) -> None:
        """`modalities` are for the default card."""
        self.tokenizer = tokenizer or ByteTokenizer()
        takes = frozenset(modalities)
        template = SIGHTED if takes else CHATML
        self.card = card or ModelCard(
            name="scripted", max_model_len=4096, templates={"default": template}, modalities=takes
        )
        self.placed: list[str] = []
        """Digests of the media given to `media_token_ids`."""
        self.jobs: list[Job] = []
        """All submitted jobs, for assertions."""
        self._script = script
        self._interval = interval
        self._running: list[_ScriptedJob] = []
        self._armed = False
        self._dead = False
        self.weight_version: str | None = None
        self._paused = False

    @property
    def live(self) -> int:
        """Number of continuations that are not over."""
        return sum(len(run.open) for run in self._running)

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        if self._dead:
            raise EngineFailed("The engine has crashed.")
        script = self._script(job) if callable(self._script) else self._script
        run = _ScriptedJob(job, sink, script, open=set(range(job.n)))
        self.jobs.append(job)
        self._running.append(run)
        self._arm()
        return run

    def generate(self, job: Job) -> AsyncIterator[Step]:
        return iterate(self, job)

    def media_token_ids(self, media: Media) -> list[int]:
        """Return an id for each 32 by 32 pixels, or each second: that of the end of text, which no text
        contains.
        """
        self.placed.append(media.digest)
        rows, columns = -(-media.height // PIXELS), -(-media.width // PIXELS)
        count = rows * columns if media.kind == "image" else ceil(media.seconds)
        return [PLACE_ID] * min(max(count, 1), MOST_PLACED)

    async def start(self) -> None:
        self._dead = False

    async def stop(self) -> None:
        for run in self._running:
            self._end(run, "abort", None)
        self._running.clear()

    async def check(self) -> None:
        if self._dead:
            raise EngineFailed("The engine has crashed.")

    async def pause(self) -> None:
        self._paused = True

    async def resume(self, weight_version: str | None = None) -> None:
        self.weight_version = weight_version or self.weight_version
        self._paused = False
        self._arm()

    def _arm(self) -> None:
        if self._armed or self._paused or not self._running:
            return
        self._armed = True
        loop = asyncio.get_running_loop()
        if self._interval:
            loop.call_later(self._interval, self._step)
        else:
            loop.call_soon(self._step)

    def _step(self) -> None:
        self._armed = False
        if self._paused:
            return
        self._running = [run for run in self._running if run.open]
        for run in self._running:
            self._advance(run)
        self._running = [run for run in self._running if run.open]
        self._arm()

    def _advance(self, run: _ScriptedJob) -> None:
        script = run.script
        if script.fault is not None and run.said >= script.fault_at:
            self._break(run, script.fault)
            return
        most = min(script.burst, run.job.sampling.max_tokens - run.said)
        if script.fault is not None:
            most = min(most, script.fault_at - run.said)
        ids = list(script.ids[run.said : run.said + most])
        first = run.said == 0
        run.said += len(ids)
        finish = self._finish(run)
        for index in sorted(run.open):
            run.sink(_step(run, index, ids, finish, first))
        if finish is not None:
            run.open.clear()

    def _finish(self, run: _ScriptedJob) -> FinishReason | None:
        if run.said >= len(run.script.ids):
            return run.script.finish
        return "length" if run.said >= run.job.sampling.max_tokens else None

    def _break(self, run: _ScriptedJob, fault: Fault) -> None:
        if fault == "exception":
            self._end(run, "error", EngineFailed("The script makes this job fail."))
        elif fault == "crash":
            self._dead = True
            for other in self._running:
                self._end(other, "error", EngineFailed("The engine has crashed."))

    def _end(self, run: _ScriptedJob, finish: FinishReason, error: Exception | None) -> None:
        for index in sorted(run.open):
            run.sink(Step([], index, finish=finish, error=error))
        run.open.clear()


def _step(run: _ScriptedJob, index: int, ids: list[int], finish: FinishReason | None, first: bool) -> Step:
    sampling = run.job.sampling
    step = Step(ids, index, finish=finish)
    if sampling.logprobs is not None:
        step.logprobs = [_logprob(id_, sampling.logprobs) for id_ in ids]
    if first and index == 0:
        step.cached_tokens = 0
        if sampling.prompt_logprobs is not None:
            known = [_logprob(id_, sampling.prompt_logprobs) for id_ in run.job.prompt[1:]]
            step.prompt_logprobs = [None, *known]
    return step


@lru_cache(maxsize=1024)
def _logprob(id_: int, top: int) -> TokenLogprob:
    # Adjacent ids, in the direction where there are enough.
    way = -1 if id_ >= top else 1
    return TokenLogprob(id_, -0.5, tuple((id_ + way * rank, -0.5 - rank) for rank in range(top)))
