"""What is in the store, as large as it can be, asked for, listed, changed and deleted."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.attacks.frame import AttackedServer
from tests.torture.battery.case import MOST_PARTS, Case, Shot, ask, changed, made, written
from tests.torture.battery.items import message, parts

CONVERSATIONS, RESPONSES, CHATS = "/v1/conversations", "/v1/responses", "/v1/chat/completions"
LONG = "a" * 900_000
"""A text that a context of a million tokens holds."""
HUGE = "a" * (8_000_000)
MANY = MOST_PARTS
OTHERS = ("/api/tags", "/api/ps", "/api/version", "/api/hello")


def cases() -> Iterator[Case]:
    yield from _written()
    for name, items in (
        ("one item of 8 MB", [message(HUGE)]),
        (f"one item of {MANY:,} parts", [message(parts(MANY))]),
        ("100 items of many parts", [message(parts(MANY))] * 100),
        ("100 items of 700 KB", [message("a" * 700_000)] * 100),
    ):
        yield from _conversation(name, items)
    for name, value in (("900,000 characters", LONG), ("many parts", parts(MANY - 1))):
        yield from _response(name, [message(value)])
        yield from _chat(name, value)
    yield from _answers()
    yield from _small()
    yield from _adapters()


def _written() -> Iterator[Case]:
    items = {
        "20 items of many parts": [message(parts(MANY // 20))] * 20,
        "one item of 8 MB": [message(HUGE)],
        f"one item of {MANY:,} parts": [message(parts(MANY))],
        "20 items with 3,000 fields": [{**message("a"), **{f"x{n}": 1 for n in range(3_000)}}] * 20,
        "20 calls of 60,000 values": [
            {"type": "web_search_call", "action": {"a": [{}] * 3_000}} for _ in range(20)
        ],
        "21 items": [message("a")] * 21,
    }
    for route in (CONVERSATIONS, f"{CONVERSATIONS}/{{id}}/items"):
        for name, rows in items.items():
            yield changed(route, name, lambda g: {"items": g}, rows)


def _conversation(name: str, items: list[dict[str, Any]]) -> Iterator[Case]:
    def build(server: AttackedServer) -> tuple[str, str]:
        id_ = made(server, CONVERSATIONS, {})["id"]
        last = ""
        for item in items:
            last = made(server, f"{CONVERSATIONS}/{id_}/items", {"items": [item]})["data"][0]["id"]
        return f"{CONVERSATIONS}/{id_}", last

    def at(more: str) -> Callable[[AttackedServer], str]:
        return lambda server: "{}{}".format(*_filled(build(server), more))

    param = CONVERSATIONS + "/{id}"
    yield _asked("GET", param, name, at(""))
    yield _asked("GET", f"{param}/items", name, at("/items?limit=100"))
    yield _asked("GET", f"{param}/items/{{item_id}}", name, at("/items/{}"))
    yield _asked("DELETE", f"{param}/items/{{item_id}}", name, at("/items/{}"))
    yield _asked("DELETE", param, name, at(""))
    yield _asked("POST", param, f"metadata of {name}", at(""), {"metadata": {"a": "b"}})


def _filled(kept: tuple[str, str], more: str) -> tuple[str, str]:
    param, last = kept
    return param, more.format(last)


def _response(name: str, given: Any) -> Iterator[Case]:
    def build(server: AttackedServer) -> str:
        body = {"input": given, "max_output_tokens": 8, "metadata": {"a": "b"}}
        return f"{RESPONSES}/{made(server, RESPONSES, body)['id']}"

    param = RESPONSES + "/{id}"
    yield _asked("GET", param, name, build)
    yield _asked("GET", param, f"{name}, as a stream", lambda server: build(server) + "?stream=true")
    yield _asked("GET", f"{param}/input_items", name, lambda server: build(server) + "/input_items?limit=100")
    yield _asked("POST", f"{param}/cancel", name, lambda server: build(server) + "/cancel", {})
    yield _asked("DELETE", param, name, build)


def _answers() -> Iterator[Case]:
    """Long answers, with everything that can be said of their tokens."""

    def response(server: AttackedServer) -> str:
        body = {
            "input": "ab" * 10_000,
            "max_output_tokens": 20_000,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 20,
            "stream": True,
        }
        reply = server.client.post(RESPONSES, json=body)
        id_ = reply.text.split('"id":"', 1)[1].split('"', 1)[0]
        return f"{RESPONSES}/{id_}"

    param = RESPONSES + "/{id}"
    yield _asked("GET", param, "a long answer", response)
    yield _asked("GET", param, "a long log, from its start", lambda server: response(server) + "?stream=true")
    yield _asked(
        "GET",
        param,
        "a long log, from its end",
        lambda server: response(server) + "?stream=true&starting_after=19990",
    )
    yield _asked("DELETE", param, "a long answer", response)


def _chat(name: str, given: Any) -> Iterator[Case]:
    def build(server: AttackedServer) -> str:
        body = {
            "messages": [{"role": "user", "content": given}, {"role": "user", "content": "hi"}],
            "max_tokens": 8,
            "store": True,
            "return_token_ids": True,
            "metadata": {"a": "b"},
        }
        return str(made(server, CHATS, body)["id"])

    param = CHATS + "/{id}"
    yield _asked("GET", param, name, lambda server: f"{CHATS}/{build(server)}")
    yield _asked("GET", f"{param}/messages", name, lambda server: f"{CHATS}/{build(server)}/messages")
    yield _asked("POST", param, name, lambda server: f"{CHATS}/{build(server)}", {"metadata": {"a": "c"}})
    yield _asked("GET", CHATS, f"all, of {name}", lambda server: f"{CHATS}?limit=100&x={build(server)}")
    yield _asked("GET", "/v1/trajectories/{id}", name, lambda server: f"/v1/trajectories/{build(server)}")
    yield _asked(
        "POST",
        "/v1/trajectories/{id}",
        name,
        lambda server: f"/v1/trajectories/{build(server)}",
        {"rewards": {"a": 1.0}},
    )
    yield _asked("DELETE", param, name, lambda server: f"{CHATS}/{build(server)}")


def _small() -> Iterator[Case]:
    """Routes that have nothing to grow."""
    pages = ("/openapi.json", "/docs", "/")
    for path in (
        *pages,
        "/v1/models",
        *OTHERS,
        "/tokenizer_info",
        "/v1/mcp_servers",
        "/health",
        "/ready",
        "/metrics",
    ):
        yield _asked("GET", path, "as it is", path)
    yield _asked("GET", "/page/{name}", "its largest file", "/page/chat.js")
    yield _asked(
        "GET",
        "/v1/models/{model:path}",
        "a name of 60,000 characters",
        lambda server: "/v1/models/" + "a/" * 30_000,
    )
    yield _asked("POST", "/v1/engine/pause", "as it is", "/v1/engine/pause", {})
    yield _asked("POST", "/v1/engine/resume", "as it is", "/v1/engine/resume", {})
    yield _asked("DELETE", "/api/delete", "as it is", "/api/delete")
    yield _asked("GET", "/lora-adapters", "as it is", "/lora-adapters")


def _adapters() -> Iterator[Case]:
    """Scales of as many as a list may have, and names and paths that are long; a server without a folder for
    them refuses all."""
    scales = [{"id": number, "scale": 0.5} for number in range(100_000)]
    yield _asked("POST", "/lora-adapters", "100,000 scales", "/lora-adapters", scales)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "a" * 1_000_000}
        body |= {"lora_path": "a/" * 1_000_000} if "unload" not in path else {}
        yield _asked("POST", path, "long names", path, body)


def _asked(
    method: str, route: str, name: str, path: Callable[[AttackedServer], str] | str, body: Any = None
) -> Case:
    def ready(server: AttackedServer) -> Shot:
        text = path if isinstance(path, str) else path(server)
        raw = None if body is None else written(body)
        return lambda: ask(server, method, text, raw)

    return Case(f"{method} {route}", name, ready)
