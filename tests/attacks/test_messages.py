"""What only Messages has: thinking that clients keep for us, and edits of a conversation."""

from typing import Any

import httpx
import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.attacks.bodies import good
from tests.attacks.frame import Frame
from tests.support.http import post
from tests.support.parrot import messages_of, parrot

PATH = "/v1/messages"
SECRET = "The password is mud."
HIDDEN = {"type": "adaptive", "display": "omitted"}
EDIT = {"type": "clear_tool_uses_20250919"}


def asked(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**good(PATH), "max_tokens": 200, "messages": [*messages], **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def send(url: str, key: str, body: dict[str, Any]) -> httpx.Response:
    return post(url, PATH, body, **{"x-api-key": key})


def test_what_was_sealed_for_one_key_says_nothing_to_another() -> None:
    engine, settings = parrot(), Settings(port=0, store="memory", api_key=["one", "two"])
    with background(engine, settings) as url:
        first = user(f"<think>\n{SECRET}\n</think>\nYes.")
        thought, text = send(url, "one", asked(first, thinking=HIDDEN)).json()["content"]
        assert (thought["thinking"], text["text"]) == ("", "Yes.")
        for kind in (thought, {"type": "redacted_thinking", "data": thought["signature"]}):
            fields = {"role": "assistant", "content": [kind, text]}
            assert send(url, "one", asked(user("hi"), fields, user("on"))).status_code == 200
            assert SECRET in str(messages_of(engine.jobs[-1]))
            assert send(url, "two", asked(user("hi"), fields, user("on"))).status_code == 200
            assert SECRET not in str(messages_of(engine.jobs[-1]))


def test_a_signature_is_of_one_text() -> None:
    settings = Settings(port=0, store="memory")
    with background(parrot(), settings) as url:
        first = user(f"<think>\n{SECRET}\n</think>\nYes.")
        thought, text = send(url, "", asked(first)).json()["content"]
        fields = {"role": "assistant", "content": [{**thought, "thinking": "Another."}, text]}
        assert send(url, "", asked(user("hi"), fields, user("on"))).status_code == 400
        bent = {**thought, "signature": thought["signature"][:-8] + "AAAAAAA="}
        fields = {"role": "assistant", "content": [bent, text]}
        assert send(url, "", asked(user("hi"), fields, user("on"))).status_code == 200


@pytest.mark.parametrize("route", [PATH, f"{PATH}/count_tokens"])
def test_no_edit_comes_twice(frame: Frame, route: str) -> None:
    body = {**good(route), "context_management": {"edits": [EDIT, EDIT]}}
    assert frame.refused(route, body)["param"] == "context_management.edits"
    many = {**good(route), "context_management": {"edits": [EDIT] * 10_000}}
    assert frame.refused(route, many)["param"] == "context_management.edits"
