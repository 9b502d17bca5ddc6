"""Durable storage of responses, conversations and chat completions: SQLite, memory or PostgreSQL."""

from dragoman.store.opening import open_store, store_of
from dragoman.store.records import (
    Append,
    Chain,
    Most,
    Page,
    Record,
    Stats,
    StoreBounds,
    StoredConversation,
    StoredItem,
)
from dragoman.store.store import Store

__all__ = [
    "Append",
    "Chain",
    "Most",
    "Page",
    "Record",
    "Stats",
    "Store",
    "StoreBounds",
    "StoredConversation",
    "StoredItem",
    "open_store",
    "store_of",
]
