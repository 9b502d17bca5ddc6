"""Requests that failed are kept without keys, and can be sent again."""

import json
import os
import stat
from pathlib import Path

import pytest

import dragoman
from dragoman.cli import main
from dragoman.client import ClientError
from dragoman.client.replay import RequestOutcome, difference, load
from tests.client.recorded import chat, sse
from tests.client.support import HELLO, KEY
from tests.support.raw_server import SSE_HEAD, raw_server, reply

Capture = pytest.CaptureFixture[str]
WHOLE = sse(*chat({"delta": {"content": "one\ntwo"}}, {"delta": {}, "finish_reason": "stop"}))
CUT = sse(*chat({"delta": {"content": f"one {KEY}"}}), done=False) + b"data: {"
TOOL = {
    "type": "mcp",
    "server_url": "http://m",
    "authorization": "secret-1",
    "headers": {"X-Api-Key": "secret-2"},
}


def fail(url: str, folder: Path) -> Path:
    """The file of a request that has failed."""
    rows = [*HELLO, {"role": "user", "content": f"my key is {KEY}"}]
    with (
        dragoman.Client(url, KEY, failures=folder, retries=0) as client,
        pytest.raises(ClientError) as caught,
    ):
        client.chat(rows, model="m", tools=[TOOL]).answer()
    assert caught.value.saved_path is not None
    return caught.value.saved_path


def test_what_failed_is_kept(tmp_path: Path) -> None:
    with raw_server([SSE_HEAD + CUT]) as server:
        saved = load(fail(server.url, tmp_path / "new" / "folder"))
    assert (saved.url, saved.path, saved.body["model"]) == (server.url, "/v1/chat/completions", "m")
    outcome = saved.outcome
    assert (outcome.status, outcome.request_id) == (200, "req_raw")
    assert outcome.error == "An event cannot be read: it is not JSON."
    assert outcome.where is not None and "chunk 2" in outcome.where
    assert outcome.answers[0].text == "one [key]"
    assert outcome.beginning.startswith("data: {")


def test_what_is_refused_is_kept_however_the_stream_is_entered(tmp_path: Path) -> None:
    with raw_server([reply(400)]) as server:
        client = dragoman.Client(server.url, failures=tmp_path)
        with client, pytest.raises(ClientError), client.chat(HELLO):
            pass
    assert len(list(tmp_path.iterdir())) == 1


def test_no_key_is_kept(tmp_path: Path) -> None:
    with raw_server([SSE_HEAD + CUT]) as server:
        text = fail(server.url, tmp_path).read_text()
    for secret in (KEY, "secret-1", "secret-2"):
        assert secret not in text
    assert json.loads(text)["body"]["tools"][0]["authorization"] == "[removed]"


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    with raw_server([reply(500)]) as server:
        path = fail(server.url, tmp_path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_what_succeeds_is_not_kept(tmp_path: Path) -> None:
    with raw_server([SSE_HEAD, WHOLE]) as server, dragoman.Client(server.url, failures=tmp_path) as client:
        stream = client.chat(HELLO)
        stream.answer()
        assert list(tmp_path.iterdir()) == []
        assert load(stream.save(tmp_path)).outcome.answers[0].text == "one\ntwo"


def test_replay_shows_what_is_different(tmp_path: Path, capsys: Capture) -> None:
    with raw_server([SSE_HEAD + CUT], [SSE_HEAD, WHOLE]) as server:
        path = fail(server.url, tmp_path)
        assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "--- before",
        "+++ now",
        "@@ -1,5 +1,5 @@",
        " status: 200",
        "-error: An event cannot be read: it is not JSON.",
        " text:",
        "-  one [key]",
        "-finish: none",
        "+  one",
        "+  two",
        "+finish: stop",
    ]
    first, second = (json.loads(heard.partition(b"\r\n\r\n")[2]) for heard in server.heard)
    assert first["messages"][0] == second["messages"][0]


def test_replay_of_what_still_fails(tmp_path: Path, capsys: Capture) -> None:
    with raw_server([reply(400, b'{"error": {"message": "No."}}')]) as server:
        path = fail(server.url, tmp_path)
        assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "No difference; the outcome is again:",
        "status: 400",
        "error: The server answered 400: No.",
    ]


def test_a_strangers_file_gets_no_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    with raw_server([SSE_HEAD + CUT], [SSE_HEAD, WHOLE]) as server:
        path = fail(server.url, tmp_path)
        main(["replay", str(path)])
        main(["replay", str(path), "--url", server.url])
    assert [b"sk-mine" in heard for heard in server.heard] == [False, False, True]


@pytest.mark.parametrize("content", [None, b"{", b'{"at": 1}', b"\xff"])
def test_a_file_that_is_none(tmp_path: Path, capsys: Capture, content: bytes | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_what_differs_every_time_is_no_difference() -> None:
    assert (
        difference(RequestOutcome(status=200, request_id="a"), RequestOutcome(status=200, request_id="b"))
        == []
    )
