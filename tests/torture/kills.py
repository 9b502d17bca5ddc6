"""A server that is killed while it stores answers: whatever it has acknowledged is there when it is back."""

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct, field

from dragoman.store.sqlite import FILE
from tests.attacks.frame import AttackedServer, attacked
from tests.attacks.raw_socket import replies
from tests.support.wire import RawReply, ask, request
from tests.torture.bleed import CHAT, RESPONSES
from tests.torture.page import Row, progress, scaled

KILLS = 100
CLIENTS = 8
LEAST, MOST = 10, 30
"""Answers that are acknowledged before a kill."""
PACE_S = 0.0005


class Observations(Struct):
    texts: dict[str, str] = field(default_factory=dict)
    """What each acknowledged record says, by its path."""
    interrupted: int = 0
    """Requests that were under way when a kill came."""
    lost: int = 0
    torn: int = 0
    """Records that say something else than was acknowledged."""
    damaged: int = 0
    """Databases that do not pass their check."""


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    kills = scaled(KILLS, scale)
    with tempfile.TemporaryDirectory() as folder:
        seen = killed(Path(folder), kills, seed)
    least, number = LEAST * kills, len(seen.texts)
    what = f"{kills} x SIGKILL while answers are stored"
    figure = f"{seen.lost} lost and {seen.torn} torn of {number:,}; {seen.interrupted:,} were under way"
    held = not seen.lost and not seen.torn and number >= least
    checks = f"{seen.damaged} of {kills} databases fail it"
    return [
        Row(f"{what}: what was acknowledged", figure, f"0 of at least {least:,}", held),
        Row(f"{what}: the integrity check", checks, "0", not seen.damaged),
    ]


def killed(folder: Path, kills: int, seed: int) -> Observations:
    """One server after the other over one database; the last is asked for all that was acknowledged."""
    seen, chance = Observations(), Random(seed)
    for number in range(kills):
        with attacked(store="sqlite", data_dir=str(folder), interval=PACE_S) as server:
            seen.texts |= asyncio.run(_until_killed(server, number, chance, seen))
        seen.damaged += not _sound(folder / FILE)
        progress(number + 1, kills, "kills")
    with attacked(store="sqlite", data_dir=str(folder)) as server:
        compare(server, seen.texts, seen)
    return seen


async def _until_killed(
    server: AttackedServer, number: int, chance: Random, seen: Observations
) -> dict[str, str]:
    """The texts of all that is acknowledged until the server is killed, in the middle of something."""
    fields: dict[str, str] = {}
    enough = asyncio.Event()
    wanted = chance.randint(LEAST, MOST)

    async def client(name: int) -> None:
        for turn in count():
            text = f"{number}-{name}-{turn}-" + "x" * chance.randrange(40)
            path, streams = chance.choice([CHAT, RESPONSES]), chance.random() < 0.5
            heard = await _asked(server.url, path, text, streams)
            id_ = acknowledged(path, heard, streams) if heard else None
            if id_ is None:
                # By the kill, or else something is wrong and there is no use in waiting.
                enough.set()
                seen.interrupted += 1
                return
            fields[f"{path}/{id_}"] = text
            if len(fields) >= wanted:
                enough.set()

    clients = [asyncio.create_task(client(name)) for name in range(CLIENTS)]
    await enough.wait()
    # Anywhere in the work of those that follow.
    await asyncio.sleep(chance.uniform(0, 0.05))
    server.process.kill()
    await asyncio.gather(*clients)
    return fields


async def _asked(url: str, path: str, text: str, streams: bool) -> RawReply | None:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"input": text}
    sent = request(url, path, {**asked, "store": True, "stream": streams})
    try:
        return await ask(url, sent, patience=120)
    except OSError:
        return None


def acknowledged(path: str, heard: RawReply, streams: bool) -> str | None:
    """The id of an answer whose end the client has read; None if it was cut off before."""
    if heard.status != 200:
        return None
    if not streams:
        whole = replies(heard.data)
        return str(json.loads(whole[0].body)["id"]) if whole else None
    # What follows the last empty line is not whole.
    events = [block.rpartition(b"data: ")[2] for block in heard.body.split(b"\n\n")[:-1]]
    bodies = [json.loads(event) for event in events if event.startswith(b"{")]
    if path == RESPONSES:
        done = [body["response"]["id"] for body in bodies if body["type"] == "response.completed"]
    else:
        done = [body["id"] for body in bodies for choice in body["choices"] if choice["finish_reason"]]
    return str(done[0]) if done else None


def compare(server: AttackedServer, texts: Mapping[str, str], seen: Observations) -> None:
    for path, text in texts.items():
        reply = server.client.get(path)
        seen.lost += reply.status_code == 404
        seen.torn += reply.status_code != 404 and _text(reply.json()) != text


def _text(body: dict[str, Any]) -> str | None:
    """What a stored answer says, if it is whole."""
    try:
        if "choices" in body:
            return str(body["choices"][0]["message"]["content"])
        return str(body["output"][0]["content"][0]["text"]) if body["status"] == "completed" else None
    except (KeyError, IndexError):
        return None


def _sound(file: Path) -> bool:
    with closing(sqlite3.connect(file)) as connection:
        whole = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return whole and not connection.execute("PRAGMA foreign_key_check").fetchall()
