"""Pictures and sounds that are passed on: through a server to the one that computes."""

import json
from base64 import b64encode
from typing import Any

import httpx
import pytest

from dragoman.cli.engine_checks import wrong_media
from dragoman.engines.protocol import Engine
from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.scripted import ByteTokenizer, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.media import MediaKind
from dragoman.settings import Settings
from tests.engines.remote.support import QUICK, run, serving
from tests.media.samples import picture, sound

KINDS: tuple[MediaKind, ...] = ("image", "audio")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def data_url(format: str, width: int, height: int) -> str:
    return f"data:image/{format};base64," + b64encode(picture(format, width, height)).decode()


def shown() -> list[dict[str, Any]]:
    tone = {"data": b64encode(sound("wav", 0.5)).decode(), "format": "wav"}
    return [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": data_url("png", 6, 4), "detail": "low"}},
        {"type": "input_audio", "input_audio": tone},
    ]


def asked_through(upstream: Engine, tokenizer: Any, **fields: Any) -> httpx.Response:
    with serving(upstream) as urls:
        engine = RemoteEngine.open(urls, tokenizer, QUICK)
        with background(engine, Settings(port=0, store="none", shutdown_grace=0)) as url:
            body = {"messages": [{"role": "user", "content": shown()}], "temperature": 0, **fields}
            return httpx.post(url + "/v1/chat/completions", json=body, timeout=30)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), None], ids=["ids", "text"])
def test_what_is_shown_reaches_the_server_that_computes(tokenizer: Any) -> None:
    seer = ScriptedEngine(say("A cat."), modalities=KINDS)
    reply = asked_through(seer, tokenizer)
    assert reply.json()["choices"][0]["message"]["content"] == "A cat."
    passed = [span.media for span in seer.jobs[-1].media]
    assert [media.data for media in passed] == [picture("png", 6, 4), sound("wav", 0.5)]
    assert passed[0].detail == "low"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), None], ids=["ids", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_picture_takes_is_what_the_upstream_says(tokenizer: Any, stream: bool) -> None:
    # One for each 32 by 32 pixels, and for each second.
    content = [*shown(), {"type": "image_url", "image_url": {"url": data_url("png", 320, 64)}}]
    seer = ScriptedEngine(say("A cat."), modalities=KINDS)
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = asked_through(seer, tokenizer, messages=[{"role": "user", "content": content}], **fields)
    text = reply.text.split("data: ")[-2] if stream else reply.text
    assert json.loads(text)["usage"]["prompt_tokens"] == len(seer.jobs[-1].prompt) > 20


def test_calls_are_read_from_the_ids_whatever_the_upstream_made_of_them() -> None:
    reply = asked_through(ScriptedEngine(say(CALL), modalities=KINDS), ByteTokenizer(), tools=[TOOL])
    (choice,) = reply.json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_where_there_is_only_text_tools_are_refused() -> None:
    reply = asked_through(ScriptedEngine(say(CALL), modalities=KINDS), None, tools=[TOOL])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


def test_an_upstream_that_takes_text_only_is_not_asked() -> None:
    blind = ScriptedEngine(say("A cat."))
    reply = asked_through(blind, ByteTokenizer())
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_content")
    assert not any(job.media for job in blind.jobs)


def test_modalities_are_what_the_upstream_says_or_what_is_set() -> None:
    async def taken(engine: RemoteEngine) -> tuple[frozenset[str], bool]:
        return engine.card.modalities, engine.card.wants_conversation

    with serving(ScriptedEngine(say("x"), modalities=("image",))) as urls:
        assert run(urls, taken) == (frozenset({"image"}), True)
        assert run(urls, taken, RemoteOptions(modalities=())) == (frozenset(), False)


def test_it_keeps_what_doctor_asks_of_engines_that_take_media() -> None:
    with serving(ScriptedEngine(say("A cat."), modalities=KINDS)) as urls:
        assert run(urls, wrong_media) == []
