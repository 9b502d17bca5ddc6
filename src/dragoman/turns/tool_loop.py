"""Turns of the model with server-side tool calls between them.

    plan a turn -> stream it to the client -> execute the calls that are the server's -> add their results ->
    plan the next turn

The loop ends when the model calls no tool of the server, when the client has to act first, and when tokens
or calls of the answer are used up. `ToolLoop` does that and nothing else. What differs between APIs (how the
next prompt is built, what the client sees of calls and results) is a `ToolLoopDelegate`: a response has an
item for each call, while `MultiTurnAnswer` shows one plain answer, for APIs that cannot show them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.lifecycle import validated_media_ids
from dragoman.errors import TOOLS, BadRequest, EngineFailed
from dragoman.mcp import CallResult, McpFailure, McpServers, McpServerSpec, McpSession, McpTool
from dragoman.mcp.servers import AllowedTools, RequireApproval, allows_tool, needs_approval, pin_of
from dragoman.mcp.spec import shown_in, tell_result
from dragoman.media import Media
from dragoman.media.headers import check_media, mention
from dragoman.tracing import current
from dragoman.turns.served_model import ServedModel
from dragoman.turns.spans import trace_call, trace_list
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn, log_terms, note_turn
from dragoman.turns.validation import log_fault
from dragoman.types import (
    Answer,
    AnswerTranscript,
    Conversation,
    Event,
    EventFold,
    FinishReason,
    Message,
    ToolCall,
    TurnRecord,
    Usage,
)

# Where the events of turns go: to a client, or only into the result.


R = TypeVar("R")
OutputBytes: TypeAlias = bytes | list[bytes]
"""Bytes, or a list of chunks where some are large and repeated: these are passed on without a copy."""


class ClientGone(Exception):
    """The client has closed the connection."""


class EventEncoder(Protocol):
    """Encodes the events of a turn as those of an API."""

    def write(self, events: Sequence[Event]) -> OutputBytes: ...

    def idle(self) -> OutputBytes:
        """Return the bytes of a keep-alive."""


class ClientOutput(Protocol):
    """The output to a client. Raises ClientGone if the client has disconnected."""

    async def write(self, data: OutputBytes) -> None: ...

    async def run(self, turn: Turn, speaker: EventEncoder) -> None:
        """Write all events of a turn."""

    async def wait(self, work: Awaitable[R], speaker: EventEncoder) -> R:
        """Await work other than a turn, sending keep-alives meanwhile."""


class NullOutput:
    """Output without a client: a log keeps the events, or only the complete answer is needed."""

    async def write(self, data: OutputBytes) -> None:
        pass

    async def run(self, turn: Turn, speaker: EventEncoder) -> None:
        async with turn:
            while not turn.is_over:
                speaker.write(await turn.next())

    async def wait(self, work: Awaitable[R], speaker: EventEncoder) -> R:
        return await work


async def wait_with_keepalive(
    work: Awaitable[R], period: float, still_waits: Callable[[], Awaitable[None]]
) -> R:
    """Await some work, calling `still_waits` after each period."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=period))[0]:
            await still_waits()
        return working.result()
    finally:
        working.cancel()


# The MCP tools of one answer: listing and calling them.
#
# Which servers are allowed, what needs approval, how many calls are made and what a failure returns is the
# same for all APIs. The names under which the model knows the tools are up to each API.


INVALID_PARAMS = -32602
TOO_MANY = CallResult("The call was not made: the limit of tool calls is reached.", is_error=True)
"""The result of a call above the limit of calls per answer."""
CallOutcome: TypeAlias = CallResult | McpFailure


class McpServerRequest(Struct, frozen=True, kw_only=True):
    """An MCP server that a request names. A label alone refers to one of the operator's servers."""

    label: str
    url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None


class McpCall(Struct, frozen=True):
    """A tool call that the server executes."""

    label: str
    name: str
    arguments: str
    pin: str | None = None
    """The digest of the tool's description when the call was approved, if it needed approval and is known."""


class ResultMediaFilter:
    """Selects which media of tool results reach the model: supported, valid for the engine, within the
    request's limits. The rest become a text description.
    """

    def __init__(self, model: ServedModel, owner: str, shown: Mapping[str, Media]) -> None:
        """`shown` is the media of the conversation so far."""
        self._model = model
        self._owner = owner
        self._shown = dict(shown)

    async def filter(self, outcome: CallOutcome) -> CallOutcome:
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
            placing = partial(validated_media_ids, model.engine, media)
            await model.workers.run(self._owner, len(media.data), placing, always_offload=True)
        except (BadRequest, EngineFailed):
            return mention(media)
        self._shown[media.key] = media
        return media


class McpToolset:
    """The MCP tools of one answer. `check()` it, then `async with` it, which closes the connections that it
    opened.
    """

    def __init__(
        self,
        servers: McpServers,
        wishes: Sequence[McpServerRequest],
        most_calls: int,
        sight: ResultMediaFilter,
    ) -> None:
        self._servers = servers
        self._sight = sight
        self._wishes = {wish.label: wish for wish in wishes}
        self._left = most_calls
        self._specs: dict[str, McpServerSpec] = {}
        self._sessions: dict[str, McpSession] = {}
        self._tools: dict[tuple[str, str], McpTool] = {}
        self._stack = AsyncExitStack()

    @property
    def is_exhausted(self) -> bool:
        """Whether the limit of calls is reached."""
        return self._left == 0

    def check(self) -> None:
        """Raise for servers that do not exist or are not allowed."""
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

    async def list_tools(self, label: str) -> list[McpTool]:
        """Fetch the allowed tools of a server. Raises McpFailure."""
        listing = self._sessions[label].list_tools()
        if (trace := current.get()) is not None:
            listing = trace_list(trace, label, listing)
        return self.register_tools(label, await listing)

    def register_tools(self, label: str, tools: Sequence[McpTool]) -> list[McpTool]:
        """Take the allowed tools from a list that is already known."""
        kept = [tool for tool in tools if allows_tool(tool, self._wishes[label].allowed_tools)]
        self._tools = {key: tool for key, tool in self._tools.items() if key[0] != label}
        self._tools |= {(label, tool.name): tool for tool in kept}
        return kept

    def needs_approval(self, label: str, name: str) -> bool:
        return needs_approval(self._tools[label, name], self._wishes[label].require_approval)

    # Calls

    async def call(self, calls: Sequence[McpCall]) -> list[CallOutcome]:
        """Execute calls concurrently. A failure becomes a result for the model, which may try something
        else.
        """
        return [await self._sight.filter(each) for each in await asyncio.gather(*map(self._call, calls))]

    async def _call(self, call: McpCall) -> CallOutcome:
        if self.is_exhausted:
            return TOO_MANY
        self._left -= 1
        tool = self._tools.get((call.label, call.name))
        if tool is None:
            # Approved in an earlier answer, and no longer in the client's request.
            message = f"The request has no MCP server '{call.label}' with a tool '{call.name}'."
            return McpFailure("protocol", message, INVALID_PARAMS)
        if call.pin is not None and call.pin != pin_of(tool):
            # The model may call the changed tool again, which needs a new approval.
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


class TurnResult(Struct, frozen=True):
    """The result of one turn of the model."""

    finish: FinishReason | None
    calls: Sequence[McpCall] = ()
    """The calls that the server executes."""
    for_client: bool = False
    """Whether the client has to act before the model can continue."""


class ToolLoopDelegate(EventEncoder, Protocol):
    """One API's part of the loop."""

    async def plan(self) -> Turn:
        """Plan the next turn, with all messages and results so far."""

    async def run_turn(self, turn: Turn) -> TurnResult:
        """Run the turn to its end. Raises the error that ended it."""

    async def add_results(self, outcomes: Sequence[CallOutcome]) -> None:
        """Add the results of the calls of the last turn."""


class ToolLoop:
    def __init__(
        self, toolbox: McpToolset, most_tokens: int | None, log_fields: dict[str, Any] | None = None
    ) -> None:
        """`most_tokens` limits all turns together; `log_fields` are the fields of the access log line."""
        self.toolbox = toolbox
        self.log_fields: dict[str, Any] = {} if log_fields is None else log_fields
        self.records: list[TurnRecord] = []
        self.used = Usage()
        """Usage of completed turns, and other usage that was added."""
        self._most_tokens = most_tokens
        self._answered = 0
        self._now: Turn | None = None
        self._version: str | None = None

    @property
    def remaining_tokens(self) -> int | None:
        """The tokens left of the client's limit."""
        return None if self._most_tokens is None else max(self._most_tokens - self._answered, 0)

    @property
    def usage(self) -> Usage:
        """The usage of all turns so far."""
        return self.used if self._now is None else self.used + self._now.usage

    @property
    def weight_version(self) -> str | None:
        return self._version if self._now is None else self._now.weight_version

    async def run(
        self, answering: ToolLoopDelegate, outlet: ClientOutput, first: Turn | None = None
    ) -> TurnResult:
        """Run all turns; return the result of the last one. `first` is an already planned turn."""
        turn = first or await answering.plan()
        while True:
            heard = await self._hear(answering, turn)
            if heard.finish != "stop" or not heard.calls:
                return heard
            were_spent = self.toolbox.is_exhausted
            outcomes = await outlet.wait(self.toolbox.call(heard.calls), answering)
            await answering.add_results(outcomes)
            # Prevent an endless loop: the model called tools again although it is no longer offered any.
            if were_spent or heard.for_client or self.remaining_tokens == 0:
                return heard
            turn = await answering.plan()

    async def _hear(self, answering: ToolLoopDelegate, turn: Turn) -> TurnResult:
        self._now = turn
        try:
            heard = await answering.run_turn(turn)
            if turn.unenforced:
                # A turn that was planned only now has not been noted in the log yet.
                log_terms(self.log_fields, turn)
                await log_fault(self.log_fields, turn)
            return heard
        finally:
            self._now, self._version = None, turn.weight_version
            self.used += turn.usage
            self._answered += turn.usage.completion_tokens
            self.records += turn.records
            note_turn(self.log_fields, turn)
            self.log_fields.update(self.used.log_fields())


class MultiTurnAnswer:
    """Several turns shown as one answer: server-side calls, and the finish of all turns but the last, are
    hidden.

    `first` is already planned; later turns follow `later`, with all messages added since. `names` are the
    tools that the server executes: the model's name of each, with server label and tool name.
    """

    choices = 1
    shows_calls = False
    """Whether the client sees calls and results. If not, server-side calls beside client calls are not made,
    because the model could not get their results later.
    """

    def __init__(
        self,
        loop: ToolLoop,
        first: Turn,
        later: TurnSpec,
        names: Mapping[str, tuple[str, str]],
        plan: Callable[[TurnSpec], Awaitable[Turn]],
        remember: Callable[[AnswerTranscript, int], None] | None = None,
    ) -> None:
        """`remember` is called with the answer as the client received it, and its reasoning tokens."""
        self.jobs = first.jobs
        self.prompt_logprobs = first.prompt_logprobs
        self._loop = loop
        self._first = first
        self._later = later
        self._names = names
        self._plan = plan
        self._remember = remember
        self._told = AnswerTranscript()
        self._outlet: ClientOutput
        self._speaker: EventEncoder
        self._fold = EventFold()
        self._hidden: set[int] = set()
        self._showing = True
        self._shown = 0
        self._finish = Event("finish", 0)
        self._asked: list[ToolCall] = []

    @property
    def usage(self) -> Usage:
        return self._loop.usage

    @property
    def records(self) -> Sequence[TurnRecord]:
        return self._loop.records

    @property
    def weight_version(self) -> str | None:
        return self._loop.weight_version

    async def run(self, outlet: ClientOutput, speaker: EventEncoder) -> Event:
        """Stream what the client may see; return the final finish event."""
        self._outlet, self._speaker = outlet, speaker
        heard = await self._loop.run(self, outlet, self._first)
        if heard.calls and self._loop.remaining_tokens == 0:
            self._finish.finish = self._loop.log_fields["finish"] = "length"
        if self._finish.error is None and self._remember is not None:
            self._remember(self._told, self.usage.reasoning_tokens)
        await outlet.write(speaker.write([self._finish]))
        return self._finish

    # The loop's callbacks.

    async def plan(self) -> Turn:
        return await self._plan(replace(self._later, remaining_tokens=self._loop.remaining_tokens))

    async def run_turn(self, turn: Turn) -> TurnResult:
        self._fold, self._hidden, self._finish = EventFold(), set(), Event("finish", 0)
        await self._outlet.run(turn, self)
        (answer,) = self._fold.done()
        calls = [call for call in answer.calls if call.name in self._names]
        for_client = len(calls) < len(answer.calls)
        self._asked = [] if for_client and not self.shows_calls else calls
        mcp_calls = [McpCall(*self._names[call.name], call.arguments) for call in self._asked]
        self._later = _with_messages(self._later, [_message(answer)])
        return TurnResult(answer.finish, mcp_calls, for_client)

    async def add_results(self, outcomes: Sequence[CallOutcome]) -> None:
        results = [
            Message(role="tool", content=tell_result(outcome), tool_call_id=call.id)
            for call, outcome in zip(self._asked, outcomes, strict=True)
        ]
        self._later = _with_messages(self._later, results, shown_in(outcomes))
        if self._loop.toolbox.is_exhausted:
            # Tools are no longer offered once the limit of calls is reached.
            self._later = _without_tools(self._later, self._names)

    def write(self, events: Sequence[Event]) -> OutputBytes:
        self._fold.add(events)
        shown = [event for event in events if self._shows(event)]
        for event in shown:
            self._told.add(event)
        return self._speaker.write(shown) if shown else b""

    def idle(self) -> OutputBytes:
        return self._speaker.idle()

    def _shows(self, event: Event) -> bool:
        if event.kind == "finish":
            self._finish = event
            return False
        if event.kind == "unseen":
            return self._showing
        self._showing = self.shows_calls or event.kind not in CALL_EVENTS or self._shows_call(event)
        return self._showing

    def _shows_call(self, event: Event) -> bool:
        """Renumber the calls that the client sees."""
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
    (item,) = spec.prompts
    assert isinstance(item, Conversation)
    media = {**(shown or {}), **item.media}
    return replace(spec, prompts=(replace(item, messages=(*item.messages, *more), media=media),))


def _without_tools(spec: TurnSpec, names: Mapping[str, object]) -> TurnSpec:
    (item,), reading, calling = spec.prompts, spec.parsing, spec.tool_policy
    assert isinstance(item, Conversation) and reading is not None
    left = [number for number, tool in enumerate(item.tools) if tool["function"]["name"] not in names]
    tools = tuple(item.tools[number] for number in left)
    paths = tuple(reading.params[number] for number in left) if reading.params else ()
    if calling is not None and calling.names is not None:
        callable_ = tuple(name for name in calling.names if name not in names)
        calling = replace(calling, names=callable_) if callable_ else None
    return replace(
        spec,
        prompts=(replace(item, tools=tools),),
        parsing=replace(reading, tools=tools, params=paths, calls=reading.calls and bool(tools)),
        tool_policy=calling if tools else None,
    )
