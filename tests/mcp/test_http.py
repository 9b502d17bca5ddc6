"""HTTP servers that misbehave: each becomes a failure of one request, and the next request works."""

import gzip
import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dragoman.mcp import McpFailure, McpServerSpec, McpSession
from dragoman.mcp.transports import message_bytes
from dragoman.media import Media
from tests.mcp.support import BOUNDS, RawServer, failure_of, raw_server, with_session
from tests.media.samples import picture

HUGE = "x" * (2 * message_bytes(BOUNDS))


def huge(handler: Any, number: int) -> None:
    handler.text(number, HUGE)


def many_values(handler: Any, number: int) -> None:
    """Smaller than a picture may be, but of far more values than one has."""
    handler.result(number, {"content": [], "_meta": {"rows": [[]] * (BOUNDS.answer_bytes // 3)}})


def many_values_event(handler: Any, number: int) -> None:
    data = b"[]," * (BOUNDS.answer_bytes // 2)
    handler.reply(200, b": hello\r\n\r\ndata: [" + data + b"[]]\n\n", "text/event-stream")


def garbage(handler: Any, number: int) -> None:
    handler.reply(200, b'{"jsonrpc": garbage-of-the-server')


def page(handler: Any, number: int) -> None:
    handler.reply(200, b"<html>", "text/html")


def shapeless(handler: Any, number: int) -> None:
    handler.result(number, {"content": 5})


def cut(handler: Any, number: int) -> None:
    handler.reply(200, b'{"jsonrpc"', headers={"content-length": "1000"})
    handler.close_connection = True


def zipped(handler: Any, number: int) -> None:
    handler.reply(200, gzip.compress(HUGE.encode()), headers={"content-encoding": "gzip"})


def huge_event(handler: Any, number: int) -> None:
    handler.reply(200, f"data: {HUGE}\n\n".encode(), "text/event-stream")


def no_event(handler: Any, number: int) -> None:
    handler.reply(200, b": nothing\n\n", "text/event-stream")


def accepted(handler: Any, number: int) -> None:
    handler.reply(202)


def hang_up(handler: Any, number: int) -> None:
    handler.close_connection = True


def error(handler: Any, number: int) -> None:
    handler.rpc_error(200, number, -32099, "not today")


def status(code: int) -> Callable[[Any, int], None]:
    return lambda handler, _: handler.reply(code, b"secret page", "text/plain")


def refusal(handler: Any, number: int) -> None:
    handler.reply(401, b'{"error": "who are you?"}')


BAD = {
    "huge": (huge, "protocol", None, "too large"),
    "garbage": (garbage, "protocol", None, "not of the protocol"),
    "page": (page, "protocol", -32600, "text/html"),
    "shapeless": (shapeless, "protocol", None, "not of the protocol"),
    "cut": (cut, "protocol", None, "not of the protocol"),
    "zipped": (zipped, "protocol", None, "not of the protocol"),
    "many values": (many_values, "protocol", None, "too large"),
    "many values event": (many_values_event, "unreachable", None, "closed the connection"),
    "huge event": (huge_event, "protocol", None, "too large"),
    "no event": (no_event, "unreachable", None, "closed the connection"),
    "accepted": (accepted, "protocol", -32600, "202"),
    "hang up": (hang_up, "unreachable", None, "could not be reached"),
    "error": (error, "protocol", -32099, "not today"),
    "500": (status(500), "http", 500, "HTTP status 500"),
    "403": (status(403), "http", 403, "HTTP status 403"),
    "401": (refusal, "http", 401, "HTTP status 401"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_a_failure_and_the_next_call_works(
    name: str, raw: RawServer, raw_spec: McpServerSpec
) -> None:
    raw.on_call["bad"], kind, code, text = BAD[name]

    async def use(session: McpSession) -> None:
        failure = await failure_of(session.call("bad", {}))
        assert (failure.kind, failure.code) == (kind, code)
        assert text in failure.message
        assert "raw" in failure.message
        assert "garbage-of-the-server" not in failure.message
        assert (await session.call("say", {})).text == "say was called"
        assert raw.asked.count("initialize") == 1

    with_session(raw_spec, use)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_picture_may_be_larger_than_other_messages(
    kind: str, raw: RawServer, raw_spec: McpServerSpec
) -> None:
    data = picture("png", 6, 4).ljust(BOUNDS.limits.media_bytes, b"\0")

    def show(handler: Any, number: int) -> None:
        shown = {"type": "image", "data": b64encode(data).decode(), "mimeType": "image/png"}
        text = json.dumps({"jsonrpc": "2.0", "id": number, "result": {"content": [shown]}})
        events = kind == "text/event-stream"
        handler.reply(200, f"data: {text}\n\n".encode() if events else text.encode(), kind)

    raw.revision, raw.on_call["show"] = "2025-11-25", show
    result = with_session(raw_spec, lambda session: session.call("show", {}))
    assert [part.data for part in result.parts if isinstance(part, Media)] == [data]


def test_a_server_that_hangs(raw: RawServer, raw_spec: McpServerSpec) -> None:
    raw.on_call["hang"] = lambda handler, number: (raw.released.wait(), None)[1]

    bounds = msgspec.structs.replace(BOUNDS, call_s=0.5)
    failure = with_session(raw_spec, lambda session: failure_of(session.call("hang", {})), bounds)
    assert failure.kind == "timeout"
    assert failure.message == "The MCP server raw did not answer the call within 0.5 seconds."


def test_a_server_that_wants_to_be_asked_again_at_once_is_made_to_wait(
    raw: RawServer, raw_spec: McpServerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.mcp.transports.PACE_S", 3600)
    raw.events = b"id: 1\nretry: 0\ndata:\n\n"
    raw.on_call["again"] = lambda handler, number: handler.reply(200, raw.events, "text/event-stream")
    bounds = msgspec.structs.replace(BOUNDS, call_s=0.5)
    failure = with_session(raw_spec, lambda session: failure_of(session.call("again", {})), bounds)
    assert failure.kind == "timeout"
    assert raw.asked.count("GET") <= 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_to_elsewhere_are_not_followed(code: int, raw: RawServer) -> None:
    spec = McpServerSpec(label="raw", url=raw.url, authorization="a-token-for-raw")
    with raw_server() as elsewhere:
        location = {"location": f"{elsewhere.url}?key=a-token-for-raw"}
        raw.on_call["away"] = lambda handler, number: handler.reply(code, headers=location)
        failure = with_session(spec, lambda session: failure_of(session.call("away", {})))
        assert failure.kind == "protocol"
        assert "a-token-for-raw" not in failure.message
        assert elsewhere.asked == []


def test_an_address_where_nobody_listens() -> None:
    spec = McpServerSpec(label="nobody", url="http://127.0.0.1:1/mcp")
    failure = with_session(spec, lambda session: failure_of(session.list_tools()))
    assert (failure.kind, failure.message) == ("unreachable", "The MCP server nobody could not be reached.")


def test_a_name_that_does_not_resolve() -> None:
    spec = McpServerSpec(label="nobody", url="http://nobody.invalid/mcp")
    assert with_session(spec, lambda session: failure_of(session.list_tools())).kind == "unreachable"


@pytest.mark.parametrize(("code", "kind"), [(404, "http"), (401, "http"), (503, "http")])
def test_a_server_that_refuses_everything(
    code: int, kind: str, raw: RawServer, raw_spec: McpServerSpec
) -> None:
    raw.refuses_all = code
    failure = with_session(raw_spec, lambda session: failure_of(session.list_tools()))
    assert failure.kind == kind


def test_a_session_that_the_server_forgot_is_begun_anew(raw: RawServer, raw_spec: McpServerSpec) -> None:
    async def use(session: McpSession) -> None:
        await session.call("say", {})
        raw.sessions.clear()
        assert (await session.call("say", {})).text == "say was called"
        assert raw.asked.count("initialize") == 2

    with_session(raw_spec, use)


def test_a_token_is_sent_as_a_bearer_and_nothing_else_of_ours(raw: RawServer) -> None:
    spec = McpServerSpec(label="raw", url=raw.url, authorization="a-token", headers={"X-Team": "blue"})
    with_session(spec, lambda session: session.call("say", {}))
    assert {seen["authorization"] for seen in raw.headers} == {"Bearer a-token"}
    assert {seen["x-team"] for seen in raw.headers} == {"blue"}
    assert {seen["accept-encoding"] for seen in raw.headers} == {"identity"}
    assert not any("cookie" in seen for seen in raw.headers)


def test_the_passwords_of_the_environment_are_not_sent(
    raw: RawServer, raw_spec: McpServerSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with_session(raw_spec, lambda session: session.call("say", {}))
    assert not any("authorization" in seen for seen in raw.headers)


def test_what_a_server_quotes_of_our_secrets_is_blanked(raw: RawServer) -> None:
    spec = McpServerSpec(label="raw", url=raw.url, headers={"X-Key": "Token hunter2-hunter2"})
    raw.on_call["quote"] = lambda handler, number: handler.rpc_error(
        200, number, -1, f"bad key hunter2-hunter2 in {json.dumps(raw.headers[-1])}"
    )
    failure: McpFailure = with_session(spec, lambda session: failure_of(session.call("quote", {})))
    assert "hunter2" not in failure.message
    assert "bad key ***" in failure.message
    assert "hunter2" not in repr(spec)


def test_nothing_of_it_is_logged(
    raw: RawServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    raw.on_call["garbage"] = garbage
    spec = McpServerSpec(label="raw", url=raw.url, authorization="a-token-for-raw")
    with_session(spec, lambda session: failure_of(session.call("garbage", {"private": "words"})))
    seen = caplog.text + "".join(capfd.readouterr())
    assert not [word for word in ("a-token-for-raw", "private", "garbage-of", "session-0") if word in seen]
