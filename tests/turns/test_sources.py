"""Constraints for engines that keep to them by themselves: what is handed over, and what is refused."""

import json
from typing import Any

import pytest

from dragoman.constrain.calls.tool_schemas import NOTHING
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.constraints import ConstraintBuilder
from dragoman.turns.spec import OutputConstraint, ParseOptions, ReasoningTokenLimit, ToolCallPolicy
from dragoman.types import ConstraintFormat, ConstraintSource
from tests.support.turns import spec

TOOLS = ({"type": "function", "function": {"name": "f"}},)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DIGIT = OutputConstraint(syntax="regex", value="[0-9]", param="regex")
ALL: tuple[ConstraintFormat, ...] = ("json_schema", "regex", "choice", "gbnf", "lark")
XGRAMMAR: tuple[ConstraintFormat, ...] = ("json_schema", "regex", "gbnf")
TEXT = ParseOptions(calls=False)


def source(
    *forms: ConstraintFormat,
    dialect: str = "plain",
    in_reasoning: bool = False,
    skips: bool = False,
    **fields: Any,
) -> ConstraintSource | None:
    card = ModelCard(name="m", max_model_len=99, constraint_formats=forms, constrains_after_reasoning=skips)
    constrainer = ConstraintBuilder(card, ByteTokenizer(), Limits())
    asked = spec(**fields)
    constrainer.check(asked)
    constraint = constrainer.constraint(asked, get_dialect(dialect), in_reasoning=in_reasoning)
    return constraint.source if constraint is not None else None


@pytest.mark.parametrize(
    ("wanted", "form", "text"),
    [
        (OutputConstraint(syntax="json_object", param="p"), "json_schema", '{"type": "object"}'),
        (OutputConstraint(syntax="json_schema", value=SCHEMA, param="p"), "json_schema", json.dumps(SCHEMA)),
        (OutputConstraint(syntax="json_schema", value="true", param="p"), "json_schema", "true"),
        (DIGIT, "regex", "[0-9]"),
        (OutputConstraint(syntax="choice", value=["a", 'b"'], param="p"), "choice", '["a", "b\\""]'),
        (OutputConstraint(syntax="gbnf", value='root ::= "a"', param="p"), "gbnf", 'root ::= "a"'),
        (
            OutputConstraint(syntax="gbnf", value='start ::= ";";', param="p"),
            "gbnf",
            'start ::= ";"\n\nroot ::= start\n',
        ),
        (OutputConstraint(syntax="lark", value='start: "a"', param="p"), "lark", 'start: "a"'),
    ],
)
def test_the_engine_gets_what_the_client_sent(
    wanted: OutputConstraint, form: ConstraintFormat, text: str
) -> None:
    assert source(*ALL, output_constraint=wanted) == ConstraintSource(form, text)


def test_a_choice_is_a_grammar_where_engines_know_no_choices() -> None:
    choice = OutputConstraint(syntax="choice", value=["ä\n", 'b"'], param="p")
    constraint_source = source("gbnf", output_constraint=choice)
    assert constraint_source is not None
    grammar = Constraint.from_gbnf(constraint_source.text)
    assert grammar.accepts("ä\n")
    assert grammar.accepts('b"')
    assert not grammar.accepts("b")


def test_what_has_no_form_of_the_engine_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        source("json_schema", "gbnf", output_constraint=DIGIT)
    assert (caught.value.param, caught.value.code) == ("regex", "unsupported_field")
    assert "json_schema, gbnf" in caught.value.message


def test_a_wrong_constraint_is_told_before_the_engine_sees_it() -> None:
    with pytest.raises(BadRequest) as caught:
        source(*ALL, output_constraint=OutputConstraint(syntax="regex", value="(", param="guided_regex"))
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(("skips", "in_reasoning"), [(True, True), (True, False), (False, False)])
def test_reasoning_comes_before_the_constraint_where_the_engine_can_wait(
    skips: bool, in_reasoning: bool
) -> None:
    constraint_source = source(
        *XGRAMMAR,
        dialect="hermes",
        skips=skips,
        in_reasoning=in_reasoning,
        output_constraint=DIGIT,
        parsing=TEXT,
    )
    assert constraint_source == ConstraintSource("regex", "[0-9]", after_reasoning=skips)


def test_no_reasoning_is_waited_for_where_there_is_none() -> None:
    off = ReasoningTokenLimit(tokens=0, param="reasoning_effort", soft=True)
    for fields in ({"parsing": None}, {"parsing": TEXT, "reasoning_limit": off}):
        constraint_source = source(*XGRAMMAR, dialect="hermes", skips=True, output_constraint=DIGIT, **fields)
        assert constraint_source == ConstraintSource("regex", "[0-9]")


def test_an_answer_that_is_in_reasoning_already_cannot_begin_with_the_constraint() -> None:
    with pytest.raises(BadRequest) as caught:
        source(*XGRAMMAR, dialect="hermes", in_reasoning=True, output_constraint=DIGIT, parsing=TEXT)
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("hermes", {"tool_policy": ToolCallPolicy(required=True), "parsing": ParseOptions(tools=TOOLS)}),
        ("hermes", {"output_constraint": DIGIT, "parsing": ParseOptions(tools=TOOLS)}),
        ("harmony", {"output_constraint": DIGIT, "parsing": TEXT}),
    ],
)
def test_whatever_is_more_than_text_is_a_whole_grammar(dialect: str, fields: dict[str, Any]) -> None:
    constraint_source = source(*ALL, dialect=dialect, **fields)
    assert constraint_source is not None
    assert constraint_source.format == "lark"
    with pytest.raises(BadRequest):
        source(*XGRAMMAR, dialect=dialect, **fields)


FORCED: dict[str, Any] = {"tool_policy": ToolCallPolicy(required=True), "parsing": ParseOptions(tools=TOOLS)}
CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "f", "arguments": ',
    "content": {"type": "json_schema", "json_schema": {"type": "object", **NOTHING}},
    "end": "}\n</tool_call>",
}
CALLS = {
    "type": "tags_with_separator",
    "tags": [CALL],
    "separator": "\n",
    "at_least_one": True,
    "stop_after_first": False,
}
THINKING = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
LAYOUT = {"type": "const_string", "value": "\n\n"}


def tagged(**fields: Any) -> tuple[dict[str, Any], bool]:
    constraint_source = source("structural_tag", dialect="hermes", **fields)
    assert constraint_source is not None
    result = json.loads(constraint_source.text)
    assert (constraint_source.format, result["type"]) == ("structural_tag", "structural_tag")
    return result["format"], constraint_source.after_reasoning


def test_tags_of_the_client_are_handed_over() -> None:
    structures = [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]
    older = OutputConstraint(
        syntax="structural_tag", value={"structures": structures, "triggers": ["<a"]}, param="response_format"
    )
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    newer = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}
    assert tagged(output_constraint=older) == (newer, False)


def test_a_forced_call_is_a_tag() -> None:
    assert tagged(skips=True, **FORCED) == (CALLS, True)


def test_reasoning_is_in_the_tag_where_the_engine_cannot_wait_for_its_end() -> None:
    begun = {"type": "sequence", "elements": [THINKING, LAYOUT, CALLS]}
    assert tagged(in_reasoning=True, **FORCED) == (begun, False)
    opened = {"type": "sequence", "elements": [{**THINKING, "begin": "<think>\n"}, LAYOUT, CALLS]}
    assert tagged(**FORCED) == ({"type": "or", "elements": [opened, CALLS]}, False)


def test_text_after_reasoning_is_a_tag_too() -> None:
    text = {"type": "regex", "pattern": "[0-9]"}
    begun = {"type": "sequence", "elements": [THINKING, LAYOUT, text]}
    assert tagged(in_reasoning=True, output_constraint=DIGIT, parsing=TEXT) == (begun, False)


def test_a_call_or_text() -> None:
    fields, _ = tagged(skips=True, output_constraint=DIGIT, parsing=ParseOptions(tools=TOOLS))
    assert fields == {
        "type": "or",
        "elements": [
            {
                **CALLS,
                "tags": [{**CALL, "content": {"type": "json_schema", "json_schema": {"type": "object"}}}],
            },
            {"type": "regex", "pattern": "[0-9]"},
        ],
    }


def test_a_strict_tool_that_may_be_called_is_triggered_by_its_marker() -> None:
    strict = ({"type": "function", "function": {"name": "f", "strict": True}},)
    fields, _ = tagged(skips=True, tool_policy=ToolCallPolicy(), parsing=ParseOptions(tools=strict))
    assert fields == {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [CALL],
        "at_least_one": False,
        "stop_after_first": False,
    }


@pytest.mark.parametrize("dialect", ["harmony", "glm45", "pythonic"])
def test_calls_that_tags_cannot_say_are_refused(dialect: str) -> None:
    with pytest.raises(BadRequest) as caught:
        source("structural_tag", dialect=dialect, **FORCED)
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_field")


def test_the_end_of_reasoning_cannot_be_handed_over() -> None:
    with pytest.raises(BadRequest) as caught:
        source(*ALL, reasoning_limit=ReasoningTokenLimit(tokens=1, param="thinking_budget"), parsing=TEXT)
    assert caught.value.param == "thinking_budget"


def test_one_call_at_most_needs_no_grammar() -> None:
    single = ParseOptions(tools=TOOLS, most_calls=1)
    assert source(*ALL, "structural_tag", dialect="hermes", parsing=single) is None
