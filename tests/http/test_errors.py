import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.limits import Limits
from tests.http.conftest import Serve
from tests.support.http import HELLO, post

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def error(reply: httpx.Response) -> dict[str, str | None]:
    body: dict[str, str | None] = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_unknown_path_is_404_in_openais_shape(greeter: str) -> None:
    reply = httpx.get(greeter + "/v1/nothing")
    assert (reply.status_code, error(reply)["code"]) == (404, "unknown_path")


def test_an_unknown_path_is_404_whatever_is_sent(greeter: str) -> None:
    reply = httpx.post(greeter + "/v1/nothing", files={"file": b"x"})
    assert (reply.status_code, error(reply)["code"]) == (404, "unknown_path")


@pytest.mark.parametrize(
    "sent", ["/openai/v1/chat/completions", "/v1/chat/completion", "/x/chat/completions"]
)
def test_a_404_names_the_path_that_is_meant(greeter: str, sent: str) -> None:
    message = error(post(greeter, sent, HELLO))["message"]
    assert message == f"Unknown path {sent}; did you mean /v1/chat/completions?"


@pytest.mark.parametrize("sent", ["/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"])
def test_a_chat_is_answered_however_its_path_is_written(greeter: str, sent: str) -> None:
    assert post(greeter, sent, HELLO).json()["choices"][0]["message"]["content"] == "Hello, wörld!"


@pytest.mark.parametrize("sent", ["/models", "/v1/models/", "/v1/v1/models", "/models/"])
def test_models_are_listed_however_the_path_is_written(greeter: str, sent: str) -> None:
    assert httpx.get(greeter + sent).json()["object"] == "list"


def test_a_slash_too_many_is_no_redirect(greeter: str) -> None:
    assert httpx.get(greeter + "/health/").status_code == 200


def test_what_operators_do_has_one_path_only(greeter: str) -> None:
    reply = post(greeter, "/engine/pause", {})
    assert (reply.status_code, "/v1/engine/pause" in str(error(reply)["message"])) == (404, True)


@pytest.mark.parametrize("path", ["/health", "/healthz", "/ping"])
def test_probes_are_answered_without_a_key(serve: Serve, path: str) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["secret"])
    assert httpx.get(url + path).json() == {"status": "ok"}
    assert httpx.get(f"{url}{path}/").status_code == 401


def test_wrong_method_is_405_and_names_the_right_ones(greeter: str) -> None:
    reply = httpx.get(greeter + "/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    reply = httpx.put(greeter + "/v1/chat/completions/some")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET, HEAD, POST")


def test_a_word_that_is_none_of_a_few_is_told_which_there_are(greeter: str) -> None:
    reply = post(greeter, CHAT, {"messages": [{"role": "users", "content": "x"}]})
    known = "assistant, developer, function, system, tool, user"
    assert str(error(reply)["message"]).endswith(f"allowed are: {known}.")
    reply = post(greeter, "/v1/responses", {"input": "x", "truncation": 1})
    assert str(error(reply)["message"]).endswith("allowed are: auto, disabled.")


def test_a_prompt_that_is_too_long_is_said_in_openais_words(greeter: str) -> None:
    reply = post(greeter, CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]})
    assert str(error(reply)["message"]).startswith("This model's maximum context length is ")
    assert error(reply)["code"] == "context_length_exceeded"


def test_replies_say_how_many_requests_may_be_made_at_a_time(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["a", "b"], limits=Limits(in_flight=2, queue=2, per_key=3))
    headers = post(url, CHAT, HELLO, **{"x-api-key": "a"}).headers
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-reset-requests"] == "0s"


def test_body_over_the_limit_is_413(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), limits=Limits(body_bytes=100))
    reply = post(url, CHAT, {"messages": [{"role": "user", "content": "x" * 200}]})
    assert (reply.status_code, error(reply)["code"]) == (413, "body_too_large")


def test_chunked_body_over_the_limit_is_413(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), limits=Limits(body_bytes=100))
    parts = (b" " * 50 for _ in range(10))
    assert httpx.post(url + CHAT, content=parts, headers=JSON).status_code == 413


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_forms_are_415(greeter: str, media: str) -> None:
    reply = httpx.post(greeter + CHAT, content=b"{}", headers={"content-type": media})
    assert reply.status_code == 415


def test_compressed_body_is_415(greeter: str) -> None:
    reply = httpx.post(greeter + CHAT, content=b"{}", headers={**JSON, "content-encoding": "gzip"})
    assert reply.status_code == 415


def test_engine_error_is_a_500_that_says_nothing_foreign(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hello", fault="exception", fault_at=2)))
    reply = post(url, CHAT, HELLO)
    assert (reply.status_code, error(reply)["code"]) == (500, "engine_failed")


def test_engine_error_in_a_stream_is_its_last_event(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hello", fault="exception", fault_at=2)))
    reply = post(url, CHAT, {**HELLO, "stream": True})
    events = [line for line in reply.text.split("\n\n") if line]
    assert reply.status_code == 200
    assert '"code":"engine_failed"' in events[-1]
    assert [event for event in events if "[DONE]" in event] == []
    assert reply.text.count('"content":"') == 3


def test_next_request_works_after_a_failed_one(serve: Serve) -> None:
    scripts = iter([say("x", fault="exception"), say("fine")])
    url = serve(ScriptedEngine(lambda job: next(scripts)))
    assert post(url, CHAT, HELLO).status_code == 500
    assert post(url, CHAT, HELLO).json()["choices"][0]["message"]["content"] == "fine"


def test_template_refusal_is_a_400(greeter: str) -> None:
    reply = post(greeter, CHAT, {**HELLO, "chat_template_kwargs": {"messages": []}})
    assert (reply.status_code, error(reply)["param"]) == (400, "chat_template_kwargs")


def test_queue_over_its_limit_is_429_with_retry_after(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x", fault="hang", fault_at=1)), limits=Limits(in_flight=1, queue=0))
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as running:
        parts = running.iter_bytes()  # kept: a dropped iterator closes the stream
        next(parts)
        reply = post(url, CHAT, HELLO)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/version", "/nowhere"])
def test_without_the_key_nothing_is_open(serve: Serve, path: str) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["secret", "other"])
    assert httpx.get(url + path).status_code == 401
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize("headers", [{"authorization": "Bearer secret"}, {"x-api-key": "other"}])
def test_either_header_carries_the_key(serve: Serve, headers: dict[str, str]) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["secret", "other"])
    assert post(url, CHAT, HELLO, **headers).status_code == 200


def test_request_id_of_the_client_is_echoed(greeter: str) -> None:
    assert post(greeter, CHAT, HELLO, **{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 200])
def test_odd_request_id_is_replaced(greeter: str, given: str) -> None:
    echoed = post(greeter, CHAT, HELLO, **{"x-request-id": given}).headers["x-request-id"]
    assert echoed.startswith("req_")
