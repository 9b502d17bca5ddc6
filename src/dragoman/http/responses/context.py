"""What a response continues: items that came before, new ones, and the place where the result is kept."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from dragoman.api.responses.history import beginnings
from dragoman.api.responses.response import Response
from dragoman.api.responses.seal import Sealer
from dragoman.errors import Conflict, ContextOverflow
from dragoman.store import Append, Conversation, Item, Record, Store
from dragoman.turns.stored_trails import packed
from dragoman.types import Traced

R = TypeVar("R")
_encode = msgspec.json.Encoder().encode


class Context:
    """`items` were said before, `inputs` come with the request."""

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        owner: str,
        items: Sequence[dict[str, Any]],
        inputs: Sequence[dict[str, Any]],
        conversation: Conversation | None = None,
        trails: Sequence[bytes] = (),
    ) -> None:
        self.owner = owner
        self.items = items
        self.inputs = inputs
        self.trails = trails
        """The stored ids of what the model said before, answer by answer."""
        self.size = 0
        """Characters of all of them, once they were counted."""
        self._store = store
        self._sealer = sealer
        self._conversation = conversation

    def seal(self, text: str) -> str:
        return self._sealer.seal(text, self.owner)

    def unseal(self, sealed: str) -> str | None:
        return self._sealer.open(sealed, self.owner)

    async def save(self, response: Response, events: bytes | None, turns: Sequence[Traced] = ()) -> None:
        """Keeps the response and, in the same step, adds to its conversation what both sides said.

        A turn that failed leaves the conversation as it was. A response without events is not kept itself.
        """
        talk = self._conversation if response.status in ("completed", "incomplete") else None
        trail = packed(turns) if response.output and (talk or events) else b""
        more = stored([*self.inputs, *response.output], trail) if talk else ()
        if events is not None:
            append = Append(talk.id, talk.version, more) if talk else None
            made = record(response.body(), self.owner, self.inputs, events, trail)
            await self._store.save(made, append)
        elif talk and await self._store.add_items(self.owner, talk.id, more, talk.version) is None:
            raise Conflict(f"The conversation '{talk.id}' was deleted while the response was made.")


def stored(items: Sequence[dict[str, Any]], trail: bytes = b"") -> tuple[Item, ...]:
    """`trail` goes with the last of them."""
    trails = [b""] * (len(items) - 1) + [trail]
    return tuple(Item(item["id"], _encode(item), of) for item, of in zip(items, trails, strict=False))


def record(
    body: dict[str, Any],
    owner: str,
    inputs: Sequence[dict[str, Any]],
    events: bytes = b"",
    trail: bytes = b"",
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
        inputs=stored(inputs),
        outputs=stored(body["output"], trail),
        events=events,
    )


async def fitted(
    items: Sequence[dict[str, Any]], planned: Callable[[Sequence[dict[str, Any]]], Awaitable[R]]
) -> R:
    """`planned` with as many of the last items as fit: whole exchanges, and at least the last one."""
    try:
        return await planned(items)
    except ContextOverflow:
        cuts = beginnings(items)[1:]
        if not cuts:
            raise
    head = [item for item in items if item.get("role") in ("system", "developer")]
    low, high = 0, len(cuts) - 1
    best: R | None = None
    while low <= high:
        middle = (low + high) // 2
        kept = [item for item in items[cuts[middle] :] if item not in head]
        try:
            best, high = await planned([*head, *kept]), middle - 1
        except ContextOverflow:
            if middle == len(cuts) - 1:
                raise
            low = middle + 1
    assert best is not None
    return best
