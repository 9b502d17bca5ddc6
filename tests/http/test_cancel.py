"""Law 7: leave, and the engine stops."""

from contextlib import suppress

import httpx

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import HELLO
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


def test_leaving_a_silent_stream_stops_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(say("x", fault="hang", fault_at=1))
    url = serve(engine)
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
        parts = reply.iter_bytes()  # kept: a dropped iterator closes the stream
        next(parts)
        assert becomes(lambda: engine.live == 1)
    assert becomes(lambda: engine.live == 0)


def test_leaving_a_busy_stream_stops_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(Script([120] * 4000), interval=0.001)
    url = serve(engine)
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True, "n": 2}) as reply:
        next(reply.iter_bytes())
    assert becomes(lambda: engine.live == 0)


def test_leaving_before_a_whole_answer_stops_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(say("x", fault="hang"))
    url = serve(engine)
    with suppress(httpx.ReadTimeout):
        httpx.post(url + CHAT, json=HELLO, timeout=1)
    assert becomes(lambda: len(engine.jobs) == 1)
    assert becomes(lambda: engine.live == 0)


def test_silent_stream_is_kept_alive_by_comments(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x", fault="hang")), keep_alive=0.05)
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
        seen = b""
        for part in reply.iter_raw():
            seen += part
            if seen.count(b": keep-alive\n\n") == 2:
                break
    assert seen.count(b": keep-alive\n\n") == 2


def test_first_bytes_leave_before_the_engine_says_anything(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x", fault="hang")))
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
        assert b'"role":"assistant"' in next(reply.iter_raw())


def test_shutdown_ends_what_runs() -> None:
    engine = ScriptedEngine(say("x", fault="hang"))
    with background(engine, Settings(port=0, shutdown_grace=0)) as url:
        client = httpx.Client()
        request = client.build_request("POST", url + CHAT, json={**HELLO, "stream": True})
        reply = client.send(request, stream=True)
        parts = reply.iter_raw()
        next(parts)
    assert engine.live == 0
    client.close()
