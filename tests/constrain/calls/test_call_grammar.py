"""The grammar of calls against the renderer and the reader, for every dialect that has calls."""

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from dragoman.constrain.calls.answer_grammar import answer_constraint
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.declarations import Dialect, TaggedCalls
from dragoman.dialects.parser import Parser, parse
from dragoman.dialects.registry import get_dialect, list_dialects
from dragoman.dialects.render import render
from dragoman.types import Answer, ToolCall, fold
from tests.support.laws import examples, tried
from tests.support.schemas import arguments, parameters
from tests.support.walks import Walker, WalkResult, special_tokens

NAMES = [name for name, dialect in list_dialects().items() if dialect.has_calls]
TOOLS = ("get_weather", "f", "f.g-2")
WALKS = 4
# The rest of the formats are held to their standards where they are declared.
FORMATS = FormatChecker(["ipv4", "ipv6", "uuid", "email"])

every_dialect = pytest.mark.parametrize("name", NAMES)
few = examples(4)


def tool(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if schema is None else {"name": name, "parameters": schema}
    return {"type": "function", "function": function}


@cache
def walker_of(name: str, by_id: bool) -> Walker:
    return Walker(get_dialect(name), special_tokens(get_dialect(name)) if by_id else ())


def answer(*calls: tuple[str, Any]) -> Answer:
    tool_calls = [
        ToolCall(id=None, name=name, arguments=json.dumps(value, ensure_ascii=False)) for name, value in calls
    ]
    return Answer(calls=tool_calls)


def said(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def read(
    dialect: Dialect, walked: WalkResult, walker: Walker, tools: list[dict[str, Any]], starts: bool
) -> Answer:
    by_id = {id_: text for text, id_ in walker.special.items()}
    parser = Parser(dialect, tools, starts, special_tokens=by_id)
    return fold(parser.feed(walked.tokens if by_id else walked.text) + parser.finish())


def check(answer: Answer, tools: list[dict[str, Any]], most: int | None) -> None:
    """Nothing but calls of declared tools, with arguments in their schemas."""
    schemas = {
        one["function"]["name"]: one["function"].get("parameters", {"maxProperties": 0}) for one in tools
    }
    assert answer.calls
    assert not answer.text.strip()
    assert most is None or len(answer.calls) <= most
    for name, value in said(answer):
        Draft202012Validator(schemas[name], format_checker=FORMATS).validate(value)


def held_back(dialect: Dialect, schema: Any, value: Any) -> bool:
    """Between tags, a string beside other types never begins like one of them: see docs/constraints.md."""
    if not dialect.calls or not isinstance(dialect.calls[0], TaggedCalls):
        return False
    if isinstance(value, str):
        text, first = json.dumps(schema), value.strip()[:1]
        bounded = any(word in text for word in ("imum", "multipleOf"))
        beside = any(word in text for word in ("anyOf", "oneOf", '"type": ['))
        return (bounded and first in (*"-0123456789",)) or (beside and first in (*'"{[(',))
    if isinstance(value, dict):
        return any(held_back(dialect, schema, inner) for inner in value.values())
    return isinstance(value, list) and any(held_back(dialect, schema, inner) for inner in value)


# The four laws


@every_dialect
def test_a_grammar_of_calls_may_be_handed_on(name: str) -> None:
    """By one server to another, which checks it like the grammar of any client."""
    properties = {"city": {"type": "string", "maxLength": 8}, "n": {"enum": [1, "a"]}}
    tools = [tool("f", {"type": "object", "properties": properties, "required": ["city"]}), tool("g", None)]
    constraint = answer_constraint(get_dialect(name), tools, choice="required")
    assert Constraint.from_lark(constraint.grammar) == constraint


@pytest.mark.thorough
@every_dialect
@few
@given(data=st.data())
def test_what_is_rendered_is_accepted(name: str, data: st.DataObject) -> None:
    dialect = get_dialect(name)
    schemas = {tool_name: data.draw(parameters) for tool_name in TOOLS}
    tools = [tool(tool_name, schema) for tool_name, schema in schemas.items()]
    grammar, accepted = answer_constraint(dialect, tools), 0
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=3))
        calls = [
            (tool_name, data.draw(arguments(schemas[tool_name], schemas[tool_name]))) for tool_name in chosen
        ]
        text = render(dialect, answer(*calls))
        # Some texts are another value than the one that was meant: 12 between tags is no string.
        never_written = any(held_back(dialect, schemas[who], result) for who, result in calls)
        if said(parse(text, dialect, tools)) == calls and not never_written:
            assert grammar.accepts(text), (text, tools)
            accepted += 1
    tried(accepted > 0)


@pytest.mark.thorough
@every_dialect
@few
@given(data=st.data(), by_id=st.booleans())
def test_what_is_accepted_is_read_as_valid_calls(name: str, data: st.DataObject, by_id: bool) -> None:
    dialect = get_dialect(name)
    tools = [tool(tool_name, data.draw(parameters)) for tool_name in TOOLS[:2]] + [tool(TOOLS[2], None)]
    walker = walker_of(name, by_id)
    starts = dialect.reasoning is not None and data.draw(st.booleans())
    parallel = data.draw(st.booleans())
    grammar = answer_constraint(
        dialect, tools, parallel=parallel, starts_in_reasoning=starts, special=walker.special
    )
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    complete = [walked for _ in range(WALKS) if (walked := walker.walk(grammar, chance)).complete]
    tried(bool(complete))
    for walked in complete:
        check(read(dialect, walked, walker, tools, starts), tools, None if parallel else 1)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}, "n": {"type": "integer", "minimum": 1}},
    "required": ["city", "n"],
}


@pytest.mark.thorough
@every_dialect
def test_wrong_calls_are_refused(name: str) -> None:
    dialect = get_dialect(name)
    tools = [tool("get_weather", WEATHER), tool("ping", None)]
    good = ("get_weather", {"city": "Paris", "n": 3})
    several = answer_constraint(dialect, tools)
    assert several.accepts(render(dialect, answer(good)))
    assert several.accepts(render(dialect, answer(good, ("ping", {}), good)))
    wrong: list[tuple[str, Any]] = [
        ("get_whether", {"city": "Paris", "n": 3}),
        ("ping", {"city": "Paris"}),
        ("get_weather", {}),
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Paris", "n": 0}),
        ("get_weather", {"city": "Paris", "n": "three"}),
        ("get_weather", {"city": "", "n": 3}),
        ("get_weather", {"city": "Paris", "n": 3, "more": 1}),
    ]
    for call in wrong:
        assert not several.accepts(render(dialect, answer(call))), call
        assert not several.accepts(render(dialect, answer(good, call))), call
    assert not several.accepts("")
    assert not several.accepts("Paris")
    single = answer_constraint(dialect, tools, parallel=False)
    assert single.accepts(render(dialect, answer(good)))
    assert not single.accepts(render(dialect, answer(good, good)))
    named = answer_constraint(dialect, tools, names=["ping"], parallel=False)
    assert named.accepts(render(dialect, answer(("ping", {}))))
    assert not named.accepts(render(dialect, answer(good)))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "kimi_k3"])
def test_a_value_holds_no_key(name: str) -> None:
    """The reader would take it for the next argument, before which a closing tag is missing."""
    dialect, tools = get_dialect(name), [tool("f", {"properties": {"a": {"type": "string"}, "b": {}}})]
    shape = dialect.calls[0]
    assert isinstance(shape, TaggedCalls)
    value = f"x{shape.key[0]}b{shape.key_end[0]}"
    assert answer_constraint(dialect, tools).accepts(render(dialect, answer(("f", {"a": "x"}))))
    assert not answer_constraint(dialect, tools).accepts(render(dialect, answer(("f", {"a": value}))))
