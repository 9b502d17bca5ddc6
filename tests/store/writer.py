"""Saves records into a folder for ever, several at a time, and says the id of each that is acknowledged."""

import asyncio
import sys
from itertools import count
from pathlib import Path

from dragoman.store import ConversationAppend, StoreLimits
from dragoman.store.sqlite import SqliteStore
from tests.store.samples import conversation, item, record


async def write(store: SqliteStore, run: str, lane: int) -> None:
    name = f"{run}-{lane}"
    await store.create_conversation(conversation(name))
    for n in count():
        id = f"{name}-{n}"
        saved = record(id, inputs=(item(id),), body=b"x" * 3000, events=b"event" * 100)
        await store.save(saved, ConversationAppend(name, n, (item(id),)))
        print(id, flush=True)


async def main(folder: str, run: str) -> None:
    store = SqliteStore(Path(folder), StoreLimits())
    await store.open()
    await asyncio.gather(*(write(store, run, lane) for lane in range(4)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
