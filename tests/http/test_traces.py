"""Traces, as a collector of OpenTelemetry gets them: sent when the server has stopped, at the latest."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import Engine
from dragoman.engines.remote import RemoteEngine
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.tracing import check_tracing
from tests.mcp.support import raw_server
from tests.support.collector import Collector, collecting
from tests.support.http import HELLO, get, post, stream
from tests.support.parrot import call as written
from tests.support.parrot import parrot
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Embedder(ScriptedEngine):
    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1.0, 0.0] for _ in prompts]


@contextmanager
def traced(engine: Engine, **settings: Any) -> Iterator[tuple[str, Collector]]:
    """An address, and the collector, which has everything after the block."""
    with collecting() as collector:
        chosen = {"port": 0, "store": "memory", "otel_endpoint": collector.url, **settings}
        with background(engine, Settings(**chosen)) as url:
            yield url, collector
        assert collector.spans


@pytest.fixture(scope="module")
def chat() -> Collector:
    """Of one chat, with a trace of the client's."""
    with traced(ScriptedEngine(say("hello"))) as (url, collector):
        asked = {**HELLO, "temperature": 0.5, "stop": ["x"], "seed": 7}
        post(url, CHAT, asked, traceparent=PARENT, tracestate="a=b")
    return collector


def test_a_request_stands_under_its_clients_span(chat: Collector) -> None:
    span = chat.one(f"POST {CHAT}")
    assert (span.trace, span.parent, span.kind) == (PARENT[3:35], PARENT[36:52], "server")
    assert span.status == "unset"
    fields = {"http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200}
    assert fields.items() <= span.attributes.items()


def test_a_turn_has_the_names_of_the_conventions(chat: Collector) -> None:
    span = chat.one("chat scripted")
    assert span.parent == chat.one(f"POST {CHAT}").id
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["x"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.output.type": "text",
    }
    assert expected.items() <= span.attributes.items()
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert span.attributes["gen_ai.response.id"].startswith("chatcmpl-")


def test_a_turn_has_spans_for_its_parts_one_after_the_other(chat: Collector) -> None:
    whole = chat.one("chat scripted")
    assert chat.under(whole) == ["prompt", "queue", "prefill", "decode"]
    parts = [chat.one(name) for name in ("prompt", "queue", "prefill", "decode")]
    assert all(part.start <= part.end for part in parts)
    assert whole.start <= parts[0].start
    assert parts[-1].end <= whole.end


def test_nothing_that_was_said_is_told(chat: Collector) -> None:
    assert not any("messages" in name for span in chat.spans for name in span.attributes)
    assert "hello" not in str(chat.spans)


def test_the_service_is_named(chat: Collector) -> None:
    assert chat.resources[0]["service.name"] == "dragoman"


def test_figures_are_measured_by_the_conventions(chat: Collector) -> None:
    whole = chat.metrics["gen_ai.server.request.duration"][0]
    assert (whole["gen_ai.operation.name"], whole["gen_ai.request.model"]) == ("chat", "scripted")
    assert {each["gen_ai.token.type"] for each in chat.metrics["gen_ai.client.token.usage"]} == {
        "input",
        "output",
    }
    assert "dragoman.answers_running" in chat.metrics
    assert "gen_ai.server.time_to_first_token" in chat.metrics


def test_a_client_is_told_where_its_trace_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with traced(ScriptedEngine(say("hi"))) as (url, collector):
        text = stream_headers(url)["traceresponse"]
        get(url, "/health")
        get(url, "/metrics")
    span = collector.one(f"POST {CHAT}")
    assert text.startswith(f"00-{span.trace}-{span.id}-")
    assert (span.parent, len(collector.under(span))) == ("", 1)
    # What probes ask is no news.
    assert not any(span.name.startswith("GET") for span in collector.spans)
    assert collector.resources[0]["service.name"] == "mine"


def stream_headers(url: str) -> httpx.Headers:
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
        reply.read()
        return reply.headers


def test_a_sampler_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with traced(ScriptedEngine(say("hi"))) as (url, collector):
        assert post(url, CHAT, HELLO).headers["traceresponse"][-1] in "02"
        post(url, CHAT, HELLO, traceparent=PARENT)
    assert {span.trace for span in collector.spans} == {PARENT[3:35]}


def test_what_was_said_is_told_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    with traced(ScriptedEngine(say("hello"))) as (url, collector):
        stream(url, CHAT, HELLO)
    fields = collector.one("chat scripted").attributes
    asked = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    assert json.loads(fields["gen_ai.input.messages"]) == asked
    [answer] = json.loads(fields["gen_ai.output.messages"])
    assert (answer["parts"], answer["finish_reason"]) == ([{"type": "text", "content": "hello"}], "stop")


def test_a_conversation_is_named_also_in_the_background() -> None:
    with traced(ScriptedEngine(say("hi"))) as (url, collector):
        kept = post(url, "/v1/conversations", {}).json()["id"]
        asked = {"input": "hi", "conversation": kept, "background": True}
        result = post(url, "/v1/responses", asked).json()["id"]
        assert becomes(lambda: get(url, f"/v1/responses/{result}").json()["status"] == "completed")
    fields = collector.one("chat scripted").attributes
    assert (fields["gen_ai.conversation.id"], fields["gen_ai.response.id"]) == (kept, result)


def test_vectors_have_a_span() -> None:
    with traced(Embedder(say("hi"))) as (url, collector):
        assert post(url, "/v1/embeddings", {"input": "x"}).status_code == 200
    span = collector.one("embeddings scripted")
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.parent == collector.one("POST /v1/embeddings").id


HOSTILE = [
    "00-00000000000000000000000000000000-b7ad6b7169203331-01",
    "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "00-" + "a" * 10_000,
    "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01\t; x",
    "\xff\xfe",
    "",
]


def test_a_header_that_is_no_trace_begins_a_new_one() -> None:
    with traced(ScriptedEngine(say("hi"))) as (url, collector):
        for parent in HOSTILE:
            fields = {
                "traceparent": parent.encode("latin-1"),
                "tracestate": b"=,=" * 1000,
                "baggage": b"\xff",
            }
            headers = [(name.encode(), value) for name, value in fields.items()]
            assert httpx.post(url + CHAT, json=HELLO, headers=headers).status_code == 200
    requests = [span for span in collector.spans if span.kind == "server"]
    assert {span.parent for span in requests} == {""}
    assert len({span.trace for span in requests}) == len(HOSTILE)


# How work ends.


def test_an_engine_that_fails_is_an_error() -> None:
    with traced(ScriptedEngine(say("hello", fault="exception", fault_at=2))) as (url, collector):
        post(url, CHAT, HELLO)
    turn, request = collector.one("chat scripted"), collector.one(f"POST {CHAT}")
    assert (turn.status, request.status) == ("error", "error")
    assert turn.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert turn.attributes["error.type"]


def test_a_stream_that_fails_is_an_error_though_its_status_was_200() -> None:
    with traced(ScriptedEngine(say("hello", fault="exception", fault_at=2))) as (url, collector):
        post(url, CHAT, {**HELLO, "stream": True})
    request = collector.one(f"POST {CHAT}")
    assert (request.attributes["http.response.status_code"], request.status) == (200, "error")


def test_a_request_that_is_wrong_is_no_error_of_the_server() -> None:
    with traced(ScriptedEngine(say("hi"))) as (url, collector):
        post(url, CHAT, {"messages": 1})
        post(url, "/odd/path", {})
        post(url, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})
    wrong, odd, *_ = sorted(collector.spans, key=lambda span: span.start)
    long = collector.one("prompt")
    assert (wrong.status, wrong.attributes["error.type"]) == ("unset", "invalid_value")
    assert (odd.name, odd.attributes["error.type"]) == ("POST", "unknown_path")
    assert (long.status, long.attributes["error.type"]) == ("error", "context_length_exceeded")


def test_a_client_that_leaves_is_no_error() -> None:
    engine = ScriptedEngine(say("x" * 2000), interval=0.01)
    with traced(engine) as (url, collector):
        with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
            next(reply.iter_raw())
        assert becomes(lambda: "in_flight 1.0" in get(url, "/metrics").text)
    turn, request = collector.one("chat scripted"), collector.one(f"POST {CHAT}")
    assert (turn.status, request.status) == ("unset", "unset")
    assert turn.attributes["gen_ai.response.finish_reasons"] == ["disconnect"]
    assert request.attributes["dragoman.ended"] == "disconnect"


def test_a_deadline_is_an_error_of_the_turn_too() -> None:
    engine = ScriptedEngine(say("x" * 2000), interval=0.01)
    with traced(engine) as (url, collector):
        assert post(url, CHAT, {**HELLO, "timeout": 0.1}).status_code == 408
    turn = collector.one("chat scripted")
    assert turn.attributes["error.type"] == "timeout"


def test_a_response_that_is_cancelled_is_no_error() -> None:
    engine = ScriptedEngine(say("x" * 2000), interval=0.01)
    with traced(engine) as (url, collector):
        body = post(url, "/v1/responses", {"input": "hi", "background": True}).json()
        assert becomes(lambda: 'running{model="scripted"} 1.0' in get(url, "/metrics").text)
        post(url, f"/v1/responses/{body['id']}/cancel", {})
    work, asked = collector.one("BACKGROUND /v1/responses"), collector.one("POST /v1/responses")
    assert (work.parent, work.trace, work.status) == (asked.id, asked.trace, "unset")
    assert work.attributes["dragoman.ended"] == "cancelled"
    assert collector.one("chat scripted").status == "unset"


# Others that are asked.


def test_a_remote_engine_is_told_of_the_span_that_asks_it() -> None:
    with collecting() as collector:
        settings = {"port": 0, "store": "memory", "otel_endpoint": collector.url}
        with background(ScriptedEngine(say("hello")), Settings(**settings)) as upstream:  # type: ignore[arg-type]
            engine = RemoteEngine.open([upstream], None)
            with background(engine, Settings(**settings)) as url:  # type: ignore[arg-type]
                trace = post(url, CHAT, HELLO).headers["traceresponse"][3:35]
    mine = [span for span in collector.spans if span.trace == trace]
    [asking] = [span for span in mine if span.name.startswith("chat")]
    [asked] = [span for span in mine if span.name == "POST /v1/completions"]
    assert (asked.parent, asking.kind) == (asking.id, "client")


def test_nothing_of_it_is_imported_without_the_setting() -> None:
    code = "import sys, dragoman.http.server; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_calls_of_mcp_servers_are_spans_that_the_servers_are_told_of() -> None:
    with raw_server() as server, traced(parrot(), mcp_allow=["127.0.0.1:*"]) as (url, seen):
        tool = {"type": "mcp", "server_label": "raw", "server_url": server.url, "require_approval": "never"}
        name = server.tools[0]["name"]
        post(url, "/v1/responses", {"input": written(name), "tools": [tool]})
    whole, call = seen.one("POST /v1/responses"), seen.one(f"execute_tool {name}")
    assert [each for each in seen.under(whole) if "chat" not in each] == ["tools/list", call.name]
    assert (call.kind, call.attributes["gen_ai.operation.name"]) == ("client", "execute_tool")
    text = f"00-{call.trace}-{call.id}-"
    assert any(each.get("traceparent", "").startswith(text) for each in server.headers)
    assert server.params[0]["_meta"]["traceparent"].startswith(text)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.tracing.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"dragoman\[otel\]"):
        check_tracing(Settings(otel=True))
    check_tracing(Settings())
