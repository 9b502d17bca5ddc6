"""Real weights in real vLLM, asked by the real client."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.engines.vllm.conftest import RunningServer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(real: RunningServer) -> OpenAI:
    return OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0)


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def test_it_says_what_transformers_says(client: OpenAI, models: Path) -> None:
    golden = json.loads((models / "smollm2" / "golden.json").read_text())
    for prompt, ids in golden.items():
        completion = client.completions.create(
            model="smollm2",
            prompt=prompt,
            max_tokens=len(ids),
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        assert completion.choices[0].token_ids == ids  # type: ignore[attr-defined]


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    asked = asking("What is the capital of France?", max_tokens=16)
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_schema_is_kept(client: OpenAI) -> None:
    schema = {"name": "trip", "schema": WEATHER["function"]["parameters"], "strict": True}
    answer = client.chat.completions.create(
        **asking("Where to?", max_tokens=60, response_format={"type": "json_schema", "json_schema": schema})
    )
    trip = json.loads(answer.choices[0].message.content or "")
    assert trip["city"] in ("Paris", "Oslo") and trip["days"] <= 9


def test_a_call_that_is_required_is_made(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **asking("How is the weather in Oslo?", max_tokens=80, tools=[WEATHER], tool_choice="required")
    )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Oslo")


@pytest.mark.parametrize(
    ("form", "source", "fits"),
    [
        ("regex", "[ab]{3}c", lambda text: set(text) <= set("abc") and len(text) == 4),
        ("choice", ["Lyon", "Nice"], lambda text: text in ("Lyon", "Nice")),
        ("grammar", 'root ::= "::=" | "start:"', lambda text: text in ("::=", "start:")),
    ],
)
def test_every_other_form_of_a_constraint_is_kept(client: OpenAI, form: str, source: Any, fits: Any) -> None:
    answer = client.chat.completions.create(
        **asking("Hm?", max_tokens=16, extra_body={"structured_outputs": {form: source}})
    )
    assert fits(answer.choices[0].message.content)


def test_a_forbidden_word_is_not_said(client: OpenAI) -> None:
    asked = asking("What is the capital of France?", max_tokens=16)
    answer = client.chat.completions.create(**asked, extra_body={"bad_words": ["Paris", " Paris"]})
    assert "Paris" not in (answer.choices[0].message.content or "Paris")
