"""What is kept of prompts is shared within one key, and by nobody else."""

import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import HELLO, post

ROUTES = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


def salts(serve: Serve, path: str, *asked: tuple[str, str | None], **settings: object) -> list[str]:
    """With which salts the engine was asked, one after the other, for these keys and salts."""
    engine = ScriptedEngine(say("hi"))
    url = serve(engine, store="memory", **settings)
    for key, salt in asked:
        body = {**ROUTES[path], **({"cache_salt": salt} if salt else {})}
        assert post(url, path, body, **{"x-api-key": key}).status_code == 200
    return [job.cache_salt for job in engine.jobs]


@pytest.mark.parametrize("path", ROUTES)
def test_each_key_has_prefixes_of_its_own(serve: Serve, path: str) -> None:
    one, again, two = salts(serve, path, ("a", None), ("a", None), ("b", None), api_key=["a", "b"])
    assert one == again
    assert one and two and one != two


def test_the_salt_of_a_request_is_added_to_the_key(serve: Serve) -> None:
    asked = [("a", None), ("a", "x"), ("a", "y"), ("b", "x")]
    texts = salts(serve, "/v1/chat/completions", *asked, api_key=["a", "b"])
    assert len(set(texts)) == 4


def test_without_keys_the_salt_is_that_of_the_request(serve: Serve) -> None:
    assert salts(serve, "/v1/chat/completions", ("", None), ("", "x")) == ["", "x"]


def test_the_engine_is_not_told_the_key(serve: Serve) -> None:
    """It may be another server."""
    from hashlib import sha256

    (salt,) = salts(serve, "/v1/chat/completions", ("secret", None), api_key=["secret"])
    assert "secret" not in salt
    assert sha256(b"secret").hexdigest() not in salt
