"""What constrains an answer, over a socket: what reaches the engine, what is refused, and what is said."""

import json
from typing import Any

import numpy as np
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, END_ID, Script, ScriptedEngine, say
from dragoman.errors import ConstraintFailed
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.support.apply_patch import APPLY_PATCH, PATCH
from tests.support.http import HELLO, chunks, post, stream
from tests.support.messages import message_of, told

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REQUIRED = {"tools": [WEATHER, TIME], "tool_choice": "required"}
NAMED = {"tools": [WEATHER, TIME], "tool_choice": WEATHER}
WANTED: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"response_format": {"type": "json_object"}},
    {"guided_json": SCHEMA},
    {"guided_regex": "[a-z]+"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'start: "a"'},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"grammar": 'root ::= "a"'},
]


def constraining(text: str) -> ScriptedEngine:
    """It says its text whatever it is told, but is trusted to keep to constraints."""
    card = ModelCard(name="scripted", max_model_len=4096, templates={"default": CHATML}, constrains=True)
    return ScriptedEngine(say(text), card=card)


def takes(job: Job, text: str) -> bool:
    """Whether the job's constraint lets the engine say this, and end there."""
    assert job.constraint is not None
    matcher = job.constraint.new_matcher()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except ConstraintFailed:
        return False
    return matcher.is_accepting


@pytest.mark.parametrize("fields", [*WANTED, REQUIRED, NAMED], ids=str)
def test_an_engine_that_cannot_constrain_is_not_asked(serve: Serve, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine(say(CALL))
    url = serve(engine, dialect="hermes")
    for streams in (False, True):
        response = post(url, PATH, {**HELLO, **fields, "stream": streams})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_field")
        assert response.json()["error"]["param"].split(".")[0].split("[")[0] in fields
    assert engine.jobs == []


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": FORMAT}, '{"city": "Rome"}', '{"town": "Rome"}'),
        ({"guided_regex": "[a-z]{2}"}, "ab", "abc"),
        ({"guided_choice": ["yes", "no"]}, "no", "nope"),
        ({"guided_grammar": 'start: "a" "b"?'}, "ab", "b"),
        ({"response_format": FORMAT}, '<think>\nHm.\n</think>\n\n{"city": "Rome"}', "Rome"),
        (REQUIRED, CALL, "Paris"),
        (REQUIRED, f"{CALL}\n{CALL}", f"Well. {CALL}"),
        ({**REQUIRED, "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
        (NAMED, CALL, f"{CALL}\n{CALL}"),
        (NAMED, CALL, CALL.replace("weather", "time")),
        ({"tools": [STRICT]}, f"Well.\n{CALL}", CALL.replace("city", "town")),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, f"Well.\n{CALL}", f"{CALL}\n{CALL}"),
        ({"tools": [WEATHER], "response_format": FORMAT}, '{"city": "Rome"}', "Rome"),
        ({"tools": [WEATHER], "response_format": FORMAT}, CALL, f"Well. {CALL}"),
    ],
)
def test_the_constraint_that_reaches_the_engine(
    serve: Serve, fields: dict[str, Any], good: str, bad: str
) -> None:
    engine = constraining(good)
    assert post(serve(engine, dialect="hermes"), PATH, {**HELLO, **fields}).status_code == 200
    [job] = engine.jobs
    assert takes(job, good)
    assert not takes(job, bad)


def test_an_answer_that_begins_in_reasoning_is_constrained_after_it(serve: Serve) -> None:
    engine = constraining('Hm.\n</think>\n\n{"city": "Rome"}')
    engine.card.templates = {"default": CHATML.replace("assistant\n", "assistant\n<think>\n")}
    url = serve(engine, dialect="hermes")
    [choice] = post(url, PATH, {**HELLO, "response_format": FORMAT}).json()["choices"]
    assert takes(engine.jobs[0], 'Hm.\n</think>\n\n{"city": "Rome"}')
    assert not takes(engine.jobs[0], '{"city": "Rome"}')
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", '{"city": "Rome"}')
    mixed = {**HELLO, "response_format": FORMAT, "separate_reasoning": False}
    assert post(url, PATH, mixed).json()["error"]["param"] == "separate_reasoning"


def test_completions_are_constrained_from_their_first_token(serve: Serve) -> None:
    engine = constraining("yes")
    url = serve(engine, dialect="hermes")
    body = {"prompt": ["Well?", "So?"], "guided_choice": ["yes", "no"]}
    assert post(url, "/v1/completions", body).json()["choices"][0]["text"] == "yes"
    assert all(takes(job, "no") and not takes(job, "<think>") for job in engine.jobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "strnig"}}, "guided_json"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"grammar": "root ::= nothing"}, "grammar"),
    ],
)
def test_what_does_not_compile_is_refused_before_anything_is_said(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    engine = constraining("")
    url = serve(engine)
    for streams in (False, True):
        response = post(url, PATH, {**HELLO, **fields, "stream": streams})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(param)
    assert engine.jobs == []


@pytest.mark.parametrize(("fields", "reason"), [(REQUIRED, "tool_calls"), (NAMED, "stop")])
def test_why_a_forced_call_ended(serve: Serve, fields: dict[str, Any], reason: str) -> None:
    url = serve(constraining(CALL), dialect="hermes")
    [choice] = post(url, PATH, {**HELLO, **fields}).json()["choices"]
    streamed = message_of(stream(url, PATH, {**HELLO, **fields}))
    assert told(choice["message"]) == told(streamed) == [("weather", '{"city": "Paris"}')]
    assert choice["finish_reason"] == streamed["finish_reason"] == reason


def test_a_model_that_knows_no_calls_writes_them_as_json(serve: Serve) -> None:
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    engine = constraining(call)
    url = serve(engine, dialect="plain")
    for message in (
        post(url, PATH, {**HELLO, **REQUIRED}).json()["choices"][0]["message"],
        message_of(stream(url, PATH, {**HELLO, **REQUIRED})),
    ):
        assert told(message) == [("weather", '{"city": "Paris"}')]
    assert takes(engine.jobs[0], call)
    [choice] = post(url, PATH, {**HELLO, "tools": [WEATHER]}).json()["choices"]
    assert told(choice["message"]) == [("weather", '{"city": "Paris"}')]


def test_a_custom_tool_gets_a_text(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT \\"é\\"\\n"}}\n</tool_call>'
    url = serve(constraining(call), dialect="hermes")
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "SELECT .*\n"}}
    body = {**HELLO, "tools": [{"type": "custom", "custom": {"name": "sql", "format": regex}}]}
    [written] = post(url, PATH, body).json()["choices"][0]["message"]["tool_calls"]
    assert written["custom"] == {"name": "sql", "input": 'SELECT "é"\n'}
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, PATH, body)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "sql")
    assert "".join(call["custom"]["input"] for call in calls) == 'SELECT "é"\n'


def test_the_text_of_a_custom_tool_is_in_its_grammar(serve: Serve) -> None:
    written = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}, ensure_ascii=False)
    call = f"<tool_call>\n{written}\n</tool_call>"
    engine = constraining(call)
    url = serve(engine, dialect="hermes")
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}}
    tool = {"type": "custom", "custom": {"name": "apply_patch", "format": lark}}
    for choice in ("auto", "required", tool):
        body = {**HELLO, "tools": [tool], "tool_choice": choice}
        [result] = post(url, PATH, body).json()["choices"][0]["message"]["tool_calls"]
        assert result["custom"] == {"name": "apply_patch", "input": PATCH}
        assert takes(engine.jobs[-1], call)
        assert not takes(engine.jobs[-1], call.replace("@@", "@"))


def test_a_grammar_of_a_custom_tool_that_cannot_be_enforced(serve: Serve) -> None:
    url = serve(constraining(""), dialect="hermes")
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"\n  | <|end|>'}}
    tools = [{"type": "custom", "custom": {"name": "f", "format": lark}}]
    reply = post(url, PATH, {**HELLO, "tools": tools})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("tools[0].custom.format", "invalid_grammar")
    assert "line 2: <|end|>" in error["message"]


def test_the_place_of_a_function_is_that_of_its_field(serve: Serve) -> None:
    url = serve(constraining(""), dialect="hermes")
    wrong = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    reply = post(url, PATH, {**HELLO, "functions": [wrong], "function_call": {"name": "f"}})
    assert reply.json()["error"]["param"] == "functions[0].parameters#/properties/a/not"


def test_a_constraint_that_fails_midway_is_an_error_and_no_answer(serve: Serve) -> None:
    card = ModelCard(name="scripted", max_model_len=4096, templates={"default": CHATML}, constrains=True)

    class BreakingEngine(ScriptedEngine):
        def _break(self, run: Any, fault: Any) -> None:
            self._end(run, "error", ConstraintFailed("The constraint took too long."))

    script = Script([*b"yes", END_ID], fault="exception", fault_at=2)
    url = serve(BreakingEngine(script, card=card))
    body = {**HELLO, "guided_choice": ["yes"]}
    whole = post(url, PATH, body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "constraint_failed")
    last = post(url, PATH, {**body, "stream": True}).text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "constraint_failed"


def test_a_schema_that_was_refused_does_not_harm_the_next(serve: Serve) -> None:
    url = serve(constraining("yes"))
    assert post(url, PATH, {**HELLO, "guided_regex": "("}).status_code == 400
    response = post(url, PATH, {**HELLO, "guided_choice": ["yes"], "stream": True})
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks(response)) == "yes"


def test_a_marker_that_the_answer_quotes_is_a_part_of_it(serve: Serve) -> None:
    quoted = json.dumps({"city": f"<think>{CALL}</think>"})
    url = serve(constraining(f"<think>\nHm.\n</think>\n\n{quoted}"), dialect="hermes")
    for fields in ({}, {"tools": [WEATHER]}):
        body = {**HELLO, "response_format": FORMAT, **fields}
        for message in (
            post(url, PATH, body).json()["choices"][0]["message"],
            message_of(stream(url, PATH, body)),
        ):
            assert (message["reasoning"], message["content"]) == ("Hm.", quoted)
            assert "tool_calls" not in message or not message["tool_calls"]


def allowed(job: Job, said: str) -> bytes:
    """The bytes that may come next after this."""
    assert job.constraint is not None
    matcher = job.constraint.new_matcher()
    row = np.zeros(259, np.float32)
    matcher.mask(row)
    for byte in said.encode():
        matcher.accept(byte)
        row = np.zeros(259, np.float32)
        matcher.mask(row)
    return bytes(int(id_) for id_ in np.flatnonzero(row == 0) if id_ < 256)


def test_reasoning_has_a_budget(serve: Serve) -> None:
    engine = constraining("<think>\nHm.\n</think>\n\nYes.")
    url = serve(engine, dialect="hermes")
    body = {**HELLO, "thinking_token_budget": 3}
    assert post(url, PATH, body).status_code == 200
    assert post(url, PATH, {**body, "response_format": FORMAT}).status_code == 200
    for job in engine.jobs:
        assert len(allowed(job, "<think>\nH")) > 90
        assert allowed(job, "<think>\nHm") == b"\n"
        assert allowed(job, "<think>\nHm\n<") == b"/"
    free, constrained = engine.jobs
    assert len(allowed(free, "<think>\nHm\n</think>\n\n")) == 256
    assert allowed(constrained, "<think>\nHm\n</think>\n\n") == b"{"


def test_no_effort_is_no_reasoning(serve: Serve) -> None:
    engine = constraining('{"city": "Rome"}')
    url = serve(engine, dialect="hermes")
    body = {**HELLO, "response_format": FORMAT, "reasoning_effort": "none"}
    assert post(url, PATH, body).status_code == 200
    assert allowed(engine.jobs[0], "") == b"{"


def test_a_budget_needs_an_engine_that_keeps_to_it(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Yes.")), dialect="hermes")
    error = post(url, PATH, {**HELLO, "thinking_token_budget": 3}).json()["error"]
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_field")
    assert post(url, PATH, {**HELLO, "reasoning_effort": "none"}).status_code == 200
