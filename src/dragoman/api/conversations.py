"""Conversations: requests and responses."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from dragoman.api.reply import OpenAIErrorSerializer
from dragoman.api.request_decoder import RequestDecoder
from dragoman.api.responses.items import ItemDict
from dragoman.api.sampling_fields import Metadata
from dragoman.api.tools import bad_param
from dragoman.errors import CONVERSATION, NotFound
from dragoman.store import StoredConversation

# Metadata of stored objects (conversations, chat completions), which a client may replace later.


class ChangeMetadataRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to replace the metadata, which is all that can be changed. Null removes them."""

    metadata: Metadata | None


_READER = RequestDecoder.for_type(ChangeMetadataRequest)


def read_metadata(body: bytes) -> dict[str, str]:
    request: ChangeMetadataRequest = _READER.read(body)
    return request.metadata or {}


# Conversations.


ERRORS = OpenAIErrorSerializer({CONVERSATION: "items"})
MOST_ITEMS = 20
"""Maximum number of items that one request may add; OpenAI's limit."""


class CreateConversationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[dict[str, Any]], Meta(max_length=MOST_ITEMS)] | None = None
    metadata: Metadata | None = None


class AddItemsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MOST_ITEMS)]


_CREATE = RequestDecoder.for_type(CreateConversationRequest)
_ADD = RequestDecoder.for_type(AddItemsRequest)


def read(body: bytes) -> CreateConversationRequest:
    """Read the request; an empty body creates an empty conversation."""
    request: CreateConversationRequest = _CREATE.read(body or b"{}")
    return request


def read_items(body: bytes) -> list[dict[str, Any]]:
    request: AddItemsRequest = _ADD.read(body)
    return request.items


def check_items(items: Sequence[ItemDict]) -> None:
    """Reject items that are commands to the server rather than part of a conversation."""
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item["type"] == "compaction_trigger":
            raise bad_param(f"items[{number}].type", "cannot be stored; send it as input of a response")
        if item["id"] in seen:
            raise bad_param(f"items[{number}].id", "is used by an earlier item; ids must differ")
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
