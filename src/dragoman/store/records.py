"""What is stored: records (responses and chat completions), conversations, and the items of both.

Bodies are JSON that the store keeps and gives back as it got it, without looking inside.
"""

from typing import Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, field

T = TypeVar("T")
Kind: TypeAlias = Literal["response", "chat", "trajectory"]
LONGEST_ID = 512
"""Characters of an id; PostgreSQL cannot index what is much longer."""


class Item(Struct, frozen=True):
    """One item of an input, an output or a conversation, or one message of a chat."""

    id: str
    body: bytes
    trail: bytes = b""
    """The ids that the model sampled up to it, as `turns` packs them; with the last item of an answer."""


class Record(Struct, frozen=True, kw_only=True):
    """A response or a chat completion."""

    kind: Kind
    id: str
    owner: str
    """A hash of the API key; empty where keys are off."""
    created_at: float
    status: str
    """While it is "queued" or "in_progress" a record is never dropped to make room."""
    model: str
    metadata: dict[str, str] = field(default_factory=dict)
    previous: str | None = None
    """The id of the record that this one continues."""
    body: bytes
    """The whole API object."""
    inputs: tuple[Item, ...] = ()
    outputs: tuple[Item, ...] = ()
    events: bytes = b""
    """The log of the stream. It is read back only where it is asked for."""


class Conversation(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    created_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    version: int = 0
    """Grows with every change of the items."""


class Append(Struct, frozen=True):
    """Items to add to a conversation, if its version is still this; None stands for any."""

    conversation: str
    version: int | None
    items: tuple[Item, ...]


class Most(Struct, frozen=True, kw_only=True):
    """How much may be read for one request. It is compared with what is there before any of it is read."""

    items: int
    bytes: int
    """Of their bodies."""


class Chain(Struct, frozen=True):
    """A response and those that it continues."""

    status: str
    """That of the response itself."""
    items: list[Item]
    """All that was said in them, the oldest first."""


class Page(Struct, Generic[T]):
    """A piece of a list; with `has_more`, the id of its last entry is the cursor to the next.

    It has fewer entries than were asked for where more would be too many bytes.
    """

    data: list[T]
    has_more: bool


class Bounds(Struct, frozen=True, kw_only=True):
    """How much is kept, and for how long; None is without a bound."""

    max_bytes: int | None = None
    max_age: float | None = None
    """Seconds."""


class Stats(Struct, frozen=True, kw_only=True):
    counts: dict[str, int]
    """Records by kind, conversations and items."""
    bytes: int
    """What the documents take, by the store's own count."""
    file_bytes: int
    """What the database takes on disk, with its indexes and its free space."""
    oldest: float | None
    schema_version: int
    bounds: Bounds
