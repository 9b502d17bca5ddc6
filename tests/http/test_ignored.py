"""What of a request has no effect is named in a header, whatever the route and however it is answered."""

import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post, refusal

HEADER = "x-dragoman-ignored"
ROUTES = [
    ("/v1/chat/completions", HELLO),
    ("/v1/chat/completions", {**HELLO, "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/v1/chat/completions/input_tokens", HELLO),
    ("/tokenize", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_field_without_effect_is_named(greeter: str, path: str, body: dict[str, object]) -> None:
    reply = post(greeter, path, {**body, "colour": "red"})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "colour")


def test_nothing_is_said_where_all_was_done(greeter: str) -> None:
    assert HEADER not in post(greeter, "/v1/chat/completions", HELLO).headers
    assert HEADER not in get(greeter, "/v1/models").headers


def test_an_operator_may_refuse_what_nobody_knows(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hello")), unknown_fields="error")
    assert refusal(post(url, "/v1/chat/completions", {**HELLO, "colour": "red"})) == (400, "colour")
    reply = post(url, "/v1/chat/completions", {**HELLO, "keep_alive": "5m"})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "keep_alive")


def test_a_slip_is_refused_under_either(greeter: str) -> None:
    assert refusal(post(greeter, "/v1/chat/completions", {**HELLO, "temprature": 1})) == (400, "temprature")
