"""Files, uploads in parts and batches: what is received, listed, given back and worked on."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.attacks.bodies import good
from tests.attacks.frame import AttackedServer
from tests.torture.battery.case import Case, Shot, ask, changed

FILES, UPLOADS, BATCHES, MESSAGES = "/v1/files", "/v1/uploads", "/v1/batches", "/v1/messages/batches"
BOUNDARY = "b" * 60
EIGHT_MB = 8_000_000
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def cases() -> Iterator[Case]:
    for name, body in (
        ("8 MB", _form(b"a" * EIGHT_MB)),
        ("8 MB that are nearly the boundary", _form((b"\r\n--" + BOUNDARY[:-1].encode()) * 120_000)),
        ("a name of 60,000 characters", _form(b"a", name="a" * 60_000)),
        ("100,000 lines of a batch", _form(b'{"custom_id": "a"}\n' * 100_000, purpose="batch")),
    ):
        yield Case(f"POST {FILES}", name, _sends(FILES, body))
    yield from _kept()
    yield from _in_parts()
    yield from _batches()


def _form(content: bytes, name: str = "a.txt", purpose: str = "user_data") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
    file = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    return (head + file).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def _sends(path: str, body: bytes) -> Callable[[AttackedServer], Shot]:
    return lambda server: lambda: ask(server, "POST", path, body, FORM)


def _upload(server: AttackedServer, content: bytes, purpose: str = "user_data") -> str:
    fields: dict[str, Any] = {"data": {"purpose": purpose}, "files": {"file": ("a.jsonl", content)}}
    reply = httpx.post(server.url + FILES, headers=server.client.headers, timeout=120, **fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def _kept() -> Iterator[Case]:
    for method, more in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        yield Case(f"{method} {FILES}/{{id}}{more}", "8 MB", _of_file(method, more))
    yield Case(f"GET {FILES}", "as it is", lambda server: lambda: ask(server, "GET", f"{FILES}?limit=100"))


def _of_file(method: str, more: str) -> Callable[[AttackedServer], Shot]:
    def ready(server: AttackedServer) -> Shot:
        path = f"{FILES}/{_upload(server, b'a' * EIGHT_MB)}{more}"
        return lambda: ask(server, method, path)

    return ready


def _in_parts() -> Iterator[Case]:
    yield changed(UPLOADS, "a name of 8 MB", lambda: {"filename": "a" * EIGHT_MB})
    yield changed(f"{UPLOADS}/{{id}}/complete", "300,000 parts", lambda: {"part_ids": ["part_1"] * 300_000})
    yield changed(f"{UPLOADS}/{{id}}/cancel", "as it is", dict)
    part = _form(b"a" * EIGHT_MB).replace(b'name="file"', b'name="data"')

    def ready(server: AttackedServer) -> Shot:
        path = server.path(f"{UPLOADS}/{{id}}/parts")
        return lambda: ask(server, "POST", path, part, FORM)

    yield Case(f"POST {UPLOADS}/{{id}}/parts", "8 MB", ready)


def _batches() -> Iterator[Case]:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "a", "max_tokens": 1},
    }

    def ready(server: AttackedServer) -> Shot:
        lines = b"".join(json.dumps({**line, "custom_id": f"{n}"}).encode() + b"\n" for n in range(50_000))
        body = {**good(BATCHES), "input_file_id": _upload(server, lines, "batch")}
        return lambda: ask(server, "POST", BATCHES, json.dumps(body).encode())

    yield Case(f"POST {BATCHES}", "50,000 lines", ready)
    many = [{"custom_id": f"{n}", "params": good("/v1/messages")} for n in range(20_000)]
    yield changed(MESSAGES, "20,000 requests", lambda: {"requests": many})
    for param in (BATCHES, MESSAGES):
        yield _asked("GET", param, "")
        yield _asked("GET", f"{param}/{{id}}", "")
        yield changed(f"{param}/{{id}}/cancel", "as it is", dict)
    yield _asked("GET", f"{MESSAGES}/{{id}}/results", "")
    yield _asked("DELETE", f"{MESSAGES}/{{id}}", "")


def _asked(method: str, route: str, query: str) -> Case:
    def ready(server: AttackedServer) -> Shot:
        path = server.path(route) + query
        return lambda: ask(server, method, path)

    return Case(f"{method} {route}", "as it is", ready)
