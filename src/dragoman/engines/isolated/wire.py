"""What the server and the process of its engine say to each other: length, then MessagePack."""

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
from dragoman.constrain.reasoning_budget import Budgeted, ReasoningBudget, Recipe
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.engines.steps import join_steps
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Part
from dragoman.media import Media
from dragoman.types import ConstraintSource, Job, JobConstraint, Matcher, Step

# Constraints, which are made again from their recipes in the process of the engine.


def recipe_of(constraint: JobConstraint | None) -> Recipe | None:
    """How it is made; None where there is nothing to make, because the engine reads its source."""
    if constraint is None or constraint.source is not None:
        return None
    recipe = getattr(constraint, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise BadRequest("This constraint cannot be sent to the engine, which is in another process.")
    return recipe


class Remade:
    source = None

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self.start = start


class Sourced:
    """A constraint that the engine keeps to by itself."""

    def __init__(self, source: ConstraintSource) -> None:
        self.source = source

    def start(self) -> Matcher:
        raise EngineFailed("This constraint is kept to by the engine itself.")


class Kitchen:
    """Makes constraints for one model. Safe to call from worker threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Made at the first use: it takes a while for a large vocabulary."""
        return Vocabulary(self._tokenizer.pieces, self._tokenizer.special, self._tokenizer.end_ids)

    def make(self, recipe: Recipe) -> JobConstraint:
        start = None
        if recipe.grammar is not None:
            start = compile_cached(recipe.grammar, self.vocabulary).copy
        if recipe.budget is not None:
            told = recipe.budget
            budget = ReasoningBudget(
                told.markers, told.tokens, self._tokenizer, starts_in_reasoning=told.starts_in_reasoning
            )
            return Budgeted(budget, start)
        assert start is not None
        return Remade(start)


# Messages.


_LENGTH = 4
_AT_ONCE = 1 << 18


class Told(Struct, frozen=True):
    """An error of ours, as data."""

    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    is_part: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "Told":
        if not isinstance(error, DragomanError):
            return cls("EngineFailed", "The engine failed at what it was asked.")
        param = None if error.param is None else str(error.param)
        return cls(type(error).__name__, error.message, error.code, param, isinstance(error.param, Part))

    def error(self) -> DragomanError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DragomanError)):
            kind = EngineFailed
        # Some kinds have words of their own; here they are written already.
        made: DragomanError = kind.__new__(kind)
        param = Part(self.param) if self.param is not None and self.is_part else self.param
        DragomanError.__init__(made, self.message, param=param, code=self.code)
        return made


class Submit(Struct, tag=True):
    id: int
    job: Job
    """Without its constraint, and without the data of its media: `Show` comes before it."""
    recipe: Recipe | None = None
    source: ConstraintSource | None = None
    """Of its constraint there is one or the other."""


class Show(Struct, tag=True):
    """The data of a picture or a sound, once; it is kept until it is to be forgotten."""

    digest: str
    data: bytes


class Forget(Struct, tag=True):
    digest: str


class Cancel(Struct, tag=True):
    id: int
    index: int | None


class Ask(Struct, tag=True):
    """A method of the engine, by its name."""

    id: int
    method: str
    args: list[Any]


class Ping(Struct, tag=True):
    pass


class Stop(Struct, tag=True):
    pass


Order: TypeAlias = Submit | Show | Forget | Cancel | Ask | Ping | Stop


class EngineOpened(Struct, tag=True):
    """The engine is there."""

    card: ModelCard
    methods: list[str]
    digest: bytes
    """Of its vocabulary."""


class NotOpened(Struct, tag=True):
    error: Told


class Said(Struct, tag=True):
    """What all jobs have to say at one step of the engine."""

    steps: list[tuple[int, Step]]


class Answered(Struct, tag=True):
    id: int
    value: Any = None
    error: Told | None = None
    weight_version: str | None = None


class Pong(Struct, tag=True):
    pulse: int


News: TypeAlias = EngineOpened | NotOpened | Said | Answered | Pong


def _plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        return Told.of(value)
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError


def _make(kind: type, value: Any) -> Any:
    if kind is Exception:
        return msgspec.convert(value, Told).error()
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
orders: "msgspec.msgpack.Decoder[Order]" = msgspec.msgpack.Decoder(Order, dec_hook=_make)
news: "msgspec.msgpack.Decoder[News]" = msgspec.msgpack.Decoder(News, dec_hook=_make)


def frame(message: Any) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH, "little") + data


def receive(link: socket.socket) -> bytes:
    """One message, where there is no event loop yet. Raises EOFError when the other side is gone."""
    return _exactly(link, int.from_bytes(_exactly(link, _LENGTH), "little"))


class Frames:
    """All messages of a stream that have come, as soon as there is one."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._begun = bytearray()

    async def read(self) -> list[bytes]:
        """Raises EOFError when the other side is gone."""
        while not (found := self._whole()):
            try:
                data = await self._stream.read(_AT_ONCE)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._begun += data
        return found

    def _whole(self) -> list[bytes]:
        found, start, begun = [], 0, self._begun
        while start + _LENGTH <= len(begun):
            end = start + _LENGTH + int.from_bytes(begun[start : start + _LENGTH], "little")
            if end > len(begun):
                break
            found.append(bytes(begun[start + _LENGTH : end]))
            start = end
        del begun[:start]
        return found


def join_said(told: Iterable[News]) -> Iterator[News]:
    """Messages that have waited behind each other, with the steps of each continuation as one: what a server
    does that is behind its engine (`MOST_APART`). So the more there is to do, the less each token costs."""
    steps: dict[tuple[int, int], Step] = {}

    def joined() -> Iterator[Said]:
        if steps:
            yield Said([(id, step) for (id, _), step in steps.items()])
            steps.clear()

    for one in told:
        if not isinstance(one, Said):
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
    """Whether what is said of the first is said of both. What is told once is told by itself."""
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


# Media, of which the data travel once.


def without_data(media: Media) -> Media:
    return replace(media, data=b"")


def spans_with(job: Job, change: Callable[[Media], Media]) -> Job:
    """The job with its media changed."""
    return replace(job, media=tuple(replace(span, media=change(span.media)) for span in job.media))


class Shown:
    """What the process of the engine has been shown, as the server decides: up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, int] = OrderedDict()

    def orders(self, media: Iterable[Media]) -> tuple[list[Show], list[Forget]]:
        """What to say before these are named, and what behind that."""
        new = []
        for each in media:
            if each.digest not in self._kept:
                new.append(Show(each.digest, each.data))
                self._kept[each.digest] = len(each.data)
            self._kept.move_to_end(each.digest)
        old = []
        while self._kept and sum(self._kept.values()) > self._most:
            old.append(Forget(self._kept.popitem(last=False)[0]))
        return new, old


def digest(tokenizer: Tokenizer) -> bytes:
    """The same for two tokenizers with the same pieces at the same ids."""
    summed = hashlib.sha256()
    for piece in tokenizer.pieces:
        summed.update(len(piece).to_bytes(4, "little") + piece)
    return summed.digest()
