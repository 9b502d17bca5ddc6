"""Turns of the model, and between them the calls that the server makes for it.

    plan a turn -> the client hears it -> calls that are the server's to make are made -> their results are
    told -> plan the next turn

It ends where the model calls nothing of the server's, where a client has to do something first, and where the
tokens or the calls that an answer may have are used up. `ToolLoop` is that and nothing else. What is an API's
own (how the next prompt comes about, what the client sees of calls and results) is an `Answering`: a response
has an item for each call, while `HiddenCalls` shows one plain answer, for APIs without a place for them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from dragoman.folding import Fold
from dragoman.mcp import CallResult
from dragoman.turns.outlet import Outlet, Speaker, Written
from dragoman.turns.spec import TurnSpec
from dragoman.turns.toolbox import Outcome, ServedCall, Toolbox
from dragoman.turns.turn import Turn, note_turn, note_usage
from dragoman.types import Answer, Conversation, Event, FinishReason, Message, ToolCall, Traced, Usage

CALL_EVENTS = frozenset({"call_open", "call_arguments", "call_close"})


class Heard(Struct, frozen=True):
    """What a turn of the model came to."""

    finish: FinishReason | None
    calls: Sequence[ServedCall] = ()
    """Those that the server is to make."""
    for_client: bool = False
    """Whether the client has something to do before the model can go on."""


class Answering(Speaker, Protocol):
    """An answer while it is made, in the way of one API."""

    async def plan(self) -> Turn:
        """The next turn, with all that was said and told so far."""

    async def hear(self, turn: Turn) -> Heard:
        """Runs it to its end. Raises what made it fail."""

    async def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of the calls that were heard last."""


class ToolLoop:
    def __init__(
        self, toolbox: Toolbox, most_tokens: int | None, facts: dict[str, Any] | None = None
    ) -> None:
        """`most_tokens` are those of all turns together; `facts` are what the access log says."""
        self.toolbox = toolbox
        self.facts: dict[str, Any] = {} if facts is None else facts
        self.traced: list[Traced] = []
        self.used = Usage()
        """By what is over: turns, and whatever else was added."""
        self._most_tokens = most_tokens
        self._answered = 0
        self._now: Turn | None = None
        self._version: str | None = None

    @property
    def room(self) -> int | None:
        """The tokens that are left of those that the client allows."""
        return None if self._most_tokens is None else max(self._most_tokens - self._answered, 0)

    @property
    def usage(self) -> Usage:
        """Of all turns together, up to now."""
        return self.used if self._now is None else self.used + self._now.usage

    @property
    def weight_version(self) -> str | None:
        return self._version if self._now is None else self._now.weight_version

    async def run(self, answering: Answering, outlet: Outlet, first: Turn | None = None) -> Heard:
        """All turns; what the last of them came to. `first` was planned before."""
        turn = first or await answering.plan()
        while True:
            heard = await self._hear(answering, turn)
            if heard.finish != "stop" or not heard.calls:
                return heard
            were_spent = self.toolbox.spent
            outcomes = await outlet.wait(self.toolbox.call(heard.calls), answering)
            await answering.tell(outcomes)
            # A model that goes on to call what it is no longer offered would never come to an end.
            if were_spent or heard.for_client or self.room == 0:
                return heard
            turn = await answering.plan()

    async def _hear(self, answering: Answering, turn: Turn) -> Heard:
        self._now = turn
        try:
            return await answering.hear(turn)
        finally:
            self._now, self._version = None, turn.weight_version
            self.used += turn.usage
            self._answered += turn.usage.completion_tokens
            self.traced += turn.traced
            note_turn(self.facts, turn)
            note_usage(self.facts, self.used)


class HiddenCalls:
    """One answer of several turns: the server's calls, and the ends of all turns but the last, are not told.

    `first` was planned; what follows it is asked as `later` says, with all that was said since. `names` are
    the tools that the server runs, by the names that the model knows: a label and a name of its server's.
    """

    choices = 1

    def __init__(
        self,
        loop: ToolLoop,
        first: Turn,
        later: TurnSpec,
        names: Mapping[str, tuple[str, str]],
        plan: Callable[[TurnSpec], Awaitable[Turn]],
    ) -> None:
        self.jobs = first.jobs
        self.prompt_logprobs = first.prompt_logprobs
        self._loop = loop
        self._first = first
        self._later = later
        self._names = names
        self._plan = plan
        self._outlet: Outlet
        self._speaker: Speaker
        self._fold = Fold()
        self._hidden: set[int] = set()
        self._shown = 0
        self._finish = Event("finish", 0)
        self._asked: list[ToolCall] = []

    @property
    def usage(self) -> Usage:
        return self._loop.usage

    @property
    def traced(self) -> Sequence[Traced]:
        return self._loop.traced

    @property
    def weight_version(self) -> str | None:
        return self._loop.weight_version

    async def run(self, outlet: Outlet, speaker: Speaker) -> Event:
        """Has the speaker write what the client sees; how it ended."""
        self._outlet, self._speaker = outlet, speaker
        heard = await self._loop.run(self, outlet, self._first)
        if heard.calls and self._loop.room == 0:
            self._finish.finish = self._loop.facts["finish"] = "length"
        await outlet.write(speaker.write([self._finish]))
        return self._finish

    # What the loop asks

    async def plan(self) -> Turn:
        spec, room = self._later, self._loop.room
        if room is not None:
            spec = replace(spec, sampling=replace(spec.sampling, max_tokens=room))
        return await self._plan(spec)

    async def hear(self, turn: Turn) -> Heard:
        self._fold, self._hidden, self._finish = Fold(), set(), Event("finish", 0)
        await self._outlet.run(turn, self)
        (answer,) = self._fold.done()
        calls = [call for call in answer.calls if call.name in self._names]
        # Beside calls for the client ours are not made: nobody could tell the model of their results later.
        self._asked = calls if len(calls) == len(answer.calls) else []
        made = [ServedCall(*self._names[call.name], call.arguments) for call in self._asked]
        self._later = _with_messages(self._later, [_message(answer)])
        return Heard(answer.finish, made)

    async def tell(self, outcomes: Sequence[Outcome]) -> None:
        results = [
            Message(role="tool", content=told_text(outcome), tool_call_id=call.id)
            for call, outcome in zip(self._asked, outcomes, strict=True)
        ]
        self._later = _with_messages(self._later, results)
        if self._loop.toolbox.spent:
            # The model is offered nothing that it could not have.
            self._later = _without_tools(self._later, self._names)

    def write(self, events: Sequence[Event]) -> Written:
        self._fold.add(events)
        shown = [event for event in events if self._shows(event)]
        return self._speaker.write(shown) if shown else b""

    def idle(self) -> Written:
        return self._speaker.idle()

    def _shows(self, event: Event) -> bool:
        """Calls are numbered as the client sees them."""
        if event.kind == "finish":
            self._finish = event
            return False
        if event.kind not in CALL_EVENTS:
            return True
        if event.kind == "call_open":
            if event.text in self._names:
                self._hidden.add(event.call)
            else:
                self._shown += 1
        if event.call in self._hidden:
            return False
        event.call = self._shown - 1
        return True


def told_text(outcome: Outcome) -> str:
    """What the model reads as the result of a call."""
    if isinstance(outcome, CallResult):
        return f"Error: {outcome.text}" if outcome.is_error else outcome.text
    return f"Error: {outcome.message}"


def _message(answer: Answer) -> Message:
    return Message(
        role="assistant",
        content=answer.text or None,
        reasoning=answer.reasoning or None,
        tool_calls=tuple(answer.calls),
    )


def _with_messages(spec: TurnSpec, more: Sequence[Message]) -> TurnSpec:
    (told,) = spec.prompts
    assert isinstance(told, Conversation)
    return replace(spec, prompts=(replace(told, messages=(*told.messages, *more)),))


def _without_tools(spec: TurnSpec, names: Mapping[str, object]) -> TurnSpec:
    (told,), reading, calling = spec.prompts, spec.reading, spec.calling
    assert isinstance(told, Conversation) and reading is not None
    left = [number for number, tool in enumerate(told.tools) if tool["function"]["name"] not in names]
    tools = tuple(told.tools[number] for number in left)
    places = tuple(reading.places[number] for number in left) if reading.places else ()
    if calling is not None and calling.names is not None:
        callable_ = tuple(name for name in calling.names if name not in names)
        calling = replace(calling, names=callable_) if callable_ else None
    return replace(
        spec,
        prompts=(replace(told, tools=tools),),
        reading=replace(reading, tools=tools, places=places, calls=reading.calls and bool(tools)),
        calling=calling if tools else None,
    )
