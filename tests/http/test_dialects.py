"""Every dialect through the server: what a model of that family writes, whole and streamed."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.registry import list_dialects
from dragoman.dialects.render import render
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.app import App
from dragoman.settings import Settings
from dragoman.types import Answer, ToolCall
from tests.support.http import HELLO, chunks
from tests.support.messages import message_of, told

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALLS = {"weather": {"city": "Rio de Janeiro", "days": 3}, "time": {"city": "Rome"}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in CALLS]
CALLING = [dialect for dialect in list_dialects().values() if dialect.calls or dialect.channels]
THINKING = [dialect for dialect in list_dialects().values() if dialect.reasoning]


def name(dialect: Dialect) -> str:
    return dialect.name


def ask(dialect: Dialect, answer: Answer, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a whole reply, and the message of a streamed one."""
    app = App(ScriptedEngine(say(render(dialect, answer))), Settings(dialect=dialect.name))

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            whole = await client.post("/v1/chat/completions", json={**HELLO, **fields})
            streamed = await client.post("/v1/chat/completions", json={**HELLO, **fields, "stream": True})
        return whole.json()["choices"][0], message_of(chunks(streamed))

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", CALLING, ids=name)
def test_text_and_two_calls(dialect: Dialect) -> None:
    calls = [ToolCall(id=None, name=name, arguments=json.dumps(result)) for name, result in CALLS.items()]
    choice, streamed = ask(dialect, Answer(text="Let me see.", calls=calls), tools=TOOLS)
    message = choice["message"]
    assert {name: json.loads(arguments) for name, arguments in told(message)} == CALLS
    assert message["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    assert (told(streamed), streamed["content"]) == (told(message), message["content"])
    assert streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("dialect", THINKING, ids=name)
def test_reasoning_and_text(dialect: Dialect) -> None:
    choice, streamed = ask(dialect, Answer(reasoning="Hm, well.", text="So it is."))
    message = choice["message"]
    assert message["reasoning"].strip().endswith("Hm, well.")
    assert message["content"].strip() == "So it is."
    assert (streamed["reasoning"], streamed["content"]) == (message["reasoning"], message["content"])
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
