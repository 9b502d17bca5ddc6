"""Engines that cannot be held to anything: what passes, what is looked at, and what is asked again."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.http.test_constraints import FORMAT, NAMED, PATH, REQUIRED, SCHEMA, STRICT, WANTED
from tests.support.http import HELLO, chunks, post
from tests.support.messages import message_of
from tests.support.responses import streamed
from tests.support.tool_model import prompt_of
from tests.support.wait import becomes

UNENFORCED, BROKEN = "x-dragoman-unenforced", "x-dragoman-broken"
STRICT_FIELD = "tools[0].function.strict"


def call(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FIT, UNFIT = call('{"city": "Paris"}'), call('{"town": "Paris"}')


def in_turn(*texts: str) -> ScriptedEngine:
    """Says one text after the other, and the last again and again."""
    left = list(texts)

    def script(job: Job) -> Script:
        return say(left.pop(0) if len(left) > 1 else left[0])

    return ScriptedEngine(script)


@pytest.fixture
def checking(serve: Serve) -> Callable[..., str]:
    return lambda engine, **more: serve(engine, dialect="hermes", unconstrained="check", **more)


@pytest.mark.parametrize(("text", "broken"), [(FIT, None), (UNFIT, STRICT_FIELD), ("Hello.", None)])
def test_a_strict_tool_passes_and_headers_say_so(serve: Serve, text: str, broken: str | None) -> None:
    url = serve(in_turn(text), dialect="hermes")
    reply = post(url, PATH, {**HELLO, "tools": [STRICT]})
    assert reply.status_code == 200
    assert (reply.headers[UNENFORCED], reply.headers.get(BROKEN)) == (STRICT_FIELD, broken)


def test_a_stream_with_a_strict_tool_says_so_when_it_begins(serve: Serve) -> None:
    url = serve(in_turn(UNFIT), dialect="hermes")
    reply = post(url, PATH, {**HELLO, "tools": [STRICT], "stream": True})
    assert reply.headers[UNENFORCED] == STRICT_FIELD
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_with_a_strict_tool_says_so(serve: Serve, streams: bool) -> None:
    url = serve(in_turn(UNFIT), dialect="hermes", store="memory")
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    reply = post(url, "/v1/responses", {"input": "hi", "tools": tools, "stream": streams})
    assert reply.headers[UNENFORCED] == "tools[0].strict"
    assert reply.headers.get(BROKEN) == (None if streams else "tools[0].strict")


def test_where_nothing_is_strict_nothing_is_said(serve: Serve) -> None:
    reply = post(serve(in_turn(FIT), dialect="hermes"), PATH, {**HELLO, "tools": REQUIRED["tools"]})
    assert UNENFORCED not in reply.headers


def test_tools_that_may_not_be_called_are_looked_at(serve: Serve) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    url = serve(in_turn(FIT), dialect="hermes")
    reply = post(url, PATH, {**HELLO, "tools": REQUIRED["tools"], "tool_choice": choice})
    assert reply.headers[BROKEN] == "tool_choice"


@pytest.mark.parametrize("fields", [REQUIRED, NAMED], ids=str)
def test_a_call_that_was_asked_for_is_asked_for_again(
    checking: Callable[..., str], fields: dict[str, Any]
) -> None:
    engine = in_turn("Let me think.", UNFIT, FIT)
    message = post(checking(engine), PATH, {**HELLO, **fields}).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert len(engine.jobs) == 3


@pytest.mark.parametrize("streams", [False, True])
def test_what_does_not_fit_is_never_told(checking: Callable[..., str], streams: bool) -> None:
    engine = in_turn("It is Rome.", '{"city": "Rome"}')
    reply = post(checking(engine), PATH, {**HELLO, "response_format": FORMAT, "stream": streams})
    message = message_of(chunks(reply)) if streams else reply.json()["choices"][0]["message"]
    assert message["content"] == '{"city": "Rome"}'


def test_the_model_is_told_what_is_wrong(checking: Callable[..., str]) -> None:
    engine = in_turn('{"town": "Rome"}', '{"city": "Rome"}')
    post(checking(engine), PATH, {**HELLO, "response_format": FORMAT})
    assert "$.city is missing" in prompt_of(engine.jobs[1])


def test_the_ids_of_an_answer_come_with_the_prompt_that_it_answers(checking: Callable[..., str]) -> None:
    engine = in_turn("no", '{"city": "R"}')
    reply = post(
        checking(engine), PATH, {**HELLO, "response_format": FORMAT, "return_token_ids": True}
    ).json()
    assert reply["prompt_token_ids"] == [*engine.jobs[1].prompt]


def test_all_tries_are_in_the_usage(checking: Callable[..., str]) -> None:
    reply = post(checking(in_turn("no", '{"city": "R"}')), PATH, {**HELLO, "response_format": FORMAT})
    assert reply.json()["usage"]["completion_tokens"] == len("no") + 1 + len('{"city": "R"}') + 1


@pytest.mark.parametrize("fields", [*WANTED, REQUIRED, NAMED], ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_never_fits_is_an_error(
    checking: Callable[..., str], fields: dict[str, Any], streams: bool
) -> None:
    engine = in_turn("NO, never.")
    reply = post(checking(engine), PATH, {**HELLO, **fields, "stream": streams})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "unfit_answer")
    assert reply.headers["x-should-retry"] == "false"
    assert len(engine.jobs) == 3


def test_an_answer_that_is_cut_is_told_as_it_is(checking: Callable[..., str]) -> None:
    body = {**HELLO, "response_format": FORMAT, "max_tokens": 3}
    choice = post(checking(in_turn('{"city": "Rome"}')), PATH, body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", '{"c')


def test_a_schema_that_is_none_is_refused_before_anything_is_asked(checking: Callable[..., str]) -> None:
    engine = in_turn("x")
    reply = post(checking(engine), PATH, {**HELLO, "guided_regex": "("})
    assert (reply.status_code, engine.jobs) == (400, [])


def test_a_response_is_held_too(checking: Callable[..., str]) -> None:
    url = checking(in_turn("It is Rome.", '{"city": "Rome"}'), store="memory")
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    events = streamed(url, text=text)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == '{"city": "Rome"}'


def test_a_client_that_leaves_ends_the_next_try(checking: Callable[..., str]) -> None:
    scripts = iter([say("no"), say("{", fault="hang", fault_at=1)])
    engine = ScriptedEngine(lambda job: next(scripts))
    url = checking(engine)
    body = {**HELLO, "response_format": FORMAT}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + PATH, json=body, timeout=0.5)
    assert becomes(lambda: len(engine.jobs) == 2 and not engine.live)


class Weather(BaseModel):
    city: str


def test_openais_helpers_may_send_strict(serve: Serve) -> None:
    from openai import pydantic_function_tool

    client = OpenAI(base_url=serve(in_turn(FIT), dialect="hermes") + "/v1", api_key="none")
    tool = pydantic_function_tool(Weather, name="weather")
    result = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "hi"}], tools=[tool]
    )
    calls = result.choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == Weather(city="Paris")
