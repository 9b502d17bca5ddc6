"""Items, references and chains of responses, for the routes of the Responses API."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import inspect

from dragoman.api.responses.items import KINDS
from tests.attacks.bodies import SOCKET
from tests.attacks.fields import sample
from tests.attacks.frame import AttackedServer
from tests.torture.battery.case import (
    LIMITS,
    MOST_NAMES,
    MOST_PARTS,
    MOST_TOKENS,
    Case,
    Shot,
    ask,
    changed,
    made,
    written,
)
from tests.torture.battery.chats import schemas, tool_sets

CREATE, COUNT, COMPACT = "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"
MOST = LIMITS.messages
FOR_REFERENCES = MOST_PARTS
"""Parts of a message that is referred to."""


def cases() -> Iterator[Case]:
    for route in (CREATE, SOCKET, COUNT, COMPACT):
        yield from _sizes(route)
        yield from _kinds(route)
    for route in (CREATE, COUNT, COMPACT):
        yield from _stored(route)
    yield from _fields(CREATE)


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def parts(count: int) -> list[dict[str, str]]:
    return [{"type": "input_text", "text": "a"}] * count


def _sizes(route: str) -> Iterator[Case]:
    every = MOST_PARTS
    for what, value in (
        (f"{every:,} parts of one message", lambda: [message(parts(every))]),
        (f"{every:,} parts of 1,000 messages", lambda: [message(parts(every // 1000))] * 1000),
        ("300,000 parts of one message", lambda: [message(parts(300_000))]),
        (f"{MOST} messages of 2,000 characters", lambda: [message("a" * 2000)] * MOST),
        (f"{MOST + 1} messages", lambda: [message("a")] * (MOST + 1)),
        ("300,000 messages", lambda: [message("a")] * 300_000),
        ("8 MB of text", lambda: "a" * (LIMITS.content_chars - 1)),
        ("a message of 8 MB", lambda: [message("a" * (LIMITS.content_chars - 1))]),
        (f"{MOST} references that are unknown", lambda: [_reference(f"msg_{n}") for n in range(MOST)]),
        (f"{MOST} references to one that is unknown", lambda: [_reference("msg_a")] * MOST),
        ("names of 1,000 characters", lambda: [_reference(f"{n:05}" * 200) for n in range(MOST)]),
        ("calls and outputs", lambda: _calls(MOST // 2)),
        ("outputs of many parts", lambda: _calls(4, parts(MOST_PARTS // 4))),
        ("thoughts", lambda: [_thought(3)] * (MOST - 1) + [message("a")]),
        (f"{every:,} thoughts of one item", lambda: [_thought(every), message("a")]),
        ("sealed thoughts", lambda: [_sealed()] * (MOST - 1) + [message("a")]),
        ("one sealed thought of 15 MB", lambda: [_sealed(15 << 20)]),
        ("an item with 60,000 fields", lambda: [{**message("a"), **{f"x{n}": 1 for n in range(60_000)}}]),
    ):
        yield changed(route, f"input: {what}", lambda g: {"input": g()}, value)
    for truncated in (1000, MOST):
        yield changed(
            route,
            f"{truncated} messages, and what does not fit left out",
            lambda n: {"input": [message(f"{at} " * 300) for at in range(n)], "truncation": "auto"},
            truncated,
        )
    yield changed(
        route,
        "100 messages of many parts, and what does not fit left out",
        lambda: {"input": [message(parts(MOST_PARTS // 100)) for _ in range(100)], "truncation": "auto"},
    )


def _kinds(route: str) -> Iterator[Case]:
    """Every kind of item that there is, as often as it may be there."""
    for name, kind in KINDS.items():
        item = {"type": name, **_sample(kind.reader.decoder.type)}
        yield changed(
            route,
            f"{MOST - 1} times {name}",
            lambda i: {"input": [{**i, "id": f"i_{n}"} for n in range(MOST - 1)] + [message("a")]},
            item,
        )
        yield changed(
            route,
            f"{name} with a field of {MOST_NAMES:,} values",
            lambda i: {"input": [{**i, "action": {"a": [{}] * MOST_NAMES}}, message("a")]},
            item,
        )


def _sample(type_: type) -> dict[str, Any]:
    fields: dict[str, Any] = sample(inspect.type_info(type_))
    return fields


def _reference(id_: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id_}


def _calls(count: int, output: Any = "a") -> list[dict[str, Any]]:
    return [
        one
        for at in range(count)
        for one in (
            {"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{at}", "output": output},
        )
    ]


def _thought(count: int) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}] * count}


def _sealed(size: int = 2000) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": "a" * size}


def _stored(route: str) -> Iterator[Case]:
    """Contexts that lie in the store already, so that a small request is enough."""
    yield _referring(
        route, f"{MOST // 4} references to a message of {FOR_REFERENCES:,} parts", FOR_REFERENCES, MOST // 4
    )
    yield _referring(route, f"{MOST} references to a message of one part", 1, MOST)
    yield _referring(route, "10 references to a message of a tenth of that", MOST_PARTS // 10, 10)
    for name, build in (
        ("a conversation of 4,000 items", _conversation(4000, 1)),
        ("a conversation of 4,000 items of 4 parts", _conversation(4000, 4)),
        ("a conversation of 5,000 items", _conversation(5000, 1)),
        ("a conversation of one message of many parts", _conversation(1, MOST_PARTS)),
    ):
        for truncation in ("disabled", "auto"):
            yield _prepared(
                route,
                f"{name}, truncation {truncation}",
                lambda server, b, t: {"conversation": b(server), "truncation": t},
                build,
                truncation,
            )
    yield _prepared(
        route,
        f"a conversation of 4,900 items and {MOST} unknown references",
        lambda server: {
            "conversation": _conversation(4900, 1)(server),
            "input": [_reference(f"msg_{n}") for n in range(MOST)],
        },
    )
    yield _prepared(
        route, "a chain of 300 responses", lambda server: {"previous_response_id": _chain(server, 300)}
    )
    yield _prepared(
        route,
        "a response to many parts",
        lambda server: {
            "previous_response_id": made(
                server, CREATE, {"input": [message(parts(MOST_PARTS))], "max_output_tokens": 8}
            )["id"]
        },
    )


def _prepared(route: str, name: str, body: Callable[..., dict[str, Any]], *given: Any) -> Case:
    def ready(server: AttackedServer) -> Shot:
        raw = written(
            {"model": "parrot", "input": "hi", "max_output_tokens": 8, "store": False, **body(server, *given)}
        )
        return lambda: ask(server, "POST", route, raw)

    return Case(f"POST {route}", name, ready)


def _referring(route: str, name: str, size: int, count: int) -> Case:
    def body(server: AttackedServer) -> dict[str, Any]:
        path = f"/v1/conversations/{made(server, '/v1/conversations', {})['id']}/items"
        kept = made(server, path, {"items": [message(parts(size))]})["data"][0]["id"]
        return {"input": [_reference(kept)] * count}

    return _prepared(route, name, body)


def _conversation(count: int, size: int) -> Callable[[AttackedServer], str]:
    """One with so many items of so many parts; made once for a server."""

    def build(server: AttackedServer) -> str:
        kept = _KEPT.setdefault(server.url, {})
        if (count, size) not in kept:
            id_ = made(server, "/v1/conversations", {})["id"]
            for at in range(0, count, 20):
                items = [message(parts(size))] * min(20, count - at)
                made(server, f"/v1/conversations/{id_}/items", {"items": items})
            kept[count, size] = id_
        return kept[count, size]

    return build


_KEPT: dict[str, dict[tuple[int, int], str]] = {}


def _chain(server: AttackedServer, count: int) -> str:
    last: str | None = None
    for _ in range(count):
        body = {"input": "hi", "max_output_tokens": 8, **({"previous_response_id": last} if last else {})}
        last = made(server, CREATE, body)["id"]
    assert last is not None
    return last


def _fields(route: str) -> Iterator[Case]:
    for what, tools in tool_sets():
        flat = [{"type": "function", **tool.get("function", {})} for tool in tools]
        yield changed(route, what, lambda t: {"tools": t}, flat)
        yield changed(route, f"a namespace of {what}", lambda t: {"tools": [_space("s", t)]}, flat)
    yield changed(route, "512 namespaces", lambda: {"tools": [_space(f"s{n}", []) for n in range(512)]})
    yield changed(
        route,
        "allowed tools",
        lambda: {
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}] * (MOST_NAMES // 2),
            },
        },
    )
    for what, schema in schemas():
        yield changed(
            route,
            f"schema: {what}",
            lambda s: {"text": {"format": {"type": "json_schema", "name": "a", "schema": s}}},
            schema,
        )
    yield changed(route, "instructions of 8 MB", lambda: {"instructions": "a" * (LIMITS.content_chars - 1)})
    for streams, stores in ((False, False), (False, True), (True, False), (True, True)):
        yield changed(
            route,
            f"a long answer with everything said of it, stream: {streams}, store: {stores}",
            lambda stream, store: {
                "input": "ab" * (MOST_TOKENS // 2),
                "max_output_tokens": MOST_TOKENS,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": LIMITS.logprobs,
                "stream": stream,
                "store": store,
            },
            streams,
            stores,
        )
    yield changed(route, "a long answer", lambda: {"input": "ab" * 100_000, "max_output_tokens": 200_000})


def _space(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "a", "tools": tools}
