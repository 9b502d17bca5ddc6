"""Requests that take none of the engine's time: no flood of them is in the way of another key's answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.attacks.bodies import good
from tests.attacks.doors import KEY, OTHER_KEY
from tests.attacks.frame import AttackedServer, Frame, attacked

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
LOOKING = 8
FLOOD = 12
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
BIG: dict[str, dict[str, Any]] = {
    TOKENIZE: {"prompt": "hello " * 100_000},
    "/parse/function_call": {"text": "<tool_call>" * 10_000, "tool_call_parser": "hermes"},
}


@pytest.fixture(scope="module")
def looked_at() -> Iterator[AttackedServer]:
    with attacked(api_key=[KEY, OTHER_KEY], limits={"looking": LOOKING}) as server:
        yield server


def asked(server: AttackedServer, key: str, route: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + route, json=body, headers=headers, timeout=120)


@contextmanager
def flooded(server: AttackedServer, route: str) -> Iterator[list[httpx.Response]]:
    """One key asks for more than its share at once; the replies are there when the block is over."""
    replies: list[httpx.Response] = []
    with ThreadPoolExecutor(FLOOD) as pool:
        flood = [pool.submit(asked, server, KEY, route, BIG[route]) for _ in range(FLOOD)]
        # Once one is refused, all places of the key are taken.
        next(each for each in as_completed(flood) if each.result().status_code == 429)
        yield replies
    replies += [each.result() for each in flood]


@pytest.mark.parametrize("route", BIG)
def test_a_flood_of_looks_is_refused_and_another_key_answered(looked_at: AttackedServer, route: str) -> None:
    constrained = {**good(CHAT), "guided_json": SCHEMA}
    with flooded(looked_at, route) as replies:
        for body in (good(CHAT), constrained):
            assert asked(looked_at, OTHER_KEY, CHAT, body).status_code == 200
        assert asked(looked_at, OTHER_KEY, TOKENIZE, {"prompt": "a"}).status_code == 200
    refused = [reply for reply in replies if reply.status_code == 429]
    assert {reply.status_code for reply in replies} == {200, 429}
    assert all(1 <= int(reply.headers["retry-after"]) <= 30 for reply in refused)
    assert {reply.json()["error"]["code"] for reply in refused} == {"overloaded"}


def test_a_text_of_more_tokens_than_anybody_uses_is_refused(frame: Frame) -> None:
    error = frame.refused(TOKENIZE, {"prompt": "a" * (2 << 20)}, status=(400,))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "body",
    [
        {"a" * (8 << 20): 1},
        {"messages": [{"role": "c" * (8 << 20), "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "d" * (8 << 20)}]}]},
        {"model": "e" * (8 << 20), "prompt_token_ids": [1]},
    ],
    ids=["field", "role", "type", "model"],
)
def test_an_error_quotes_little_of_what_was_sent(frame: Frame, body: dict[str, Any]) -> None:
    error = frame.refused(CHAT, body, status=(400, 404))
    assert len(error["message"]) + len(error["param"] or "") < 1000
