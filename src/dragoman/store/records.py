"""Stored objects as structs and tables, and the type of operations on them."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, field

# Records (responses and chat completions), conversations, and the items of both. Bodies are JSON that the
# store returns as it was stored, without parsing it.


T = TypeVar("T")
Kind: TypeAlias = Literal["response", "chat", "trajectory"]
LONGEST_ID = 512
"""Maximum characters of an id; PostgreSQL cannot index much longer values."""


class StoredItem(Struct, frozen=True):
    """One item of an input, an output or a conversation, or one message of a chat."""

    id: str
    body: bytes
    trail: bytes = b""
    """The sampled ids up to this item, packed by `pack_turns`; set on the last item of an answer."""
    shown: int = 0
    """Bytes of the body that are media in base64."""
    media: Mapping[str, bytes] = field(default_factory=dict)
    """Inside the store: the media that the body has markers for, by digest."""


class Record(Struct, frozen=True, kw_only=True):
    """A response, chat completion or trajectory."""

    kind: Kind
    id: str
    owner: str
    """The hashed API key; empty where keys are off."""
    created_at: float
    status: str
    """A record that is "queued" or "in_progress" is never evicted."""
    model: str
    metadata: dict[str, str] = field(default_factory=dict)
    previous: str | None = None
    """The id of the record that this one continues."""
    body: bytes
    """The complete API object."""
    inputs: tuple[StoredItem, ...] = ()
    outputs: tuple[StoredItem, ...] = ()
    events: bytes = b""
    """The events of the stream, read only on request."""


class StoredConversation(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    created_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    version: int = 0
    """Incremented with every change of the items."""


class BatchLineError(Struct, frozen=True):
    """An error in a line of a batch; without a line, in the whole batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(Struct, frozen=True, kw_only=True):
    """A batch of requests that run in the background. Times are in seconds."""

    id: str
    kind: str
    """The API that created it."""
    owner: str
    endpoint: str
    window: str
    status: str
    created_at: int
    expires_at: int
    input_file: str | None = None
    metadata: dict[str, str] | None = None
    keep_s: int | None = None
    """Seconds for which result files are kept."""
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    undone: int = 0
    """Lines that were not run before it ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    faults: tuple[BatchLineError, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    ends: str | None = None
    """The final status, set once it is decided and only the result files are missing."""
    at: dict[str, int] = field(default_factory=dict)
    """The time of each status."""


class ConversationAppend(Struct, frozen=True):
    """Items to append to a conversation, if its version is still this one; None matches any."""

    conversation: str
    version: int | None
    items: tuple[StoredItem, ...]


class ReadLimits(Struct, frozen=True, kw_only=True):
    """Limits of what one request may read, checked before reading."""

    items: int
    bytes: int
    """Bytes of the bodies without their media."""
    shown: int = 2**62
    """Bytes of their media."""


class ResponseChain(Struct, frozen=True):
    """A response with all that it continues."""

    status: str
    """The status of the response itself."""
    items: list[StoredItem]
    """The items of all of them, oldest first."""


class Page(Struct, Generic[T]):
    """A page of a list; with `has_more`, the id of its last entry is the cursor to the next page.

    It has fewer entries than requested if more would be too many bytes.
    """

    data: list[T]
    has_more: bool


class StoreLimits(Struct, frozen=True, kw_only=True):
    """Limits of size and age; None means no limit."""

    max_bytes: int | None = None
    max_age: float | None = None
    """Age in seconds."""


class Stats(Struct, frozen=True, kw_only=True):
    counts: dict[str, int]
    """The number of records by kind, of conversations and of items."""
    bytes: int
    """The size of the documents, as the store counts it."""
    file_bytes: int
    """The size of the database on disk, with indexes and free space."""
    oldest: float | None
    schema_version: int
    bounds: StoreLimits


# An operation is a generator: it yields statements, receives their rows, and returns its result.
#
# It is written once, in SQL that SQLite and PostgreSQL share, and is independent of threads and sockets: one
# driver runs it in a thread, the other awaits each statement. An operation runs in one transaction.

Row: TypeAlias = tuple[Any, ...]


class Query(Struct, frozen=True):
    """One statement; `?` stands for each value."""

    sql: str
    values: tuple[Any, ...] = ()


class SqlBatch(Struct, frozen=True):
    """One statement that runs once per row of values, and returns no rows."""

    sql: str
    rows: Sequence[tuple[Any, ...]]


Statement: TypeAlias = Query | SqlBatch
SqlOperation: TypeAlias = Generator[Statement, list[Row], T]


def marks(values: Sequence[object]) -> str:
    """Format the placeholders of an IN list: `marks("abc")` is `?, ?, ?`."""
    return ", ".join("?" * len(values))


# The tables, as a list of migrations. A released migration is never changed; changes are new migrations.
#
# Braces mark what the databases spell differently: `{serial}`, an auto-incremented key, `{blob}`, and
# `{when_unshown}`, a trigger.


Dialect: TypeAlias = Mapping[str, str]
# Media without any item is deleted.
LET_GO = """UPDATE media SET uses = uses - 1 WHERE seq = OLD.media;
    DELETE FROM media WHERE seq = OLD.media AND uses < 1;"""
SQLITE: Dialect = {
    "serial": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "blob": "BLOB",
    "when_unshown": f"CREATE TRIGGER unshown AFTER DELETE ON shown BEGIN {LET_GO} END",
}
POSTGRES: Dialect = {
    "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "blob": "BYTEA",
    "when_unshown": f"""CREATE FUNCTION let_go() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN {LET_GO} RETURN NULL; END $$;
        CREATE TRIGGER unshown AFTER DELETE ON shown FOR EACH ROW EXECUTE FUNCTION let_go()""",
}

FIRST = (
    # `events` is the last column: SQLite reads a row from its start, and few queries need the events.
    """CREATE TABLE records (
        seq {serial}, owner TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL, previous TEXT,
        instance TEXT NOT NULL, size BIGINT NOT NULL,
        metadata {blob} NOT NULL, body {blob} NOT NULL, events {blob} NOT NULL,
        UNIQUE (owner, kind, id))""",
    "CREATE INDEX records_in_order ON records (owner, kind, created_at, seq)",
    "CREATE INDEX records_by_age ON records (created_at)",
    "CREATE INDEX records_unfinished ON records (instance) WHERE status IN ('queued', 'in_progress')",
    # The pairs of the metadata again, for searching.
    """CREATE TABLE labels (
        record BIGINT NOT NULL REFERENCES records (seq) ON DELETE CASCADE,
        name TEXT NOT NULL, value TEXT NOT NULL,
        PRIMARY KEY (record, name))""",
    """CREATE TABLE conversations (
        seq {serial}, owner TEXT NOT NULL, id TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, changed_at DOUBLE PRECISION NOT NULL,
        version BIGINT NOT NULL, size BIGINT NOT NULL, metadata {blob} NOT NULL,
        UNIQUE (owner, id))""",
    "CREATE INDEX conversations_by_age ON conversations (changed_at)",
    # An item belongs to the input or output of a record, or to a conversation.
    """CREATE TABLE items (
        seq {serial}, owner TEXT NOT NULL, id TEXT NOT NULL,
        record BIGINT REFERENCES records (seq) ON DELETE CASCADE,
        conversation BIGINT REFERENCES conversations (seq) ON DELETE CASCADE,
        part TEXT NOT NULL, body {blob} NOT NULL)""",
    "CREATE INDEX items_by_id ON items (owner, id)",
    "CREATE INDEX items_of_records ON items (record, part, seq) WHERE record IS NOT NULL",
    "CREATE INDEX items_of_conversations ON items (conversation, seq) WHERE conversation IS NOT NULL",
)

# The sampled ids, with the last item of an answer.
TRAILS = ("ALTER TABLE items ADD COLUMN trail {blob}",)

# Indexes for the size of each owner's data and its oldest rows, without reading the rows.
SHARES = (
    "CREATE INDEX records_of_owners ON records (owner, created_at, seq, size)",
    "CREATE INDEX conversations_of_owners ON conversations (owner, changed_at, seq, size)",
)

# Media, once per owner, and the items that contain it.
MEDIA = (
    "ALTER TABLE items ADD COLUMN shown BIGINT",
    """CREATE TABLE media (
        seq {serial}, owner TEXT NOT NULL, digest TEXT NOT NULL, size BIGINT NOT NULL, uses BIGINT NOT NULL,
        data {blob} NOT NULL, UNIQUE (owner, digest))""",
    # The row in `media` is deleted after the rows that name it, so no foreign key is used.
    """CREATE TABLE shown (
        item BIGINT NOT NULL REFERENCES items (seq) ON DELETE CASCADE, media BIGINT NOT NULL,
        PRIMARY KEY (item, media))""",
    "{when_unshown}",
)

MIGRATIONS: Sequence[Sequence[str]] = (FIRST, TRAILS, SHARES, MEDIA)
VERSION = len(MIGRATIONS)


def steps(version: int, dialect: Dialect) -> list[str]:
    """Return the statements that migrate the tables from `version` to the current one."""
    return [sql.format_map(dialect) for migration in MIGRATIONS[version:] for sql in migration]
