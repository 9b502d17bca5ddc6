"""Real weights in real vLLM that constrains with xgrammar, which knows calls as tags."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.engines.vllm.conftest import served

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def client(vllm_python: str, models: Path, logs: Path) -> Iterator[OpenAI]:
    flags = ("--model", str(models / "smollm2"), "--context", "1024", "--dialect", "hermes")
    backend = {"backend": "xgrammar"}
    with (
        served(vllm_python, logs / "xgrammar.log", *flags, structured_outputs_config=backend) as server,
        OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def said(client: OpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 80,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Where to?"}],
    }
    return client.chat.completions.create(**asked, **fields).choices[0]


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_made(client: OpenAI, tool_choice: Any) -> None:
    choice = said(client, tools=[LOOK], tool_choice=tool_choice, parallel_tool_calls=False)
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    result = json.loads(call.function.arguments)
    assert (result["city"] in ("Paris", "Oslo"), result["days"] in (1, 2, 3)) == (True, True)
    assert not choice.message.content


def test_a_text_that_is_wanted_is_said(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": PARAMETERS}}
    assert json.loads(said(client, response_format=wanted).message.content).keys() == {"city", "days"}
