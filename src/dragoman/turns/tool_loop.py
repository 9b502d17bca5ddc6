"""Turns of the model, and between them the calls that the server makes for it.

    plan a turn -> the client hears it -> calls that are the server's to make are made -> their results are
    told -> plan the next turn

It ends where the model calls nothing of the server's, where a client has to do something first, and where
the tokens or the calls that an answer may have are used up. `ToolLoop` is that and nothing else. What is an
API's own (how the next prompt comes about, what the client sees of calls and results) is an `Answering`: a
response has an item for each call, while `HiddenCalls` shows one plain answer, for APIs without a place for
them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.asked import place_media
from dragoman.errors import TOOLS, BadRequest, EngineFailed
from dragoman.mcp import CallResult, McpFailure, McpServers, McpSession, McpTool, ServerSpec
from dragoman.mcp.servers import AllowedTools, RequireApproval, allows_tool, needs_approval, pin_of
from dragoman.mcp.spec import shown_in, tell_result
from dragoman.media import Media
from dragoman.media.read import check_media, mention
from dragoman.tracing import current
from dragoman.turns.checked import note_fault
from dragoman.turns.served import ServedModel
from dragoman.turns.spec import TurnSpec
from dragoman.turns.traced import trace_call, trace_list
from dragoman.turns.turn import Turn, note_terms, note_turn
from dragoman.types import (
    Answer,
    Conversation,
    Event,
    FinishReason,
    Fold,
    Message,
    Saying,
    ToolCall,
    Traced,
    Usage,
)

# Where turns go: to a client, or nowhere but what is made of them.


R = TypeVar("R")
Written: TypeAlias = bytes | list[bytes]
"""Bytes; or their pieces, where some are large and repeated: they are passed on as they are."""


class ClientGone(Exception):
    """The client closed the connection: nobody is there to answer."""


class Speaker(Protocol):
    """What turns the events of a turn into those of an API."""

    def write(self, events: Sequence[Event]) -> Written: ...

    def idle(self) -> Written:
        """What is said when there has been nothing to say for a while."""


class Outlet(Protocol):
    """Raises ClientGone where somebody was to be told and has left."""

    async def write(self, data: Written) -> None: ...

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        """All events of a turn."""

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        """The result of work that is no turn; while it lasts, the client is told that it does."""


class Quiet:
    """Nobody listens: the log keeps the events, or the whole answer is asked for."""

    async def write(self, data: Written) -> None:
        pass

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            while not turn.over:
                speaker.write(await turn.next())

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        return await work


async def wait_patiently(work: Awaitable[R], period: float, still_waits: Callable[[], Awaitable[None]]) -> R:
    """The result of some work, with a sign of life after each period."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=period))[0]:
            await still_waits()
        return working.result()
    finally:
        working.cancel()


# Tools of MCP servers that the model has for one answer: which there are, and what comes of calling them.
#
# In one way for all APIs: who may be asked, what is allowed, what has to be approved, how many calls are
# made, and what is said where one fails. Which names the model knows the tools by is an API's own.


INVALID_PARAMS = -32602
TOO_MANY = CallResult("The call was not made: there were too many.", is_error=True)
"""What comes of a call beyond as many as an answer may have."""
Outcome: TypeAlias = CallResult | McpFailure


class ServerWish(Struct, frozen=True, kw_only=True):
    """An MCP server that a request names. A label alone is that of one of the operator's."""

    label: str
    url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None


class ServedCall(Struct, frozen=True):
    """A call that the server makes for the model."""

    label: str
    name: str
    arguments: str
    pin: str | None = None
    """What the tool was described as when the call was approved, if it had to be and that is known."""


class Sight:
    """What of the pictures and sounds in results the model is shown: those that it takes and the engine finds
    to be in order, within what one request may show. Of the others it is told."""

    def __init__(self, model: ServedModel, owner: str, shown: Mapping[str, Media]) -> None:
        """`shown` is what the conversation shows before."""
        self._model = model
        self._owner = owner
        self._shown = dict(shown)

    async def look(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, CallResult) or not outcome.parts:
            return outcome
        parts = [part if isinstance(part, str) else await self._take(part) for part in outcome.parts]
        return replace(outcome, parts=() if all(isinstance(part, str) for part in parts) else tuple(parts))

    async def _take(self, media: Media) -> str | Media:
        model = self._model
        if media.kind not in model.card.modalities:
            return mention(media)
        try:
            check_media({**self._shown, media.key: media}.values(), model.limits, TOOLS)
            placing = partial(place_media, model.engine, media)
            await model.workers.run(self._owner, len(media.data), placing, slow=True)
        except (BadRequest, EngineFailed):
            return mention(media)
        self._shown[media.key] = media
        return media


class Toolbox:
    """`check()` it; then `async with` it: the connections that a request opens end with it."""

    def __init__(
        self, servers: McpServers, wishes: Sequence[ServerWish], most_calls: int, sight: Sight
    ) -> None:
        self._servers = servers
        self._sight = sight
        self._wishes = {wish.label: wish for wish in wishes}
        self._left = most_calls
        self._specs: dict[str, ServerSpec] = {}
        self._sessions: dict[str, McpSession] = {}
        self._tools: dict[tuple[str, str], McpTool] = {}
        self._stack = AsyncExitStack()

    @property
    def spent(self) -> bool:
        """Whether no further call is made."""
        return self._left == 0

    def check(self) -> None:
        """Refuses servers that are not there or not allowed."""
        for wish in self._wishes.values():
            self._specs[wish.label] = self._servers.resolve(
                wish.label, wish.url, wish.headers, wish.authorization
            )

    async def __aenter__(self) -> Self:
        for label, spec in self._specs.items():
            self._sessions[label] = await self._stack.enter_async_context(self._servers.session(spec))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # What there is

    async def ask(self, label: str) -> list[McpTool]:
        """The tools that a server has, as far as they are allowed. Raises McpFailure."""
        listing = self._sessions[label].list_tools()
        if (trace := current.get()) is not None:
            listing = trace_list(trace, label, listing)
        return self.take(label, await listing)

    def take(self, label: str, tools: Sequence[McpTool]) -> list[McpTool]:
        """The same for a list that is known already."""
        kept = [tool for tool in tools if allows_tool(tool, self._wishes[label].allowed_tools)]
        self._tools = {key: tool for key, tool in self._tools.items() if key[0] != label}
        self._tools |= {(label, tool.name): tool for tool in kept}
        return kept

    def needs_approval(self, label: str, name: str) -> bool:
        return needs_approval(self._tools[label, name], self._wishes[label].require_approval)

    # Calls

    async def call(self, calls: Sequence[ServedCall]) -> list[Outcome]:
        """All at once. One that fails is told to the model, which may do better."""
        return [await self._sight.look(each) for each in await asyncio.gather(*map(self._call, calls))]

    async def _call(self, call: ServedCall) -> Outcome:
        if self.spent:
            return TOO_MANY
        self._left -= 1
        tool = self._tools.get((call.label, call.name))
        if tool is None:
            # Approved in an earlier answer, by a client that has changed its mind since.
            message = f"The request has no MCP server '{call.label}' with a tool '{call.name}'."
            return McpFailure("protocol", message, INVALID_PARAMS)
        if call.pin is not None and call.pin != pin_of(tool):
            # The model may call it again as it is now, which has to be approved again.
            message = f"The call was not made: the tool '{call.name}' has changed since it was approved."
            return McpFailure("protocol", message, INVALID_PARAMS)
        calling = self._sessions[call.label].call_as_written(call.name, call.arguments)
        if (trace := current.get()) is not None:
            calling = trace_call(trace, call.label, call.name, call.arguments, calling)
        try:
            return await calling
        except McpFailure as failure:
            return failure


# The loop.


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
            heard = await answering.hear(turn)
            if turn.unenforced:
                # A turn that was planned only now has not told it yet.
                note_terms(self.facts, turn)
                await note_fault(self.facts, turn)
            return heard
        finally:
            self._now, self._version = None, turn.weight_version
            self.used += turn.usage
            self._answered += turn.usage.completion_tokens
            self.traced += turn.traced
            note_turn(self.facts, turn)
            self.facts.update(self.used.facts())


class HiddenCalls:
    """One answer of several turns: the server's calls, and the ends of all turns but the last, are not told.

    `first` was planned; what follows it is asked as `later` says, with all that was said since. `names` are
    the tools that the server runs, by the names that the model knows: a label and a name of its server's.
    """

    choices = 1
    shows = False
    """Whether the client sees the calls, and their results. If not, ours are not made beside calls of its
    own: nobody could tell the model of their results later."""

    def __init__(
        self,
        loop: ToolLoop,
        first: Turn,
        later: TurnSpec,
        names: Mapping[str, tuple[str, str]],
        plan: Callable[[TurnSpec], Awaitable[Turn]],
        remember: Callable[[Saying, int], None] | None = None,
    ) -> None:
        """`remember` is told what the client has seen as one answer, and its tokens of reasoning."""
        self.jobs = first.jobs
        self.prompt_logprobs = first.prompt_logprobs
        self._loop = loop
        self._first = first
        self._later = later
        self._names = names
        self._plan = plan
        self._remember = remember
        self._told = Saying()
        self._outlet: Outlet
        self._speaker: Speaker
        self._fold = Fold()
        self._hidden: set[int] = set()
        self._showing = True
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
        if self._finish.error is None and self._remember is not None:
            self._remember(self._told, self.usage.reasoning_tokens)
        await outlet.write(speaker.write([self._finish]))
        return self._finish

    # What the loop asks

    async def plan(self) -> Turn:
        return await self._plan(replace(self._later, room=self._loop.room))

    async def hear(self, turn: Turn) -> Heard:
        self._fold, self._hidden, self._finish = Fold(), set(), Event("finish", 0)
        await self._outlet.run(turn, self)
        (answer,) = self._fold.done()
        calls = [call for call in answer.calls if call.name in self._names]
        for_client = len(calls) < len(answer.calls)
        self._asked = [] if for_client and not self.shows else calls
        made = [ServedCall(*self._names[call.name], call.arguments) for call in self._asked]
        self._later = _with_messages(self._later, [_message(answer)])
        return Heard(answer.finish, made, for_client)

    async def tell(self, outcomes: Sequence[Outcome]) -> None:
        results = [
            Message(role="tool", content=tell_result(outcome), tool_call_id=call.id)
            for call, outcome in zip(self._asked, outcomes, strict=True)
        ]
        self._later = _with_messages(self._later, results, shown_in(outcomes))
        if self._loop.toolbox.spent:
            # The model is offered nothing that it could not have.
            self._later = _without_tools(self._later, self._names)

    def write(self, events: Sequence[Event]) -> Written:
        self._fold.add(events)
        shown = [event for event in events if self._shows(event)]
        for event in shown:
            self._told.add(event)
        return self._speaker.write(shown) if shown else b""

    def idle(self) -> Written:
        return self._speaker.idle()

    def _shows(self, event: Event) -> bool:
        if event.kind == "finish":
            self._finish = event
            return False
        if event.kind == "unseen":
            return self._showing
        self._showing = self.shows or event.kind not in CALL_EVENTS or self._shows_call(event)
        return self._showing

    def _shows_call(self, event: Event) -> bool:
        """Calls are numbered as the client sees them."""
        if event.kind == "call_open":
            if event.text in self._names:
                self._hidden.add(event.call)
            else:
                self._shown += 1
        if event.call in self._hidden:
            return False
        event.call = self._shown - 1
        return True


def _message(answer: Answer) -> Message:
    return Message(
        role="assistant",
        content=answer.text or None,
        reasoning=answer.reasoning or None,
        tool_calls=tuple(answer.calls),
    )


def _with_messages(
    spec: TurnSpec, more: Sequence[Message], shown: Mapping[str, Media] | None = None
) -> TurnSpec:
    (told,) = spec.prompts
    assert isinstance(told, Conversation)
    media = {**(shown or {}), **told.media}
    return replace(spec, prompts=(replace(told, messages=(*told.messages, *more), media=media),))


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
