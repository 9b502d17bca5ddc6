"""A turn in which the server answers some of the model's calls itself, and lets the model go on.

It looks like any other turn: the calls that the server runs, and the ends of the turns before the last one,
are not told.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, Self

from dragoman.errors import DragomanError, EngineFailed
from dragoman.folding import Fold
from dragoman.turns.turn import Turn, portion
from dragoman.types import Answer, Event, Message, ToolCall, Traced, Usage

CALLS = frozenset({"call_open", "call_arguments", "call_close"})


class Runner(Protocol):
    """Who runs the calls."""

    @property
    def names(self) -> Collection[str]:
        """The tools that it has, by the names that the model knows."""

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """Their results, in order. One that fails has a text that says so: the model may do better."""


class ToolTurn(Turn):
    """`again(messages)` plans the model's next turn, after everything that was said before `messages`."""

    def __init__(
        self, first: Turn, runner: Runner, again: Callable[[Sequence[Message]], Awaitable[Turn]]
    ) -> None:
        self.jobs = first.jobs
        self.prompt_logprobs = first.prompt_logprobs
        self.started_at = 0.0
        self.first_token_at: float | None = None
        self.finishes: dict[int, Event] = {}
        self.on_ready: Callable[[], None] | None = None
        self.traced: list[Traced] = []
        self._now = first
        self._runner = runner
        self._again = again
        self._said: list[Message] = []
        self._fold = Fold()
        self._hidden: set[int] = set()
        self._shown = 0
        self._before = Usage()
        self._ready: list[Event] = []
        self._next: asyncio.Task[None] | None = None
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None
        first.on_ready = self._read

    @property
    def choices(self) -> int:
        return 1

    @property
    def weight_version(self) -> str | None:
        return self._now.weight_version

    @property
    def usage(self) -> Usage:
        """Of all turns together."""
        return self._before + self._now.usage

    async def __aenter__(self) -> Self:
        await self._now.__aenter__()
        self.started_at = self._now.started_at
        return self

    async def begun(self, most: float) -> None:
        await self._now.begun(most)

    def close(self) -> None:
        self._ended = True
        if self._next is not None:
            self._next.cancel()
        self._now.on_ready = None
        self._now.close()
        self.wake()

    async def next(self) -> list[Event]:
        if not self._ready and not self.over:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        elif self._ready:
            await asyncio.sleep(0)
        return self.take()

    def take(self) -> list[Event]:
        self._read_now()
        taken, self._ready = portion(self._ready)
        return taken

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def over(self) -> bool:
        return self._ended and not self._ready

    def wake(self) -> None:
        if self.on_ready is not None:
            self.on_ready()
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # From turn to turn

    def _read(self) -> None:
        self._read_now()
        if self._ready or self._ended:
            self.wake()

    def _read_now(self) -> None:
        self.first_token_at = self.first_token_at or self._now.first_token_at
        while self._now.ready:
            for event in self._now.take():
                self._fold.add([event])
                if event.kind == "finish":
                    self._finished(event)
                elif shown := self._visible(event):
                    self._ready.append(shown)

    def _visible(self, event: Event) -> Event | None:
        """Calls are numbered as the client sees them."""
        if event.kind not in CALLS:
            return event
        if event.kind == "call_open":
            if event.text in self._runner.names:
                self._hidden.add(event.call)
            else:
                self._shown += 1
        if event.call in self._hidden:
            return None
        event.call = self._shown - 1
        return event

    def _finished(self, event: Event) -> None:
        """The turn goes on if all that the model waits for is to be had here."""
        self.traced += self._now.traced
        (answer,) = self._fold.done()
        mine = [call for call in answer.calls if call.name in self._runner.names]
        if event.finish == "stop" and mine and len(mine) == len(answer.calls):
            self._next = asyncio.get_running_loop().create_task(self._go_on(answer, mine))
        else:
            self._end(event)

    async def _go_on(self, answer: Answer, calls: Sequence[ToolCall]) -> None:
        try:
            results = await self._runner.run(calls)
            self._said += [_told(answer), *map(_result, calls, results)]
            following = await self._again(self._said)
            await following.__aenter__()
        except Exception as error:
            foreign = EngineFailed("The server failed; its log says why.")
            known = error if isinstance(error, DragomanError) else foreign
            self._end(Event("finish", 0, finish="error", error=known))
            self.wake()
            return
        self._before = self.usage
        self._now, self._fold, self._hidden, self._next = following, Fold(), set(), None
        following.on_ready = self._read
        self._read()

    def _end(self, event: Event) -> None:
        self._ended = True
        self.finishes[0] = event
        self._ready.append(event)


def _told(answer: Answer) -> Message:
    return Message(
        role="assistant",
        content=answer.text or None,
        reasoning=answer.reasoning or None,
        tool_calls=tuple(answer.calls),
    )


def _result(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id)
