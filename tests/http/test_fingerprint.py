"""`system_fingerprint` has the version and what stands for the engine's numerics."""

import httpx
from msgspec.structs import replace

import dragoman
from dragoman.engines.scripted import ScriptedEngine, say


def test_the_fingerprint_tells_what_decides_answers() -> None:
    engine = ScriptedEngine(say("Hello!"))
    engine.card = replace(engine.card, numerics="abc123")
    with dragoman.background(engine) as url:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(url + "/v1/chat/completions", json=body).json()
    assert answer["system_fingerprint"] == f"dragoman-{dragoman.__version__}-abc123"
