"""Messages between the server and the engine process: length, then MessagePack."""

import asyncio
import hashlib
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import PurePath
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman import errors
from dragoman.constrain.constraint import compile_cached
from dragoman.constrain.reasoning_budget import BudgetedConstraint, ConstraintSpec, ReasoningBudget
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.engines.steps import join_steps
from dragoman.errors import BadRequest, DragomanError, EngineFailed, ParamKey
from dragoman.media import Media
from dragoman.types import ConstraintSource, Job, JobConstraint, Matcher, Step

# Constraints, which are rebuilt from their specification in the engine process.


def constraint_spec(constraint: JobConstraint | None) -> ConstraintSpec | None:
    """Return a constraint's specification; None if the engine reads its source instead."""
    if constraint is None or constraint.source is not None:
        return None
    recipe = getattr(constraint, "recipe", None)
    if not isinstance(recipe, ConstraintSpec):
        raise BadRequest("This constraint cannot be sent to an engine in another process.")
    return recipe


class RebuiltConstraint:
    source = None

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self.new_matcher = start


class SourceConstraint:
    """A constraint that the engine enforces itself."""

    def __init__(self, source: ConstraintSource) -> None:
        self.source = source

    def new_matcher(self) -> Matcher:
        raise EngineFailed("The engine enforces this constraint itself.")


class ConstraintFactory:
    """Compiles constraints for one model. Safe to call from worker threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, created at the first use: that takes a while for a large one."""
        return Vocabulary(self._tokenizer.pieces, self._tokenizer.special_ids, self._tokenizer.end_ids)

    def make(self, recipe: ConstraintSpec) -> JobConstraint:
        start = None
        if recipe.grammar is not None:
            start = compile_cached(recipe.grammar, self.vocabulary).copy
        if recipe.budget is not None:
            spec = recipe.budget
            budget = ReasoningBudget(
                spec.markers, spec.tokens, self._tokenizer, starts_in_reasoning=spec.starts_in_reasoning
            )
            return BudgetedConstraint(budget, start)
        assert start is not None
        return RebuiltConstraint(start)


# The messages.


_LENGTH = 4
_AT_ONCE = 1 << 18


class WireError(Struct, frozen=True):
    """A DragomanError as data."""

    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    is_part: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "WireError":
        if not isinstance(error, DragomanError):
            return cls("EngineFailed", "The engine failed in this call.")
        param = None if error.param is None else str(error.param)
        return cls(type(error).__name__, error.message, error.code, param, isinstance(error.param, ParamKey))

    def error(self) -> DragomanError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DragomanError)):
            kind = EngineFailed
        # Some error types compose their own message; here it is complete already.
        dragoman_error: DragomanError = kind.__new__(kind)
        param = ParamKey(self.param) if self.param is not None and self.is_part else self.param
        DragomanError.__init__(dragoman_error, self.message, param=param, code=self.code)
        return dragoman_error


class JobSubmission(Struct, tag=True):
    id: int
    job: Job
    """The job without its constraint, and without the data of its media: `MediaUpload` comes before it."""
    recipe: ConstraintSpec | None = None
    source: ConstraintSource | None = None
    """A constraint has either a recipe or a source."""


class MediaUpload(Struct, tag=True):
    """The data of a medium, sent once; it is cached until `MediaEviction`."""

    digest: str
    data: bytes


class MediaEviction(Struct, tag=True):
    digest: str


class JobCancellation(Struct, tag=True):
    id: int
    index: int | None


class MethodCall(Struct, tag=True):
    """A call of an engine method by name."""

    id: int
    method: str
    args: list[Any]


class Ping(Struct, tag=True):
    pass


class Shutdown(Struct, tag=True):
    pass


Command: TypeAlias = (
    JobSubmission | MediaUpload | MediaEviction | JobCancellation | MethodCall | Ping | Shutdown
)


class EngineReady(Struct, tag=True):
    """The engine is open."""

    card: ModelCard
    methods: list[str]
    digest: bytes
    """Digest of the vocabulary."""


class EngineOpenError(Struct, tag=True):
    error: WireError


class StepReport(Struct, tag=True):
    """The steps of all jobs at one engine step."""

    steps: list[tuple[int, Step]]


class MethodResult(Struct, tag=True):
    id: int
    value: Any = None
    error: WireError | None = None
    weight_version: str | None = None


class Pong(Struct, tag=True):
    pulse: int


Report: TypeAlias = EngineReady | EngineOpenError | StepReport | MethodResult | Pong


def _plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        return WireError.of(value)
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError


def _make(kind: type, value: Any) -> Any:
    if kind is Exception:
        return msgspec.convert(value, WireError).error()
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
orders: "msgspec.msgpack.Decoder[Command]" = msgspec.msgpack.Decoder(Command, dec_hook=_make)
news: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report, dec_hook=_make)


def frame(message: Any) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH, "little") + data


def receive(link: socket.socket) -> bytes:
    """Receive one message, without an event loop. Raises EOFError when the other side is gone."""
    return _exactly(link, int.from_bytes(_exactly(link, _LENGTH), "little"))


class FrameReader:
    """Reads all complete messages of a stream as soon as there is one."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._begun = bytearray()

    async def read(self) -> list[bytes]:
        """Return the next messages. Raises EOFError when the other side is gone."""
        while not (chunks := self._whole()):
            try:
                data = await self._stream.read(_AT_ONCE)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._begun += data
        return chunks

    def _whole(self) -> list[bytes]:
        chunks, start, begun = [], 0, self._begun
        while start + _LENGTH <= len(begun):
            end = start + _LENGTH + int.from_bytes(begun[start : start + _LENGTH], "little")
            if end > len(begun):
                break
            chunks.append(bytes(begun[start + _LENGTH : end]))
            start = end
        del begun[:start]
        return chunks


def merge_step_reports(items: Iterable[Report]) -> Iterator[Report]:
    """Join messages that have queued up, with one step per continuation: a server that lags behind its
    engine (`MOST_APART`) does so, so that each token costs less the more there is to do.
    """
    steps: dict[tuple[int, int], Step] = {}

    def joined() -> Iterator[StepReport]:
        if steps:
            yield StepReport([(id, step) for (id, _), step in steps.items()])
            steps.clear()

    for one in items:
        if not isinstance(one, StepReport):
            yield from joined()
            yield one
            continue
        for id, step in one.steps:
            before = steps.get((id, step.index))
            if before is not None and not _go_together(before, step):
                yield from joined()
                before = None
            steps[id, step.index] = step if before is None else join_steps(before, step)
    yield from joined()


def _go_together(first: Step, second: Step) -> bool:
    """Whether two steps can be joined without losing facts that are reported once."""
    once = first.finish is not None or first.cached_tokens is not None or first.prompt_logprobs is not None
    return not once and first.weight_version == second.weight_version


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = link.recv(count - len(data))
        except ConnectionError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# Media, whose data is sent once.


def without_data(media: Media) -> Media:
    return replace(media, data=b"")


def spans_with(job: Job, change: Callable[[Media], Media]) -> Job:
    """Return the job with its media changed."""
    return replace(job, media=tuple(replace(span, media=change(span.media)) for span in job.media))


class MediaMirror:
    """The server's mirror of the child's media cache: an LRU bounded in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, int] = OrderedDict()

    def orders(self, media: Iterable[Media]) -> tuple[list[MediaUpload], list[MediaEviction]]:
        """Return the messages to send before these media are used, and those to send afterwards."""
        new = []
        for each in media:
            if each.digest not in self._kept:
                new.append(MediaUpload(each.digest, each.data))
                self._kept[each.digest] = len(each.data)
            self._kept.move_to_end(each.digest)
        old = []
        while self._kept and sum(self._kept.values()) > self._most:
            old.append(MediaEviction(self._kept.popitem(last=False)[0]))
        return new, old


def digest(tokenizer: Tokenizer) -> bytes:
    """Return a digest that is equal for two tokenizers with the same pieces at the same ids."""
    summed = hashlib.sha256()
    for piece in tokenizer.pieces:
        summed.update(len(piece).to_bytes(4, "little") + piece)
    return summed.digest()
