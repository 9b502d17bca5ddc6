"""A real model at temperature 1, real clients, and answers that cannot be wrong."""

import json
import re
from collections.abc import Iterator
from itertools import cycle
from random import Random
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from dragoman.constrain.constraint import Constraint
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.conformance.conftest import MODEL, RUNNERS, RunningServer
from tests.support.apply_patch import APPLY_PATCH
from tests.support.engines import SharedEngine
from tests.support.http import post, stream
from tests.support.messages import message_of, told
from tests.support.random_schemas import schema, tools, wrong_calls, wrong_text

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Think of a person."}]
# A model at temperature 1 would go on for ever: lines and hunks are few and short.
SHORT_PATCH = (
    APPLY_PATCH.replace("hunk+", "hunk~1..2")
    .replace("add_line+", "add_line~1..2")
    .replace("change_line)+", "change_line)~1..3")
    .replace("/(.*)/", "/(.{0,12})/")
    .replace("/(.+)/", "/(.{1,12})/")
)
DIALECTS = (
    "hermes",
    "qwen3_coder",
    "deepseek_v31",
    "mistral_v11",
    "llama3_json",
    "harmony",
    "pythonic",
    "glm45",
)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    colours: list[Literal["red", "green"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as open_ai:
        yield open_ai


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    done = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=300, seed=3
    )
    parsed = done.choices[0].message.parsed
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(parsed, Person)


def test_a_stream_is_parsed_to_the_same_type(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=300, seed=4
    ) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_a_named_tool(client: OpenAI) -> None:
    declared = tools(Random(1), depth=0)
    name = declared[0]["function"]["name"]
    asked: Any = {"tools": declared, "tool_choice": {"type": "function", "function": {"name": name}}}
    done = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=300, **asked)
    [call] = done.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == name
    assert wrong_calls([(name, call.function.arguments)], declared) is None
    assert done.choices[0].finish_reason == "stop"


def test_what_cannot_be_enforced_is_refused(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, response_format=wanted)
    assert (caught.value.param or "").startswith("response_format")


@pytest.mark.parametrize("seed", range(2))
def test_schemas_whole_and_streamed(base_url: str, seed: int) -> None:
    wanted = schema(Random(seed), depth=1)
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    body = {"messages": ASK, "response_format": format_, "max_tokens": 500, "seed": seed}
    url = base_url.removesuffix("/v1")
    [choice] = post(url, "/v1/chat/completions", body).json()["choices"]
    assert (choice["finish_reason"], wrong_text(choice["message"]["content"], wanted)) == ("stop", None)
    streamed = message_of(stream(url, "/v1/chat/completions", body))
    assert (streamed["finish_reason"], wrong_text(streamed["content"], wanted)) == ("stop", None)


@pytest.mark.parametrize(("runner", "dialect"), [*zip(cycle(RUNNERS), DIALECTS, strict=False)])
def test_required_calls_in_a_dialect(runner: str, dialect: str, request: pytest.FixtureRequest) -> None:
    """A grammar does not mind who computes, so that the runners take turns."""
    served: RunningServer = request.getfixturevalue(runner)
    declared = tools(Random(len(dialect)), depth=1)
    body = {
        "messages": ASK,
        "tools": declared,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "none",
        "max_tokens": 500,
        "seed": 1,
    }
    with background(SharedEngine(served.engine), Settings(port=0, dialect=dialect)) as url:
        [choice] = post(url, "/v1/chat/completions", body).json()["choices"]
        streamed = message_of(stream(url, "/v1/chat/completions", body))
    for calls, finish in (
        (told(choice["message"]), choice["finish_reason"]),
        (told(streamed), streamed["finish_reason"]),
    ):
        assert (finish, wrong_calls(calls, declared)) == ("tool_calls", None)


def test_several_answers_and_their_log_probabilities(base_url: str) -> None:
    body = {"messages": ASK, "guided_regex": "[a-z]{4}", "n": 3, "logprobs": True, "top_logprobs": 2}
    answers = post(base_url.removesuffix("/v1"), "/v1/chat/completions", body).json()["choices"]
    assert all(len(answer["message"]["content"]) == 4 for answer in answers)
    first = answers[0]["logprobs"]["content"][0]
    assert first["logprob"] <= first["top_logprobs"][0]["logprob"]


def test_completions(base_url: str) -> None:
    body = {"prompt": "A number:", "structured_outputs": {"json": {"enum": [1, 22, 333]}}}
    [choice] = post(base_url.removesuffix("/v1"), "/v1/completions", body).json()["choices"]
    assert json.loads(choice["text"]) in (1, 22, 333)


def test_a_custom_tool(base_url: str) -> None:
    sentence: Any = {"type": "grammar", "grammar": {"syntax": "regex", "definition": 'say "[a-z]{2,9}"\n'}}
    tool: Any = {"type": "custom", "custom": {"name": "speak", "format": sentence}}
    with OpenAI(base_url=base_url, api_key="none", _strict_response_validation=True) as client:
        done = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[tool], tool_choice=tool, max_tokens=100
        )
    [call] = done.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert re.fullmatch('say "[a-z]{2,9}"\n', call.custom.input)


@pytest.mark.parametrize(("runner", "choice"), [("llamacpp", "required"), ("openvino", "auto")])
def test_a_custom_tool_with_a_grammar(runner: str, choice: str, request: pytest.FixtureRequest) -> None:
    """What the model itself would hardly write: with `auto`, the call is begun for it."""
    served: RunningServer = request.getfixturevalue(runner)
    lark: Any = {"type": "grammar", "grammar": {"syntax": "lark", "definition": SHORT_PATCH}}
    tool: Any = {"type": "custom", "custom": {"name": "apply_patch", "format": lark}}
    body: dict[str, Any] = {
        "messages": ASK,
        "tools": [tool],
        "tool_choice": choice,
        "max_tokens": 400,
        "n": 3,
        "seed": 5,
    }
    if choice == "auto":
        begun = {"role": "assistant", "content": '<tool_call>\n{"name": "apply_patch", "arguments": '}
        body |= {"messages": [*ASK, begun], "continue_final_message": True, "add_generation_prompt": False}
    answers = post(served.url, "/v1/chat/completions", body).json()["choices"]
    texts: list[str] = []
    for one in answers:
        calls = one["message"].get("tool_calls") or []
        # The last one may have been cut off, and is told as far as it came.
        whole = calls[:-1] if one["finish_reason"] == "length" else calls
        texts += [call["custom"]["input"] for call in whole]
    assert texts
    assert all(map(Constraint.from_lark(SHORT_PATCH).accepts, texts))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(base_url: str, method: Literal["json_schema", "function_calling"]) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(model=MODEL, base_url=base_url, api_key=SecretStr("none"), max_completion_tokens=300)
    result = chat.with_structured_output(Person, method=method).invoke("Think of a person.")
    assert isinstance(result, Person)
