"""Conversations: requests and responses."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from dragoman.api.choosing_fields import Metadata
from dragoman.api.read import Reader
from dragoman.api.reply import OpenAIErrors
from dragoman.api.responses.items import ItemDict
from dragoman.api.tools import wrong
from dragoman.errors import CONVERSATION, NotFound
from dragoman.store import StoredConversation

# Metadata of stored objects (conversations, chat completions), which a client may replace later.


class ChangeMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to replace the metadata, which is all that can be changed. Null removes them."""

    metadata: Metadata | None


_READER = Reader.of(ChangeMetadata)


def read_metadata(body: bytes) -> dict[str, str]:
    request: ChangeMetadata = _READER.read(body)
    return request.metadata or {}


# Conversations.


ERRORS = OpenAIErrors({CONVERSATION: "items"})
MOST_ITEMS = 20
"""Maximum number of items that one request may add; OpenAI's limit."""


class CreateConversation(Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[dict[str, Any]], Meta(max_length=MOST_ITEMS)] | None = None
    metadata: Metadata | None = None


class AddItems(Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MOST_ITEMS)]


_CREATE = Reader.of(CreateConversation)
_ADD = Reader.of(AddItems)


def read(body: bytes) -> CreateConversation:
    """Read the request; an empty body creates an empty conversation."""
    request: CreateConversation = _CREATE.read(body or b"{}")
    return request


def read_items(body: bytes) -> list[dict[str, Any]]:
    request: AddItems = _ADD.read(body)
    return request.items


def check_items(items: Sequence[ItemDict]) -> None:
    """Reject items that are commands to the server rather than part of a conversation."""
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item["type"] == "compaction_trigger":
            raise wrong(f"items[{number}].type", "cannot be stored; send it as input of a response")
        if item["id"] in seen:
            raise wrong(f"items[{number}].id", "is used by an earlier item; ids must differ")
        seen.add(item["id"])


def describe_conversation(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


def describe_deleted(id_: str) -> dict[str, Any]:
    return {"id": id_, "object": "conversation.deleted", "deleted": True}


def unknown_conversation(id_: str) -> NotFound:
    return NotFound(f"There is no conversation '{id_[:128]}'.", param="conversation_id", code="not_found")


def unknown_item(id_: str) -> NotFound:
    return NotFound(
        f"There is no item '{id_[:128]}' in this conversation.", param="item_id", code="not_found"
    )
