"""One request that is as large as it may be in one dimension, and how it is sent."""

import http.client
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.limits import Limits
from tests.attacks.bodies import SOCKET, good
from tests.attacks.frame import PAUSE, RESUME, AttackedServer

LIMITS = Limits()
MOST_BYTES = LIMITS.body_bytes - 4096
"""Of what is put into a body, with something left for the rest of it."""
MOST_VALUES = LIMITS.json_values - 1024
MOST_NAMES = min(LIMITS.json_names, LIMITS.json_lists) - 1024
MOST_PARTS = min(LIMITS.content_parts, MOST_NAMES // 2)
MOST_TOKENS = LIMITS.told_logprobs // (1 + LIMITS.logprobs)
"""Of an answer that has as many alternatives as there may be."""

Shot: TypeAlias = Callable[[], int]
"""Sends it and reads all that comes; gives the status."""


class Case(Struct, frozen=True):
    route: str
    """`POST /v1/chat/completions`."""
    name: str
    """The dimension: `messages[0].content: 340,000 parts`."""
    ready: Callable[[AttackedServer], Shot]
    """Makes the body and what has to be there before. What it returns is what is measured."""


def posted(route: str, name: str, make: Callable[..., Any], *given: Any) -> Case:
    """`make(*given)` is the body, as bytes or as what is to be written as JSON. Not before it is needed."""

    def ready(server: AttackedServer) -> Shot:
        raw = written(make(*given))
        if route == SOCKET:
            return lambda: server.send(SOCKET, raw).status
        path = server.path(route)
        return lambda: ask(server, "POST", path, raw)

    return Case(route if route == SOCKET else f"POST {route}", name, ready)


def changed(route: str, name: str, more: Callable[..., dict[str, Any]], *given: Any) -> Case:
    """The good body with the fields of `more(*given)`, which are large."""
    return posted(route, name, lambda: {**good(route), **more(*given)})


def ask(
    server: AttackedServer,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> int:
    """By a connection of its own, because a server may close it after a refusal."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
    named = {"content-type": "application/json", **(headers or {})}
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # It was refused while it was sent.
            connection.request(method, path, body, named)
        reply = connection.getresponse()
        while reply.read(1 << 20):
            pass
        if path == PAUSE:
            # What comes after it is not to wait for ever.
            server.client.post(RESUME)
        return reply.status
    except (http.client.HTTPException, ConnectionResetError):
        return 0
    finally:
        connection.close()


def made(server: AttackedServer, path: str, body: Any) -> dict[str, Any]:
    """What a request gives that must be answered."""
    reply = server.client.post(path, content=written(body), headers={"content-type": "application/json"})
    assert reply.status_code == 200, (path, reply.status_code, reply.text[:300])
    fields: dict[str, Any] = reply.json()
    return fields


def written(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
