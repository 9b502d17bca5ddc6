"""What a response begins with: what it continues, where it is kept, and the tools that it offers."""

import logging
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from os import urandom
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.api.reply import writer
from dragoman.api.responses.history import beginnings, pending_approvals
from dragoman.api.responses.items import ToldItems, without_logprobs
from dragoman.api.responses.response import ResponseObject
from dragoman.api.responses.tools import McpDeclaration, Offer
from dragoman.api.responses.writer import ResponseWriter, describe_listing, make_approved_call
from dragoman.errors import Conflict, ContextOverflow
from dragoman.mcp import McpFailure, McpTool
from dragoman.media import MediaSpan
from dragoman.responses.seal import Sealer
from dragoman.store import Append, Record, Store, StoredConversation, StoredItem
from dragoman.turns.plan import Trails
from dragoman.turns.queue import Workers
from dragoman.turns.tool_loop import Outlet, Speaker, Toolbox
from dragoman.types import Traced

# What it continues: items that came before, new ones, and the place where the result is kept.


R = TypeVar("R")
BYTES_AN_ID = 4
_encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    """`new_id("msg_")` gives `msg_` and 32 hexadecimal digits."""
    return prefix + urandom(16).hex()


class Context:
    """`items` were said before, `inputs` come with the request."""

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        workers: Workers,
        owner: str,
        about: ToldItems,
        conversation: StoredConversation | None = None,
        trails: Sequence[bytes] = (),
    ) -> None:
        self.owner = owner
        self.items = about.before
        self.inputs = about.inputs
        self.size = about.size
        """Bytes that the request is about: of all of them, and of whatever else it says."""
        self.trails = trails
        """The stored ids of what the model said before, answer by answer."""
        self._store = store
        self._sealer = sealer
        self._workers = workers
        self._conversation = conversation

    @property
    def all(self) -> list[dict[str, Any]]:
        return [*self.items, *self.inputs]

    async def aside(self, size: int, work: Callable[[], R]) -> R:
        """`work()`, in a thread where it is about much."""
        return await self._workers.run(self.owner, size, work)

    def seal(self, text: str) -> str:
        return self._sealer.seal(text, self.owner)

    def unseal(self, sealed: str) -> str | None:
        return self._sealer.open(sealed, self.owner)

    async def save(
        self, response: ResponseObject, events: bytes | None, turns: Sequence[Traced] = ()
    ) -> None:
        """Keeps the response and, in the same step, adds to its conversation what both sides said.

        A turn that failed leaves the conversation as it was. A response without events is not kept itself.
        """
        talk = self._conversation if response.status in ("completed", "incomplete") else None
        if talk is None and events is None:
            return
        ids = sum(turn.count for turn in turns)
        # Of the events most is the same again and again, and none of it is written here.
        size = self.size + len(events or b"") // 8 + BYTES_AN_ID * ids
        more, made = await self.aside(size, partial(self._write_items, response, events, turns, bool(talk)))
        if made is not None:
            await self._store.save(made, Append(talk.id, talk.version, more) if talk else None)
        elif talk and await self._store.add_items(self.owner, talk.id, more, talk.version) is None:
            raise Conflict(f"The conversation '{talk.id}' was deleted while the response was made.")

    def _write_items(
        self, response: ResponseObject, events: bytes | None, turns: Sequence[Traced], adds: bool
    ) -> tuple[tuple[StoredItem, ...], Record | None]:
        """What is added to a conversation, and what is kept of the response itself."""
        trail = pack_turns(turns) if response.output else b""
        inputs, outputs = pack_items(self.inputs, self.size), pack_items(response.output, trail=trail)
        made = None if events is None else make_record(response.body(), self.owner, inputs, outputs, events)
        return (*inputs, *outputs) if adds else (), made


def pack_items(items: Sequence[dict[str, Any]], size: int = 0, trail: bytes = b"") -> tuple[StoredItem, ...]:
    """`size` is how large they are at most; `trail` goes with the last of them."""
    write = writer(size)
    trails = [b""] * (len(items) - 1) + [trail]
    return tuple(
        StoredItem(item["id"], write(without_logprobs(item)), of)
        for item, of in zip(items, trails, strict=False)
    )


def make_record(
    body: dict[str, Any],
    owner: str,
    inputs: tuple[StoredItem, ...],
    outputs: tuple[StoredItem, ...],
    events: bytes = b"",
) -> Record:
    """A response object as it is stored."""
    return Record(
        kind="response",
        id=body["id"],
        owner=owner,
        created_at=body["created_at"],
        status=body["status"],
        model=body["model"],
        metadata=body["metadata"],
        previous=body["previous_response_id"],
        body=_encode(body),
        inputs=inputs,
        outputs=outputs,
        events=events,
    )


async def fit_items(
    items: Sequence[dict[str, Any]], planned: Callable[[Sequence[dict[str, Any]]], Awaitable[R]]
) -> R:
    """`planned` with as many of the last items as fit: whole exchanges, and at least the last one.

    From the last exchange it goes back in growing steps, so that the trials are about what fits, however long
    the conversation is.
    """
    try:
        return await planned(items)
    except ContextOverflow:
        cuts = beginnings(items)[1:]
        if not cuts:
            raise
    head = [item for item in items if _is_head(item)]

    async def last(exchanges: int) -> R:
        return await planned([*head, *(item for item in items[cuts[-exchanges] :] if not _is_head(item))])

    fit, too_many = 1, len(cuts) + 1
    best = await last(fit)
    while fit + 1 < too_many:
        tried = min(2 * fit, (fit + too_many) // 2)
        try:
            best, fit = await last(tried), tried
        except ContextOverflow:
            too_many = tried
    return best


def _is_head(item: dict[str, Any]) -> bool:
    """What stays whatever is left out."""
    return item.get("role") in ("system", "developer")


# What it offers the model: the tools of its request, and of MCP servers once they are listed.


logger = logging.getLogger("dragoman.responses")


class Offering:
    """What an earlier response has listed is not asked for again, unless a call of it was approved since."""

    def __init__(self, toolbox: Toolbox, offer: Offer, before: Sequence[dict[str, Any]]) -> None:
        self.offer = offer
        self.toolbox = toolbox
        self._listed: dict[str, list[McpTool]] = {}
        self._approved = [asked for asked, _ in pending_approvals(before)] if offer.mcp else []
        self._known = _lists(before) if offer.mcp else {}
        self._to_ask: list[McpDeclaration] = []

    @property
    def must_ask(self) -> bool:
        """Whether anything is to be done before the model is offered what it is offered."""
        return bool(self._to_ask or self._approved)

    def check(self) -> None:
        """Refuses servers that may not be asked, and takes what is known of the others."""
        self.toolbox.check()
        doubted = {asked["server_label"] for asked in self._approved}
        for declared in self.offer.mcp:
            label = declared.server_label
            if label in self._known and label not in doubted:
                self._listed[label] = self.toolbox.take(label, self._known[label])
            else:
                self._to_ask.append(declared)
        if not self.must_ask:
            self._offer_listed()

    async def ask(self, writer: ResponseWriter, outlet: Outlet, speaker: Speaker) -> None:
        """Asks the servers what they have. One that does not say is an item, and the response goes on."""
        for declared in self._to_ask:
            label, error = declared.server_label, None
            before = self.toolbox.take(label, self._known[label]) if label in self._known else None
            try:
                tools = await outlet.wait(self.toolbox.ask(label), speaker)
            except McpFailure as failure:
                logger.warning("The tools of the MCP server %s are not known: %s", label, failure.message)
                tools, error = self.toolbox.take(label, ()), failure.message
            if tools != before:
                written, item = describe_listing(
                    place := writer.place("mcpl_"), label, [_describe_tool(one) for one in tools], error
                )
                writer.finished(place, item)
                await outlet.write(written)
            self._listed[label] = tools
        self._to_ask = []
        self._offer_listed()

    async def open_approved(self, writer: ResponseWriter, outlet: Outlet) -> None:
        """Calls that the client has approved since are the server's to make now."""
        for asked in self._approved:
            written, call = make_approved_call(
                writer.place("mcp_"), asked["server_label"], asked["name"], asked["arguments"], asked["id"]
            )
            writer.for_server.append(call)
            await outlet.write(written)
        self._approved = []

    def needs_approval(self, visible: str) -> bool:
        ref = self.offer.refs[visible]
        return self.toolbox.needs_approval(ref.server_label or "", ref.name)

    def take_back(self) -> None:
        """The model is offered nothing that it could not have."""
        self.offer = self.offer.without_mcp()

    def _offer_listed(self) -> None:
        """In the order in which they were declared: names that two servers have are told apart by it."""
        for declared in self.offer.mcp:
            self.offer = self.offer.with_mcp(declared.server_label, self._listed[declared.server_label])


def _lists(items: Sequence[dict[str, Any]]) -> dict[str, list[McpTool]]:
    """The tools of each server as they were listed last."""
    return {
        item["server_label"]: [
            McpTool(tool["name"], tool.get("description"), tool["input_schema"], tool.get("annotations"))
            for tool in item["tools"]
        ]
        for item in items
        if item.get("type") == "mcp_list_tools" and not item.get("error")
    }


def _describe_tool(tool: McpTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


# Turns as they are stored beside what was said, so that any process can go on from their ids. Of a prompt
# that goes on from an earlier turn only what is new is stored: however long a conversation becomes, each of
# its ids is stored once.


class StoredTurn(Struct, frozen=True, kw_only=True, array_like=True):
    key: bytes
    source: str
    mark: bytes
    """Stands for all ids of the turn, from the first of its prompt."""
    after: bytes
    """The mark of the turn that the prompt goes on from; empty: there is none."""
    prompt: tuple[int, ...]
    """What is new in it."""
    ids: tuple[int, ...]
    cut: int = 0
    """How many of the last ids of that turn the prompt has not."""
    said: bytes = b""
    """Stands for what the client was told."""
    media: tuple[MediaSpan, ...] = ()
    """What is shown in what is new in the prompt, without data."""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[StoredTurn]).decode


def pack_turns(turns: Sequence[Traced]) -> bytes:
    """The turns of one answer; those that nothing can go on from are left out."""
    found = [_stored(turn) for turn in turns if turn.key]
    return _pack(found) if found else b""


def recall(trails: Trails, stored: Sequence[bytes], owner: str = "") -> None:
    """Has a prompt that goes on from these answers find the last one, be it remembered or not.

    Its prompt has the ids of those before it. Where a template rewrites that prompt, they are looked for by
    themselves.
    """
    last = next(_backwards(stored), None)
    if last is None or trails.prefer(last.key, last.source):
        return
    prompt, media = _prompt(stored)
    if prompt is not None:
        for turn in [*_backwards(stored)][:0:-1]:
            if not trails.prefer(turn.key, turn.source):
                outline = replace(_traced(turn, ()), key=trails.outline(turn.key))
                trails.add(outline, owner)
        trails.add(replace(_traced(last, prompt), media=media), owner)


def _traced(turn: StoredTurn, prompt: tuple[int, ...]) -> Traced:
    return Traced(key=turn.key, source=turn.source, prompt=prompt, ids=turn.ids, said=turn.said)


def _stored(turn: Traced) -> StoredTurn:
    return StoredTurn(
        key=turn.key,
        source=turn.source,
        mark=_mark(turn.all),
        after=_mark(turn.prompt[: turn.kept] + turn.cut) if turn.kept else b"",
        prompt=turn.prompt[turn.kept :],
        ids=turn.ids,
        cut=len(turn.cut),
        said=turn.said,
        media=tuple(span for span in turn.media if span.start >= turn.kept),
    )


def _mark(ids: tuple[int, ...]) -> bytes:
    return blake2b(array("I", ids).tobytes(), digest_size=16).digest()


def _backwards(stored: Sequence[bytes]) -> Iterator[StoredTurn]:
    for answer in reversed(stored):
        yield from reversed(_unpack(answer))


def _prompt(stored: Sequence[bytes]) -> tuple[tuple[int, ...] | None, tuple[MediaSpan, ...]]:
    """That of the last turn, put together; None where a turn that it goes on from is gone."""
    parts: list[tuple[int, ...]] = []
    media: list[MediaSpan] = []
    wanted: bytes | None = None
    cut = 0
    for turn in _backwards(stored):
        if wanted is None:
            parts.append(turn.prompt)
        elif turn.mark == wanted:
            parts += [turn.ids[: len(turn.ids) - cut], turn.prompt]
        else:
            continue
        wanted, cut = turn.after, turn.cut
        # Each stands where it stood: what comes later begins with all that was before.
        media[:0] = turn.media
        if not wanted:
            return tuple(id_ for part in reversed(parts) for id_ in part), tuple(media)
    return None, ()
