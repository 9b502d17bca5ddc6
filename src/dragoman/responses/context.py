"""The input of a response: the items that it continues, where it is stored, and the tools it offers."""

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
from dragoman.api.responses.items import ContextItems, without_logprobs
from dragoman.api.responses.response import ResponseObject
from dragoman.api.responses.tools import McpDeclaration, ModelTools
from dragoman.api.responses.writer import ResponseWriter, describe_listing, make_approved_call
from dragoman.errors import Conflict, ContextOverflow
from dragoman.mcp import McpFailure, McpTool
from dragoman.media import MediaSpan
from dragoman.responses.seal import Sealer
from dragoman.store import ConversationAppend, Record, Store, StoredConversation, StoredItem
from dragoman.turns.plan import TurnCache
from dragoman.turns.queue import WorkerPool
from dragoman.turns.tool_loop import ClientOutput, EventEncoder, McpToolset
from dragoman.types import TurnRecord

# The items before, the new ones, and where the result is stored.


R = TypeVar("R")
BYTES_AN_ID = 4
_encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    """Return a new id: `new_id("msg_")` gives `msg_` and 32 hexadecimal digits."""
    return prefix + urandom(16).hex()


class ResponseContext:
    """What a response continues: `items` come from earlier responses, `inputs` from the request."""

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        workers: WorkerPool,
        owner: str,
        about: ContextItems,
        conversation: StoredConversation | None = None,
        trails: Sequence[bytes] = (),
    ) -> None:
        self.owner = owner
        self.items = about.before
        self.inputs = about.inputs
        self.size = about.size
        """Bytes of items, inputs and the rest of the request."""
        self.stored_turns = trails
        """The stored ids of earlier answers."""
        self._store = store
        self._sealer = sealer
        self._workers = workers
        self._conversation = conversation

    @property
    def all(self) -> list[dict[str, Any]]:
        return [*self.items, *self.inputs]

    async def offload(self, size: int, work: Callable[[], R]) -> R:
        """Run `work`, in a thread if it is large."""
        return await self._workers.run(self.owner, size, work)

    def seal(self, text: str) -> str:
        return self._sealer.seal(text, self.owner)

    def unseal(self, sealed: str) -> str | None:
        return self._sealer.open(sealed, self.owner)

    async def save(
        self, response: ResponseObject, events: bytes | None, turns: Sequence[TurnRecord] = ()
    ) -> None:
        """Store the response and, in the same transaction, append its inputs and outputs to its conversation.

        A failed turn leaves the conversation unchanged. Without `events` the response itself is not
        stored.
        """
        talk = self._conversation if response.status in ("completed", "incomplete") else None
        if talk is None and events is None:
            return
        ids = sum(turn.total_ids for turn in turns)
        # Most bytes of the events are repetitions, and none of them is encoded here.
        size = self.size + len(events or b"") // 8 + BYTES_AN_ID * ids
        more, record = await self.offload(
            size, partial(self._write_items, response, events, turns, bool(talk))
        )
        if record is not None:
            await self._store.save(record, ConversationAppend(talk.id, talk.version, more) if talk else None)
        elif talk and await self._store.add_items(self.owner, talk.id, more, talk.version) is None:
            raise Conflict(f"The conversation '{talk.id}' was deleted while the response was generated.")

    def _write_items(
        self, response: ResponseObject, events: bytes | None, turns: Sequence[TurnRecord], adds: bool
    ) -> tuple[tuple[StoredItem, ...], Record | None]:
        """Build the items to append to the conversation, and the record of the response."""
        trail = pack_turns(turns) if response.output else b""
        inputs, outputs = pack_items(self.inputs, self.size), pack_items(response.output, trail=trail)
        record = None if events is None else make_record(response.body(), self.owner, inputs, outputs, events)
        return (*inputs, *outputs) if adds else (), record


def pack_items(items: Sequence[dict[str, Any]], size: int = 0, trail: bytes = b"") -> tuple[StoredItem, ...]:
    """Encode items for the store. `size` is their maximum size; `trail` is stored with the last of them."""
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
    """Build the record of a response."""
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
    """Call `planned` with as many of the last items as fit: whole exchanges, and at least the last one.

    The search starts at the last exchange and takes growing steps, so each attempt is about as long as what
    fits, however long the conversation is.
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
    """Whether the item stays however much is left out."""
    return item.get("role") in ("system", "developer")


# The tools of the response: those of the request, and those of MCP servers once they are listed.


logger = logging.getLogger("dragoman.responses")


class ToolDiscovery:
    """Tool discovery. Reuses MCP tool lists from the history; queries a server again only if one of its calls
    was approved since.
    """

    def __init__(self, toolbox: McpToolset, offer: ModelTools, before: Sequence[dict[str, Any]]) -> None:
        self.offer = offer
        self.toolbox = toolbox
        self._listed: dict[str, list[McpTool]] = {}
        self._approved = [asked for asked, _ in pending_approvals(before)] if offer.mcp else []
        self._known = _lists(before) if offer.mcp else {}
        self._to_ask: list[McpDeclaration] = []

    @property
    def needs_servers(self) -> bool:
        """Whether a server must be queried or an approved call made before the first turn."""
        return bool(self._to_ask or self._approved)

    def check(self) -> None:
        """Raise for servers that are not allowed, and take the known tool lists of the others."""
        self.toolbox.check()
        doubted = {asked["server_label"] for asked in self._approved}
        for declared in self.offer.mcp:
            label = declared.server_label
            if label in self._known and label not in doubted:
                self._listed[label] = self.toolbox.register_tools(label, self._known[label])
            else:
                self._to_ask.append(declared)
        if not self.needs_servers:
            self._offer_listed()

    async def list_tools(self, writer: ResponseWriter, outlet: ClientOutput, speaker: EventEncoder) -> None:
        """Query the servers. A failure becomes an item, and the response continues."""
        for declared in self._to_ask:
            label, error = declared.server_label, None
            before = self.toolbox.register_tools(label, self._known[label]) if label in self._known else None
            try:
                tools = await outlet.wait(self.toolbox.list_tools(label), speaker)
            except McpFailure as failure:
                logger.warning("Cannot list the tools of MCP server %s: %s", label, failure.message)
                tools, error = self.toolbox.register_tools(label, ()), failure.message
            if tools != before:
                written, item = describe_listing(
                    encoder := writer.next_item_encoder("mcpl_"),
                    label,
                    [_describe_tool(one) for one in tools],
                    error,
                )
                writer.add_item(encoder, item)
                await outlet.write(written)
            self._listed[label] = tools
        self._to_ask = []
        self._offer_listed()

    async def open_approved(self, writer: ResponseWriter, outlet: ClientOutput) -> None:
        """Open the calls that the client has approved, for the server to execute."""
        for asked in self._approved:
            written, call = make_approved_call(
                writer.next_item_encoder("mcp_"),
                asked["server_label"],
                asked["name"],
                asked["arguments"],
                asked["id"],
            )
            writer.server_calls.append(call)
            await outlet.write(written)
        self._approved = []

    def needs_approval(self, visible: str) -> bool:
        ref = self.offer.refs[visible]
        return self.toolbox.needs_approval(ref.server_label or "", ref.name)

    def drop_mcp_tools(self) -> None:
        """Withdraw the MCP tools once the limit of calls is reached."""
        self.offer = self.offer.without_mcp()

    def _offer_listed(self) -> None:
        """Add the listed tools in the order of declaration, which disambiguates names that two servers
        share.
        """
        for declared in self.offer.mcp:
            self.offer = self.offer.with_mcp(declared.server_label, self._listed[declared.server_label])


def _lists(items: Sequence[dict[str, Any]]) -> dict[str, list[McpTool]]:
    """Return the latest tool list of each server."""
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


# Turns are stored beside the items, so that any server can continue from their ids. If a prompt continues an
# earlier turn, only its new ids are stored: each id of a conversation is stored once.


class StoredTurn(Struct, frozen=True, kw_only=True, array_like=True):
    key: bytes
    source: str
    mark: bytes
    """Digest of all ids of the turn, from the first id of its prompt."""
    after: bytes
    """The digest of the turn that the prompt continues; empty if there is none."""
    prompt: tuple[int, ...]
    """The new ids of the prompt."""
    ids: tuple[int, ...]
    cut: int = 0
    """How many of the last ids of that turn the prompt lacks."""
    said: bytes = b""
    """Digest of the message as the client received it."""
    media: tuple[MediaSpan, ...] = ()
    """Media in the new part of the prompt, without their data."""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[StoredTurn]).decode


def pack_turns(turns: Sequence[TurnRecord]) -> bytes:
    """Encode the turns of an answer, leaving out those that nothing can continue."""
    result = [_stored(turn) for turn in turns if turn.prompt_key]
    return _pack(result) if result else b""


def restore_turns(trails: TurnCache, stored: Sequence[bytes], owner: str = "") -> None:
    """Load stored turns into the cache, so that a prompt that continues these answers finds the last one.

    The prompt of the last turn contains the ids of those before it. These are added as well, for templates
    that rewrite the prompt.
    """
    last = next(_backwards(stored), None)
    if last is None or trails.prefer(last.key, last.source):
        return
    prompt, media = _prompt(stored)
    if prompt is not None:
        for turn in [*_backwards(stored)][:0:-1]:
            if not trails.prefer(turn.key, turn.source):
                outline = replace(_traced(turn, ()), prompt_key=trails.outline(turn.key))
                trails.add(outline, owner)
        trails.add(replace(_traced(last, prompt), media=media), owner)


def _traced(turn: StoredTurn, prompt: tuple[int, ...]) -> TurnRecord:
    return TurnRecord(
        prompt_key=turn.key, source=turn.source, prompt=prompt, ids=turn.ids, message_digest=turn.said
    )


def _stored(turn: TurnRecord) -> StoredTurn:
    return StoredTurn(
        key=turn.prompt_key,
        source=turn.source,
        mark=_mark(turn.all_ids),
        after=_mark(turn.prompt[: turn.reused_ids] + turn.dropped_ids) if turn.reused_ids else b"",
        prompt=turn.prompt[turn.reused_ids :],
        ids=turn.ids,
        cut=len(turn.dropped_ids),
        said=turn.message_digest,
        media=tuple(span for span in turn.media if span.start >= turn.reused_ids),
    )


def _mark(ids: tuple[int, ...]) -> bytes:
    return blake2b(array("I", ids).tobytes(), digest_size=16).digest()


def _backwards(stored: Sequence[bytes]) -> Iterator[StoredTurn]:
    for answer in reversed(stored):
        yield from reversed(_unpack(answer))


def _prompt(stored: Sequence[bytes]) -> tuple[tuple[int, ...] | None, tuple[MediaSpan, ...]]:
    """Reassemble the prompt of the last turn; None if a turn that it continues is missing."""
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
        # Positions stay the same: each prompt begins with everything before it.
        media[:0] = turn.media
        if not wanted:
            return tuple(id_ for part in reversed(parts) for id_ in part), tuple(media)
    return None, ()
