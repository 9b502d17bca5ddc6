"""The store as the rest of the program knows it. Each method is one operation, in one transaction.

The owner is part of every look-up: what belongs to another is not there.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from dragoman.store import conversation_operations as conversations
from dragoman.store import items, record_operations, upkeep
from dragoman.store.items import BEYOND
from dragoman.store.records import (
    Append,
    Bounds,
    Chain,
    Conversation,
    Item,
    Kind,
    Most,
    Operation,
    Page,
    Record,
    Stats,
)
from dragoman.store.upkeep import packed, unpacked

T = TypeVar("T")


class Store(ABC):
    def __init__(self, bounds: Bounds, clock: Callable[[], float] | None = None) -> None:
        self.bounds = bounds
        self.instance = uuid.uuid4().hex
        """Names this process in the records that it works on."""
        self._clock = clock or time.time
        self._owners: set[str] = set()
        """Who has, or had lately, anything here."""
        self._grown = 0
        """Bytes that came in since room was last made, for stores that do not look each time."""

    async def open(self) -> None:
        """Makes or migrates the tables. Until then nothing else may be called."""
        try:
            await self._open()
            if self.bounds.max_bytes is not None:
                self._owners = await self._read(upkeep.owners)
        except BaseException:
            await self.close()
            raise

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Finishes what was begun. May be called twice."""

    @abstractmethod
    async def vacuum(self) -> None:
        """Gives what is free in the database back to the disk."""

    @abstractmethod
    async def stats(self) -> Stats: ...

    @abstractmethod
    async def orphans(self) -> list[Record]:
        """Records "queued" or "in_progress" that no living server works on; this one takes them over."""

    @abstractmethod
    async def _read(self, make: Callable[[], Operation[T]]) -> T: ...

    @abstractmethod
    async def _write(self, make: Callable[[], Operation[T]], *, frees: bool = False) -> T:
        """Returns when the change is on disk. What `frees` is done on a full disk, too."""

    async def check(self) -> None:
        """Raises StoreUnavailable if the database does not answer."""
        await self._read(upkeep.answer)

    async def save(self, record: Record, append: Append | None = None) -> None:
        """Stores or replaces a record and adds to a conversation, both or neither.

        Raises Conflict if the conversation is gone or has another version.
        """
        events = await packed(record.events)
        most = self._admit(record.owner, record_operations.size_of(record, events))
        now = self._clock()
        await self._write(lambda: record_operations.save(record, events, self.instance, append, now, most))

    async def get(self, kind: Kind, owner: str, id: str, *, events: bool = False) -> Record | None:
        record, stored = await self._read(lambda: record_operations.get(kind, owner, id, events))
        return replace(record, events=await unpacked(stored)) if record and stored else record

    async def chain(self, owner: str, id: str, longest: int, most: Most) -> Chain:
        """What was said in a response and those that it continues.

        Raises MissingRecord for the first that is not there, and ChainTooLong for more than `longest`.
        """
        return await self._read(lambda: record_operations.chain(owner, id, longest, most))

    async def lineage(self, owner: str, id: str, most: int, most_bytes: int = BEYOND) -> list[Record]:
        """A trajectory and those that it goes on from, as far as they are there, the oldest first.

        Raises TrajectoryTooLarge before their bodies are more than so many bytes.
        """
        found: list[Record] = []
        following: str | None = id
        left = most_bytes
        while following is not None and len(found) < most:
            record = await self._read(partial(record_operations.get_within, owner, following, left))
            if record is None:
                break
            found.append(record)
            following = record.previous
            left -= len(record.body)
        return found[::-1]

    async def delete(self, kind: Kind, owner: str, id: str) -> bool:
        return await self._write(lambda: record_operations.delete(kind, owner, id), frees=True)

    async def inputs(
        self,
        kind: Kind,
        owner: str,
        id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = False,
    ) -> Page[Item] | None:
        """Raises UnknownCursor if `after` is the id of none of them."""
        return await self._read(lambda: record_operations.inputs(kind, owner, id, after, limit, descending))

    async def records(
        self,
        kind: Kind,
        owner: str,
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = False,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[Record]:
        """In the order of their creation, those that have this model and all these pairs, without items."""
        return await self._read(
            lambda: record_operations.page(
                kind,
                owner,
                after=after,
                limit=limit,
                descending=descending,
                model=model,
                metadata=metadata or {},
            )
        )

    async def set_metadata(
        self, kind: Kind, owner: str, id: str, metadata: Mapping[str, str], body: bytes
    ) -> bool:
        """`body` is the API object with the new metadata in it."""
        return await self._write(lambda: record_operations.set_metadata(kind, owner, id, metadata, body))

    async def create_conversation(self, conversation: Conversation, first: Sequence[Item] = ()) -> None:
        """Raises Conflict if there is one of this id."""
        self._admit(conversation.owner, items.size_of(first))
        now = self._clock()
        await self._write(lambda: conversations.create(conversation, first, now))

    async def conversation(self, owner: str, id: str) -> Conversation | None:
        return await self._read(lambda: conversations.get(owner, id))

    async def set_conversation_metadata(self, owner: str, id: str, metadata: Mapping[str, str]) -> bool:
        now = self._clock()
        return await self._write(lambda: conversations.set_metadata(owner, id, metadata, now))

    async def delete_conversation(self, owner: str, id: str) -> bool:
        return await self._write(lambda: conversations.delete(owner, id), frees=True)

    async def add_items(
        self, owner: str, id: str, more: Sequence[Item], version: int | None = None
    ) -> Conversation | None:
        """The conversation with them, or None if there is none. Raises Conflict if its version is another."""
        most = self._admit(owner, items.size_of(more))
        now = self._clock()
        return await self._write(lambda: conversations.add_items(owner, id, more, version, now, most))

    async def conversation_items(
        self, owner: str, id: str, *, after: str | None = None, limit: int = 20, descending: bool = False
    ) -> Page[Item] | None:
        """Raises UnknownCursor if `after` is the id of none of them."""
        return await self._read(lambda: conversations.item_page(owner, id, after, limit, descending))

    async def all_items(self, owner: str, id: str, most: Most) -> list[Item] | None:
        """Those of a conversation, or None if there is none."""
        return await self._read(lambda: conversations.all_items(owner, id, most))

    async def conversation_item(self, owner: str, id: str, item_id: str) -> Item | None:
        return await self._read(lambda: conversations.item(owner, id, item_id))

    async def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        now = self._clock()
        return await self._write(lambda: conversations.delete_item(owner, id, item_id, now), frees=True)

    async def find_items(self, owner: str, wanted: Mapping[str, int], most: Most) -> dict[str, bytes]:
        """The bodies of items of any record or conversation; of several, that which was stored last.

        `wanted` says how often each is meant: so often its bytes count.
        """
        return await self._read(lambda: items.find(owner, wanted, most))

    async def export(self) -> AsyncIterator[bytes]:
        """Everything of every owner: a line of JSON for each record, then one for each conversation."""
        for lines_after in (upkeep.record_lines, upkeep.conversation_lines):
            place = 0
            while True:
                lines, place = await self._read(lambda: lines_after(place))  # noqa: B023
                if not lines:
                    break
                for line in lines:
                    yield line

    def _admit(self, owner: str, size: int) -> int | None:
        """What one thing of this owner may take, if there is a bound. Raises for what takes more.

        It would push out everything else that the owner has, and itself after that.
        """
        self._grown += size
        if self.bounds.max_bytes is None:
            return None
        self._owners.add(owner)
        share = self.bounds.max_bytes // max(2, len(self._owners))
        items.check_share(size, share)
        return share
