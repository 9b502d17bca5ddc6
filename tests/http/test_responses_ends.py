"""How responses end that do not end well: clients that leave, servers that stop, stores that refuse."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import HANG, parrot
from tests.support.responses import DONE, PATH, created, fold, get, kinds, numbers, payloads, texts
from tests.support.wait import becomes

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def streaming(url: str, text: str, **fields: Any) -> Iterator[Iterator[bytes]]:
    body = {"input": text, "stream": True, **fields}
    with httpx.stream("POST", url + PATH, json=body, timeout=30) as reply:
        yield reply.iter_raw()


def until(parts: Iterator[bytes], mark: bytes, count: int = 1) -> list[dict[str, Any]]:
    """The events up to where something has come so many times."""
    seen = b""
    while seen.count(mark) < count or not seen.endswith(b"\n\n"):
        seen += next(parts)
    return payloads(seen)


def ended(url: str, id_: str) -> dict[str, Any]:
    """A response once it is stored."""
    assert becomes(lambda: get(url, id_).status_code == 200)
    body: dict[str, Any] = get(url, id_).json()
    return body


def test_a_client_that_leaves_ends_the_work_and_the_record_says_so(parrot: RunningServer) -> None:
    with streaming(parrot.url, f"Hello{HANG}") as parts:
        [opening, *_] = until(parts, b'"delta"', len("Hello"))
        assert parrot.engine.live == 1
    assert becomes(lambda: parrot.engine.live == 0)
    response = ended(parrot.url, opening["response"]["id"])
    assert (response["status"], texts(response)) == ("cancelled", "Hello")
    assert response["usage"]["output_tokens"] == len("Hello")
    assert response["output"] == fold(payloads(get(parrot.url, response["id"], "?stream=true").content))


def test_a_client_that_leaves_before_a_whole_answer_ends_the_work(parrot: RunningServer) -> None:
    before = len(parrot.engine.jobs)
    with suppress(httpx.ReadTimeout):
        httpx.post(parrot.url + PATH, json={"input": HANG}, timeout=1)
    assert becomes(lambda: len(parrot.engine.jobs) == before + 1)
    assert becomes(lambda: parrot.engine.live == 0)


def test_signs_of_life_are_events_with_numbers(serve: Serve) -> None:
    url = serve(parrot(), store="memory", keep_alive=0.02)
    with streaming(url, HANG) as parts:
        events = until(parts, b"event: response.in_progress", 4)
    assert kinds(events)[:5] == ["created", *["in_progress"] * 4]
    assert numbers(events) == list(range(len(events)))


def test_a_stream_with_signs_of_life_is_replayed_as_it_was(serve: Serve) -> None:
    url = serve(parrot(interval=0.05), store="memory", keep_alive=0.01)
    with streaming(url, "abc") as parts:
        whole = b"".join(parts)
    events = payloads(whole)
    assert kinds(events).count("in_progress") > 1
    assert numbers(events) == list(range(len(events)))
    assert get(url, events[0]["response"]["id"], "?stream=true").content == whole


def test_a_server_that_stops_fails_what_it_makes(tmp_path: Path) -> None:
    settings = Settings(port=0, data_dir=str(tmp_path), shutdown_grace=0)
    with background(parrot(), settings) as url:
        id_ = created(url, HANG, background=True)["id"]
        assert becomes(lambda: get(url, id_).json()["status"] == "in_progress")
    with background(parrot(), settings) as url:
        response = get(url, id_).json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.scripted_server", str(tmp_path), "parrot"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        done = created(url, "Hello")
        begun = created(url, HANG, background=True)
        server.kill()
    with background(parrot(), Settings(port=0, data_dir=str(tmp_path))) as url:
        assert get(url, done["id"]).json() == done
        # It is made again, and hangs again.
        assert get(url, begun["id"]).json()["status"] in ("queued", "in_progress")
        assert texts(created(url, "on", previous_response_id=done["id"])) == "on"


def test_a_response_that_cannot_be_kept_has_one_end(serve: Serve) -> None:
    """Its conversation is deleted while it is made."""
    url = serve(parrot(interval=0.01), store="memory")
    talk = httpx.post(f"{url}/v1/conversations", json={}).json()["id"]
    with streaming(url, "x" * 50, conversation=talk) as parts:
        seen = next(parts)
        httpx.delete(f"{url}/v1/conversations/{talk}")
        seen += b"".join(parts)
    events = payloads(seen)
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert seen.count(DONE) == 1
    assert get(url, events[0]["response"]["id"]).json() == events[-1]["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_has_what_was_used(
    parrot: RunningServer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with caplog.at_level("INFO", "dragoman.access"):
        response = httpx.post(parrot.url + PATH, json={"input": "Hello", "stream": stream})
        assert becomes(lambda: bool(lines(caplog)))
    [line] = lines(caplog)
    assert (line["path"], line["status"], line["finish"]) == (PATH, response.status_code, "stop")
    assert line["completion_tokens"] == len("Hello") + 1
    assert "ttft_ms" in line


def test_work_in_the_background_has_a_line_of_its_own(
    parrot: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dragoman.access"):
        id_ = created(parrot.url, "Hello", background=True)["id"]
        assert becomes(lambda: any(line["method"] == "BACKGROUND" for line in lines(caplog)))
    [line] = [line for line in lines(caplog) if line["method"] == "BACKGROUND"]
    assert (line["request_id"], line["completion_tokens"]) == (id_, len("Hello") + 1)
    figures = httpx.get(f"{parrot.url}/metrics").text
    assert 'dragoman_requests_total{route="BACKGROUND /v1/responses",status="200"}' in figures


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.request for record in caplog.records if hasattr(record, "request")]


def test_turns_on_one_conversation_are_never_mixed(parrot: RunningServer) -> None:
    talk = httpx.post(f"{parrot.url}/v1/conversations", json={}).json()["id"]
    words = [f"word {number}" for number in range(8)]
    threads = [
        threading.Thread(target=created, args=(parrot.url, word), kwargs={"conversation": talk})
        for word in words
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    items = conversation_texts(parrot.url, talk)
    assert items[::2] == items[1::2]
    assert sorted(items[::2]) == words


def conversation_texts(url: str, talk: str) -> list[str]:
    page = httpx.get(f"{url}/v1/conversations/{talk}/items?order=asc&limit=100").json()
    return [item["content"][0]["text"] for item in page["data"]]


@pytest.mark.parametrize("text", ["BREAK", f"Hello{HANG}"], ids=["failed", "left"])
def test_a_turn_that_failed_leaves_the_conversation_as_it_was(parrot: RunningServer, text: str) -> None:
    talk = httpx.post(f"{parrot.url}/v1/conversations", json={}).json()["id"]
    created(parrot.url, "one", conversation=talk)
    with streaming(parrot.url, text, conversation=talk) as parts:
        until(parts, b"response.in_progress")
    # The next turn waits until that one is over.
    created(parrot.url, "two", conversation=talk)
    assert conversation_texts(parrot.url, talk) == ["one", "one", "two", "two"]


def test_a_response_that_is_not_kept_still_belongs_to_its_conversation(parrot: RunningServer) -> None:
    talk = httpx.post(f"{parrot.url}/v1/conversations", json={}).json()["id"]
    fields = created(parrot.url, "one", conversation=talk, store=False)
    assert conversation_texts(parrot.url, talk) == ["one", "one"]
    assert get(parrot.url, fields["id"]).status_code == 404
