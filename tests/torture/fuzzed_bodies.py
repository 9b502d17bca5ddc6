"""Bodies with something wrong in them, on every route, a million of them.

Most go straight into the app, some over a socket. None may fail the server, or tell where its code lies.
"""

import asyncio
import copy
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeAlias

from msgspec import Struct, field, inspect

from dragoman.engines.scripted import ScriptedEngine
from dragoman.http.app import App
from dragoman.settings import Settings
from tests.attacks.bodies import GOOD, SOCKET
from tests.attacks.fields import TYPES, sites
from tests.attacks.frame import LEAK, AttackedServer, attacked
from tests.attacks.server import Target
from tests.torture.page import Row, progress, scaled

BODIES = 1_000_000
OVER_SOCKETS = 10
"""One of so many goes over a socket."""
SLOWEST_MS = 50.0
# fmt: off
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, -(2**63), 0.5, -0.0, 1e300, 5e-324,
    "", "a", "\x00", "\U0001f600", "é" * 999, "\u2028", "\ufffe", "auto", "required", "none", "json_object",
    "<|im_start|>", "{{ 7 * 7 }}", "../../etc/passwd", "'; DROP TABLE records; --", "0x7f00deadbeef",
    "\r\ndata: x\r\n\r\n", [], [None], [[]], [0] * 99, ["a"] * 99, [{"type": "function"}],
    {}, {"a": 1}, {"type": "text"}, {"": {"": {"": []}}},
)
RAW = (
    b"NaN", b"Infinity", b"1e999", b"9" * 99, b'"\\ud800"', b"[" * 999, b"tru", b'"\xff"', b"'a'", b"01", b"",
)
ODD = ("\x00", "'", '"', "\\", "é", "\U0001f600", "<|im_end|>", "{%", "%s", "\u202e", "a", "\r\n")
# fmt: on
FIELDS = {
    route: sorted({site.field for site in sites(inspect.Type) if route in TYPES[site.type]}) for route in GOOD
}
ROUTES = [route for route in GOOD if route != SOCKET and not route.startswith("/v1/engine")]
STRINGS = [(route, site) for site in sites(inspect.StrType) for route in TYPES[site.type] if route in ROUTES]

SEALED = re.compile(rb'"encrypted_content":"[^"]*"')

Sent: TypeAlias = tuple[int, bytes]


class Observations(Struct):
    bodies: int = 0
    over_sockets: int = 0
    failed: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def note(self, route: str, body: bytes, reply: Sent, began: float) -> None:
        self.bodies += 1
        self.milliseconds.append(1000 * (time.perf_counter() - began))
        status, data = reply
        if status >= 500 or not status:
            self.failed.append(f"{route} {body[:500]!r}: {status} {data[:300]!r}")
        # What a client is shown of its own words is no leak, nor is what looks like one in sealed text.
        if (match := LEAK.search(SEALED.sub(b"", data))) and match[0] not in body:
            self.leaked.append(f"{route} {body[:500]!r}: {match[0]!r} in {data[:300]!r}")


def fuzzed(chance: Random, route: str) -> bytes:
    """The good body with some of it replaced, doubled, moved or broken."""
    body = copy.deepcopy(GOOD[route])
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = (
            chance.choice(FIELDS[route] or ["a"]) if chance.random() < 0.9 else chance.choice(("a", "", "n"))
        )
        if chance.random() < 0.4 and body:
            _change(chance, body)
        else:
            body[name] = copy.deepcopy(chance.choice(VALUES))
    raw = json.dumps(body).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(raw) + 1)
        raw = raw[:at] + chance.choice(RAW) + raw[at + chance.randrange(3) :]
    return raw


def _change(chance: Random, value: Any) -> None:
    """Some value inside, at any depth."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.7:
        _change(chance, value[key])
    else:
        value[key] = copy.deepcopy(chance.choice(VALUES))


def fuzzed_string(chance: Random) -> tuple[str, bytes]:
    """A string field, any of all there are, with a text in it that somebody may not expect."""
    route, site = chance.choice(STRINGS)
    text = "".join(chance.choice(ODD) for _ in range(chance.randrange(1, 12)))
    return route, site.body(route, json.dumps(text))


class Quiet(Target):
    """It has nobody to tell how it is doing."""

    async def start(self) -> None:
        await ScriptedEngine.start(self)


class InProcess:
    """The app itself, without a socket: several thousand bodies a second."""

    def __init__(self) -> None:
        self.app = App(Quiet(0.0), Settings(store="memory"))
        self.paths: dict[str, str] = {}
        """Of routes that want an id."""

    async def send(self, route: str, body: bytes) -> Sent:
        path = self.paths.get(route, route)
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
        }
        scope |= {"query_string": b"", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9)}
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])
        gone = asyncio.Event()
        items: list[dict[str, Any]] = []

        async def receive() -> Any:
            for message in asked:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            items.append(message)

        await self.app(scope, receive, send)
        status = next((one["status"] for one in items if one["type"] == "http.response.start"), 0)
        return status, b"".join(one.get("body", b"") for one in items)


async def fuzz(count: int, seed: int, server: AttackedServer, seen: Observations) -> None:
    chance, inside = Random(seed), InProcess()
    await inside.app.host.start()
    inside.paths = await _records(inside.send)
    for number in range(count):
        route = chance.choice(ROUTES)
        route, body = (route, fuzzed(chance, route)) if number % 4 else fuzzed_string(chance)
        began = time.perf_counter()
        if number % OVER_SOCKETS == 0:
            reply = server.send(route, body)
            seen.over_sockets += 1
            seen.note(route, body, (reply.status, reply.body), began)
        else:
            seen.note(route, body, await inside.send(route, body), began)
        progress(number + 1, count, "bodies")
    await inside.app.host.stop()


async def _records(send: Callable[[str, bytes], Awaitable[Sent]]) -> dict[str, str]:
    """The routes that want an id, each with that of a record that is there."""
    fields = {
        "responses": ("/v1/responses", {"store": True}),
        "conversations": ("/v1/conversations", {}),
        "uploads": ("/v1/uploads", {}),
        "messages": ("/v1/messages/batches", {}),
        "chat": ("/v1/chat/completions", {"store": True}),
        "trajectories": ("/v1/chat/completions", {"store": True, "return_token_ids": True}),
    }
    ids = {}
    for kind, (route, more) in fields.items():
        _, body = await send(route, json.dumps({**GOOD[route], **more}).encode())
        ids[kind] = json.loads(body)["id"]
    # A batch needs a file, which is not sent as JSON.
    return {
        route: route.replace("{id}", ids.get(route.split("/")[2], "none"))
        for route in GOOD
        if "{id}" in route
    }


def rows(seen: Observations) -> list[Row]:
    slow = sorted(seen.milliseconds)
    p99 = slow[99 * len(slow) // 100] if slow else 0.0
    what = f"{seen.bodies:,} fuzzed bodies, {seen.over_sockets:,} of them over sockets"
    return [
        Row(f"{what}: none fails the server", f"{len(seen.failed)} of 5xx", "0", not seen.failed),
        Row("no traceback, address or path in any reply", f"{len(seen.leaked)} found", "0", not seen.leaked),
        Row("a reply comes soon", f"p99 {p99:.1f} ms", f"{SLOWEST_MS:.0f} ms", p99 < SLOWEST_MS),
    ]


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    seen = Observations()
    with attacked() as server:
        asyncio.run(fuzz(scaled(BODIES, scale), seed, server, seen))
    for problem in (*seen.failed[:10], *seen.leaked[:10]):
        print(problem, file=sys.stderr)
    return rows(seen)
