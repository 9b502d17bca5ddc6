"""One response while it is made: turns of the model, calls of tools between them, and one way to an end."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dragoman.api.responses.compaction import PREFIX, compaction_events, triggered
from dragoman.api.responses.output import Place
from dragoman.api.responses.request import ResponseRequest, spec
from dragoman.api.responses.response import Life, Response, failure
from dragoman.api.responses.wire import Wire, Written
from dragoman.api.responses.writer import Manner, ResponseWriter
from dragoman.api.sse import KEEP_ALIVE
from dragoman.errors import BadRequest, ContextOverflow, DragomanError
from dragoman.http.admission import Visit
from dragoman.http.exchange import ClientGone
from dragoman.http.responses.context import Context, fitted
from dragoman.http.responses.log import EventLog
from dragoman.http.responses.outlets import Outlet, patiently
from dragoman.http.responses.summary import count_tokens, summarised
from dragoman.http.responses.tool_rounds import ToolRounds, Voice
from dragoman.http.routes import trajectories
from dragoman.http.run_turn import count, note
from dragoman.turns.turn import Turn
from dragoman.types import Event, Traced, Usage

if TYPE_CHECKING:
    from dragoman.http.host import Host

logger = logging.getLogger("dragoman.http")

HEAVY = 64 * 1024
"""Bytes of a response that is not told again and again."""
BEFORE_THE_MODEL = ("mcp_list_tools", "compaction")
"""Items that a response may begin with before the model has said anything."""


class Making:
    """`prepare()` refuses what can be refused; `make(outlet)` runs to the end, whatever that is."""

    def __init__(
        self,
        host: "Host",
        request: ResponseRequest,
        context: Context,
        tools: ToolRounds,
        manner: Manner,
        response: Response,
    ) -> None:
        self.request = request
        self.context = context
        self.response = response
        self.log: EventLog | None = EventLog() if response.fields["store"] else None
        self.generates = True
        """If not, the request is a rehearsal: everything is checked, and nothing is asked of the model."""
        self.visit: Visit | None = None
        """Whose work it is. If that is ended, it fails for that reason, rather than being cancelled."""
        self.facts: dict[str, Any] = {}
        """What the access log and the metrics say of it."""
        self._host = host
        self._wire = Wire(obfuscates=request.wants_obfuscation)
        self._writer = ResponseWriter(self._wire, manner)
        self._tools = tools
        self._used = Usage()
        self._answered = 0
        """Tokens of the answer: a summary takes tokens too, but none of those that the client allows."""
        self._turns: list[Traced] = []
        self._triggered = triggered(context.inputs)
        self._first: Turn | None = None
        self._said = context.all
        """What the model is told, before what it says itself."""
        self._since = 0
        """The first item of the answer that is not in `_said`."""
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self.response.id

    async def prepare(self, *, streams: bool) -> None:
        """The first turn is planned before anything is answered, to refuse what cannot be done.

        Where tools must be listed first, or the conversation made short, it is planned again after that.
        """
        self._tools.check()
        request = replace(self.request, tool_choice=None) if self._tools.must_ask else self.request
        try:
            first = await self._plan(request)
        except ContextOverflow:
            # Codex makes the conversation shorter if a stream says so, and gives up on a status of 400: a
            # stream is let begin, and fails where the turn is planned again.
            if not streams and not self._may_compact:
                raise
        else:
            self._first = None if self._tools.must_ask or self._may_compact else first

    async def make(self, outlet: Outlet) -> None:
        try:
            opening = partial(self.response.opening, self._wire)
            await self._say(outlet, await self.context.aside(self.response.weight, opening))
            if self.response.status == "queued":
                self.response.status = "in_progress"
                await self._say(outlet, self.response.event(self._wire, "in_progress"))
            if self.generates:
                async with self._tools:
                    await self._rounds(outlet)
            await self._finish(outlet)
        except (asyncio.CancelledError, ClientGone):
            error = self.visit.error if self.visit else None
            await self._end(outlet, "failed" if error else "cancelled", error)
            raise
        except Exception as error:
            if not isinstance(error, DragomanError):
                logger.exception("A response failed: %s", self.id)
            await self._end(outlet, "failed", error)
            raise
        finally:
            if self.log is not None:
                self.log.close()
            if not self._ended.done():
                self._ended.set_result(None)

    async def ended(self) -> None:
        """Returns when the response has come to its end, whatever that was."""
        await asyncio.shield(self._ended)

    # Rounds

    async def _rounds(self, outlet: Outlet) -> None:
        voice = self._voice(outlet)
        if self._may_compact:
            await self._compact(outlet, voice)
        if self._triggered:
            return
        await self._tools.begin(self._writer, voice)
        while True:
            await self._turn(outlet)
            if self._writer.finish == "length" or not self._writer.for_server:
                break
            were_spent = self._tools.spent
            await self._tools.run(self._writer, voice)
            # A model that goes on to call what it is no longer offered would never come to an end.
            if were_spent or self._writer.for_client or self._room() == 0:
                break

    async def _turn(self, outlet: Outlet) -> None:
        turn = self._first or await self._plan(self.request)
        self._first = None
        self._writer.begin_turn()
        self._writer.refs = self._tools.offer.refs
        self._writer.needs_approval = self._tools.needs_approval
        try:
            await outlet.run(turn, self)
        finally:
            self._used += turn.usage
            self._answered += turn.usage.completion_tokens
            self._turns += turn.traced
            note(self.facts, turn)
        if self._writer.error is not None:
            raise self._writer.error

    def _voice(self, outlet: Outlet) -> Voice:
        return Voice(
            lambda data: self._say(outlet, data),
            lambda work: patiently(work, outlet, self.idle, self._host.settings.keep_alive),
        )

    async def _plan(self, request: ResponseRequest) -> Turn:
        """The next turn of the model, with all that was said so far."""
        items = [*self._said, *self._writer.items[self._since :]]
        first = all(item["type"] in BEFORE_THE_MODEL for item in self._writer.items)

        async def planned(items: Sequence[dict[str, object]]) -> Turn:
            telling = partial(
                spec, request, items, self._tools.offer, first=first, unseal=self.context.unseal
            )
            asked = await self.context.aside(self.context.size, telling)
            if self._room() is not None:
                asked = replace(asked, sampling=replace(asked.sampling, max_tokens=self._room()))
            return await self._host.turn(asked, self.context.owner, self.context.size, self.id)

        try:
            return await (fitted(items, planned) if self.request.truncation == "auto" else planned(items))
        except BadRequest as error:
            if error.param == "messages":
                error.param = "input"
            raise

    def _room(self) -> int | None:
        """The tokens that are left of those that the client allows."""
        most = self.request.max_output_tokens
        return None if most is None else max(most - self._answered, 0)

    # Compaction

    @property
    def _may_compact(self) -> bool:
        return self.request.compact_threshold is not None or self._triggered

    async def _compact(self, outlet: Outlet, voice: Voice) -> None:
        """What was said becomes a summary, if it is longer than the client wants, or the client says so."""
        if not self._triggered:
            count = await count_tokens(self._host, self.request, self.context, self._said, self._tools.offer)
            if count <= (self.request.compact_threshold or 0):
                return
        made, used = await voice.while_waiting(summarised(self._host, self.request, self.context, self._said))
        self._used += used
        place = Place(self._wire, self._writer.place(PREFIX).index, made.item["id"])
        self._writer.finished(place, made.item)
        await self._say(outlet, compaction_events(place, made.item))
        self._said, self._since = made.items, len(self._writer.items)

    # Events

    def write(self, events: Sequence[Event]) -> Written:
        return self._logged(self._writer.write(events))

    def idle(self) -> Written:
        """Some clients count only data as a sign of life, not comments; but much is not said for it."""
        if self.response.weight > HEAVY:
            return KEEP_ALIVE
        return self._logged(self.response.event(self._wire, "in_progress"))

    async def _say(self, outlet: Outlet, data: Written) -> None:
        await outlet.write(self._logged(data))

    def _logged(self, data: Written) -> Written:
        if self.log is not None:
            self.log.add(data)
        return data

    # Ends

    async def _finish(self, outlet: Outlet) -> None:
        short = self._writer.finish == "length" or (self._room() == 0 and bool(self._writer.for_server))
        await self._end(outlet, "incomplete" if short else "completed")

    async def _end(self, outlet: Outlet, status: Life, error: Exception | None = None) -> None:
        """The first end is the end, and is not cut short. Only what could not be stored fails after all."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(outlet, status, error))
        await asyncio.shield(self._closing)

    async def _close(self, outlet: Outlet, status: Life, error: Exception | None) -> None:
        """What was made is stored before anybody is told that it is, or finds it so."""
        if left := self._writer.abandon():
            with suppress(ClientGone):
                await self._say(outlet, left)
        number, response = self._wire.number, self._closed(status, error)
        ending, events = await self.context.aside(self.amount, partial(self._written, response))
        count(self.facts, self._used)
        if response.error is not None:
            self.facts["error"] = response.error["message"]
        try:
            # The conversation goes on with the last of these, so nothing may fail after it.
            await self._keep_ids()
            await self.context.save(response, events, self._turns)
        except DragomanError as refused:
            if error is None and status != "cancelled":
                self._closing, self._wire.number = None, number
                raise
            logger.error("The end of a response was not stored: %s: %s", self.id, refused.message)
        self.response = response
        with suppress(ClientGone):
            await self._say(outlet, ending)

    @property
    def amount(self) -> int:
        """How much there is to write. What was written before is only copied, which is quick."""
        written = 0 if self.log is None else self.log.size
        return self.response.weight + written // 16 + sum(turn.count for turn in self._turns)

    def _written(self, response: Response) -> tuple[bytes, bytes | None]:
        """The last events, and all of them."""
        ending = response.ending(self._wire)
        return ending, None if self.log is None else self.log.whole(ending)

    def _closed(self, status: Life, error: Exception | None) -> Response:
        return replace(
            self.response,
            status=status,
            usage=self._used,
            output=self._writer.items,
            error=failure(error) if error else None,
            incomplete="max_output_tokens" if status == "incomplete" else None,
            turns=self._turns if self.request.return_token_ids else None,
            weight_version=self._turns[-1].weight_version if self._turns else None,
            completed_at=int(time.time()) if status == "completed" else None,
        )

    async def _keep_ids(self) -> None:
        """What was sampled, for those who train on it."""
        await trajectories.keep(
            self._host,
            self.context.owner,
            self.id,
            self._turns,
            asked=self.log is not None and bool(self.request.return_token_ids),
            model=self.response.fields["model"],
            created_at=self.response.fields["created_at"],
            previous=self.request.previous_response_id,
            conversation=self.request.conversation_id,
        )
