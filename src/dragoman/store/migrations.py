"""The tables, as the steps that lead to them. A step that was released is never changed; a new one is added.

What the databases call differently stands in braces: `{serial}`, a key that counts upwards, and `{blob}`.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Dialect: TypeAlias = Mapping[str, str]
SQLITE: Dialect = {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "blob": "BLOB"}
POSTGRES: Dialect = {"serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "blob": "BYTEA"}

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

MIGRATIONS: Sequence[Sequence[str]] = (FIRST, TRAILS, SHARES)
VERSION = len(MIGRATIONS)


def steps(version: int, dialect: Dialect) -> list[str]:
    """The statements that lead from the tables of `version` to those of today."""
    return [sql.format_map(dialect) for migration in MIGRATIONS[version:] for sql in migration]
