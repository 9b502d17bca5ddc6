"""What is stored, as structs and as tables, and what an operation on it is."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, field

# Records (responses and chat completions), conversations, and the items of both. Bodies are JSON that the
# store keeps and gives back as it got it, without looking inside.


T = TypeVar("T")
Kind: TypeAlias = Literal["response", "chat", "trajectory"]
LONGEST_ID = 512
"""Characters of an id; PostgreSQL cannot index what is much longer."""


class StoredItem(Struct, frozen=True):
    """One item of an input, an output or a conversation, or one message of a chat."""

    id: str
    body: bytes
    trail: bytes = b""
    """The ids that the model sampled up to it, as `turns` packs them; with the last item of an answer."""
    shown: int = 0
    """How many bytes of the body are pictures and sounds, in base64."""
    media: Mapping[str, bytes] = field(default_factory=dict)
    """Inside of the store: what the body has marks for, by digests."""


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
    inputs: tuple[StoredItem, ...] = ()
    outputs: tuple[StoredItem, ...] = ()
    events: bytes = b""
    """The log of the stream. It is read back only where it is asked for."""


class StoredConversation(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    created_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    version: int = 0
    """Grows with every change of the items."""


class LineFault(Struct, frozen=True):
    """What is wrong with a line of a batch; without a line, with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(Struct, frozen=True, kw_only=True):
    """Many requests that nobody waits for. Times are seconds."""

    id: str
    kind: str
    """Which API it was asked for in."""
    owner: str
    endpoint: str
    window: str
    status: str
    created_at: int
    expires_at: int
    input_file: str | None = None
    metadata: dict[str, str] | None = None
    keep_s: int | None = None
    """How long what it made is kept."""
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    undone: int = 0
    """Lines that were not asked before it ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    faults: tuple[LineFault, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    ends: str | None = None
    """The state that it ends in, once that is certain and only its files are still to be made."""
    at: dict[str, int] = field(default_factory=dict)
    """When it came into each of its states."""


class Append(Struct, frozen=True):
    """Items to add to a conversation, if its version is still this; None stands for any."""

    conversation: str
    version: int | None
    items: tuple[StoredItem, ...]


class Most(Struct, frozen=True, kw_only=True):
    """How much may be read for one request. It is compared with what is there before any of it is read."""

    items: int
    bytes: int
    """Of their bodies, without what they show."""
    shown: int = 2**62
    """Of what they show."""


class Chain(Struct, frozen=True):
    """A response and those that it continues."""

    status: str
    """That of the response itself."""
    items: list[StoredItem]
    """All that was said in them, the oldest first."""


class Page(Struct, Generic[T]):
    """A piece of a list; with `has_more`, the id of its last entry is the cursor to the next.

    It has fewer entries than were asked for where more would be too many bytes.
    """

    data: list[T]
    has_more: bool


class StoreBounds(Struct, frozen=True, kw_only=True):
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
    bounds: StoreBounds


# An operation is a generator: it yields statements, is sent their rows, and returns its answer.
#
# So it is written once, in SQL that SQLite and PostgreSQL both know, and knows neither threads nor sockets:
# one driver runs it in a thread, the other awaits each statement. An operation runs in one transaction.

Row: TypeAlias = tuple[Any, ...]


class Query(Struct, frozen=True):
    """One statement; a `?` stands for each value."""

    sql: str
    values: tuple[Any, ...] = ()


class Many(Struct, frozen=True):
    """One statement, once for each row of values. It gives no rows back."""

    sql: str
    rows: Sequence[tuple[Any, ...]]


Statement: TypeAlias = Query | Many
Operation: TypeAlias = Generator[Statement, list[Row], T]


def marks(values: Sequence[object]) -> str:
    """`marks("abc")` is `?, ?, ?`: the right side of an IN."""
    return ", ".join("?" * len(values))


# The tables, as the steps that lead to them. A step that was released is never changed; a new one is added.
#
# What the databases call differently stands in braces: `{serial}`, a key that counts upwards,
# `{blob}`, and `{when_unshown}`, a trigger.


Dialect: TypeAlias = Mapping[str, str]
# What nothing shows any more goes.
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
    # `events` is the last column: SQLite goes through a row from its start, and few readers want them.
    """CREATE TABLE records (
        seq {serial}, owner TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL, previous TEXT,
        instance TEXT NOT NULL, size BIGINT NOT NULL,
        metadata {blob} NOT NULL, body {blob} NOT NULL, events {blob} NOT NULL,
        UNIQUE (owner, kind, id))""",
    "CREATE INDEX records_in_order ON records (owner, kind, created_at, seq)",
    "CREATE INDEX records_by_age ON records (created_at)",
    "CREATE INDEX records_unfinished ON records (instance) WHERE status IN ('queued', 'in_progress')",
    # The pairs of the metadata once more, to be searched.
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
    # An item belongs to the input or the output of a record, or to a conversation.
    """CREATE TABLE items (
        seq {serial}, owner TEXT NOT NULL, id TEXT NOT NULL,
        record BIGINT REFERENCES records (seq) ON DELETE CASCADE,
        conversation BIGINT REFERENCES conversations (seq) ON DELETE CASCADE,
        part TEXT NOT NULL, body {blob} NOT NULL)""",
    "CREATE INDEX items_by_id ON items (owner, id)",
    "CREATE INDEX items_of_records ON items (record, part, seq) WHERE record IS NOT NULL",
    "CREATE INDEX items_of_conversations ON items (conversation, seq) WHERE conversation IS NOT NULL",
)

# The ids that were sampled, with the last item of an answer.
TRAILS = ("ALTER TABLE items ADD COLUMN trail {blob}",)

# What each owner has, and the oldest of it, without a look at the rows.
SHARES = (
    "CREATE INDEX records_of_owners ON records (owner, created_at, seq, size)",
    "CREATE INDEX conversations_of_owners ON conversations (owner, changed_at, seq, size)",
)

# Pictures and sounds, each once for an owner, and which items show them.
MEDIA = (
    "ALTER TABLE items ADD COLUMN shown BIGINT",
    """CREATE TABLE media (
        seq {serial}, owner TEXT NOT NULL, digest TEXT NOT NULL, size BIGINT NOT NULL, uses BIGINT NOT NULL,
        data {blob} NOT NULL, UNIQUE (owner, digest))""",
    # The row of media goes after those that name it, so it is no key of another table.
    """CREATE TABLE shown (
        item BIGINT NOT NULL REFERENCES items (seq) ON DELETE CASCADE, media BIGINT NOT NULL,
        PRIMARY KEY (item, media))""",
    "{when_unshown}",
)

MIGRATIONS: Sequence[Sequence[str]] = (FIRST, TRAILS, SHARES, MEDIA)
VERSION = len(MIGRATIONS)


def steps(version: int, dialect: Dialect) -> list[str]:
    """The statements that lead from the tables of `version` to those of today."""
    return [sql.format_map(dialect) for migration in MIGRATIONS[version:] for sql in migration]
