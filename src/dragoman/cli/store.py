"""Inspect, compact or export the store of responses and conversations."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from dragoman.cli.exits import USAGE, CommandError
from dragoman.cli.parser import add_settings, read_settings
from dragoman.cli.terminal import Progress, size
from dragoman.logs import Colorizer
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.store import Stats, Store

T = TypeVar("T")
SUMMARY = "inspect, compact or export the store"
EXAMPLE = """\
examples:
  dragoman store stats
  dragoman store stats --json --data-dir /srv/dragoman
  dragoman store vacuum                        return free space to the file system
  dragoman store export -o everything.jsonl    one JSON line per record and conversation
  dragoman store export | jq .id

All actions work while a server runs. docs/store.md describes what is stored, where, and for how long.
"""
STDOUT = "-"
EVERY = 100
"""Lines between two updates of the progress line."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("stats", "vacuum", "export"), help="action")
    parser.add_argument("--json", action="store_true", help="stats: print JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=STDOUT,
        help="export: output file, instead of standard output",
    )
    add_settings(parser, ("store",))


def run(args: argparse.Namespace) -> int:
    settings = read_settings(args)
    if args.action == "stats":
        show(settings, asyncio.run(with_store(settings, lambda store: store.stats())), as_json=args.json)
    elif args.action == "vacuum":
        asyncio.run(with_store(settings, vacuum))
    else:
        asyncio.run(with_store(settings, lambda store: export(store, args.output)))
    return 0


async def with_store(settings: Settings, use: Callable[["Store"], Awaitable[T]]) -> T:
    from dragoman.store import folder_of, open_store
    from dragoman.store.sqlite import FILE

    if settings.store in ("memory", "none"):
        raise CommandError(f"store = {settings.store} stores nothing.", exit_code=USAGE)
    if settings.store == "sqlite" and not (folder_of(settings) / FILE).exists():
        raise CommandError(
            f"There is no store in {folder_of(settings)}.",
            "A server creates it; --data-dir selects another folder.",
        )
    # Without limits: only the server evicts records, by its own settings.
    store = open_store(settings.store, folder_of(settings))
    assert store is not None
    try:
        await store.open()
        return await use(store)
    finally:
        await store.close()


async def vacuum(store: "Store") -> None:
    before = await store.stats()
    await store.vacuum()
    after = await store.stats()
    print(f"{size(before.file_bytes)} on disk before, {size(after.file_bytes)} now")


async def export(store: "Store", output: str) -> None:
    if output == STDOUT:
        await _write_lines(store, sys.stdout.buffer)
        return
    with open_named(output) as file:
        await _write_lines(store, file)


def open_named(output: str) -> BinaryIO:
    """Open the output file, readable by its owner only: it contains conversations."""
    try:
        handle = os.open(Path(output).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}.", exit_code=USAGE) from error
    return os.fdopen(handle, "wb")


async def _write_lines(store: "Store", file: BinaryIO) -> None:
    progress, count = Progress(), 0
    async for line in store.export():
        file.write(line + b"\n")
        count += 1
        if count % EVERY == 0:
            progress.say(f"exported {count}")
    file.flush()
    progress.clear()


def show(settings: Settings, stats: "Stats", *, as_json: bool) -> None:
    if as_json:
        limits = {"max_bytes": settings.store_max_bytes, "max_age": settings.store_max_age}
        facts = msgspec.to_builtins(stats) | {"bounds": limits}
        print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
        return
    paint = Colorizer(sys.stdout)
    for name, text in rows(settings, stats):
        print(f"{paint('dim', name.ljust(16))}  {text}")


def rows(settings: Settings, stats: "Stats") -> list[tuple[str, str]]:
    oldest = (
        "-" if stats.oldest is None else f"{datetime.fromtimestamp(stats.oldest, UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
    return [
        ("responses", str(stats.counts["response"])),
        ("chat completions", str(stats.counts["chat"])),
        ("conversations", str(stats.counts["conversation"])),
        ("items", str(stats.counts["item"])),
        ("documents", size(stats.bytes)),
        ("on disk", f"{size(stats.file_bytes)}, of at most {size(settings.store_max_bytes)}"),
        ("oldest", f"{oldest}, kept for {settings.store_max_age / 86400:g} days"),
        ("tables", f"version {stats.schema_version}"),
    ]
