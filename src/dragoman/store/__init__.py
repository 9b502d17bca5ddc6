"""Durable storage of responses, conversations and chat completions: SQLite, memory or PostgreSQL."""

from dragoman.store.opening import open_store, store_of
from dragoman.store.records import (
    Append,
    Bounds,
    Chain,
    Conversation,
    Item,
    Most,
    Page,
    Record,
    Stats,
)
from dragoman.store.store import Store

__all__ = [
    "Append",
    "Bounds",
    "Chain",
    "Conversation",
    "Item",
    "Most",
    "Page",
    "Record",
    "Stats",
    "Store",
    "open_store",
    "store_of",
]
