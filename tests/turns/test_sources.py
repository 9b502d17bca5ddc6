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
from dragoman.turns.constrain import Constrainer
from dragoman.turns.spec import Calling, Reading, Thinking, Wanted
from dragoman.types import ConstraintSource, SourceForm
from tests.support.turns import spec

TOOLS = ({"type": "function", "function": {"name": "f"}},)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DIGIT = Wanted(syntax="regex", value="[0-9]", param="regex")
ALL: tuple[SourceForm, ...] = ("json_schema", "regex", "choice", "gbnf", "lark")
XGRAMMAR: tuple[SourceForm, ...] = ("json_schema", "regex", "gbnf")
TEXT = Reading(calls=False)


def source(
    *forms: SourceForm,
    dialect: str = "plain",
    in_reasoning: bool = False,
    skips: bool = False,
    **fields: Any,
) -> ConstraintSource | None:
    card = ModelCard(name="m", max_model_len=99, sources=forms, skips_reasoning=skips)
    constrainer = Constrainer(card, ByteTokenizer(), Limits())
    asked = spec(**fields)
    constrainer.check(asked)
    made = constrainer.constraint(asked, get_dialect(dialect), in_reasoning=in_reasoning)
    return made.source if made is not None else None


@pytest.mark.parametrize(
    ("wanted", "form", "text"),
    [
        (Wanted(syntax="json_object", param="p"), "json_schema", '{"type": "object"}'),
        (Wanted(syntax="json_schema", value=SCHEMA, param="p"), "json_schema", json.dumps(SCHEMA)),
        (Wanted(syntax="json_schema", value="true", param="p"), "json_schema", "true"),
        (DIGIT, "regex", "[0-9]"),
        (Wanted(syntax="choice", value=["a", 'b"'], param="p"), "choice", '["a", "b\\""]'),
        (Wanted(syntax="gbnf", value='root ::= "a"', param="p"), "gbnf", 'root ::= "a"'),
        (
            Wanted(syntax="gbnf", value='start ::= ";";', param="p"),
            "gbnf",
            'start ::= ";"\n\nroot ::= start\n',
        ),
        (Wanted(syntax="lark", value='start: "a"', param="p"), "lark", 'start: "a"'),
    ],
)
def test_the_engine_gets_what_the_client_sent(wanted: Wanted, form: SourceForm, text: str) -> None:
    assert source(*ALL, wanted=wanted) == ConstraintSource(form, text)


def test_a_choice_is_a_grammar_where_engines_know_no_choices() -> None:
    choice = Wanted(syntax="choice", value=["ä\n", 'b"'], param="p")
    made = source("gbnf", wanted=choice)
    assert made is not None
    grammar = Constraint.from_gbnf(made.text)
    assert grammar.accepts("ä\n")
    assert grammar.accepts('b"')
    assert not grammar.accepts("b")


def test_what_has_no_form_of_the_engine_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        source("json_schema", "gbnf", wanted=DIGIT)
    assert (caught.value.param, caught.value.code) == ("regex", "unsupported_field")
    assert "json_schema, gbnf" in caught.value.message


def test_a_wrong_constraint_is_told_before_the_engine_sees_it() -> None:
    with pytest.raises(BadRequest) as caught:
        source(*ALL, wanted=Wanted(syntax="regex", value="(", param="guided_regex"))
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(("skips", "in_reasoning"), [(True, True), (True, False), (False, False)])
def test_reasoning_comes_before_the_constraint_where_the_engine_can_wait(
    skips: bool, in_reasoning: bool
) -> None:
    made = source(
        *XGRAMMAR, dialect="hermes", skips=skips, in_reasoning=in_reasoning, wanted=DIGIT, reading=TEXT
    )
    assert made == ConstraintSource("regex", "[0-9]", after_reasoning=skips)


def test_no_reasoning_is_waited_for_where_there_is_none() -> None:
    off = Thinking(tokens=0, param="reasoning_effort", soft=True)
    for fields in ({"reading": None}, {"reading": TEXT, "thinking": off}):
        made = source(*XGRAMMAR, dialect="hermes", skips=True, wanted=DIGIT, **fields)
        assert made == ConstraintSource("regex", "[0-9]")


def test_an_answer_that_is_in_reasoning_already_cannot_begin_with_the_constraint() -> None:
    with pytest.raises(BadRequest) as caught:
        source(*XGRAMMAR, dialect="hermes", in_reasoning=True, wanted=DIGIT, reading=TEXT)
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("hermes", {"calling": Calling(required=True), "reading": Reading(tools=TOOLS)}),
        ("hermes", {"wanted": DIGIT, "reading": Reading(tools=TOOLS)}),
        ("harmony", {"wanted": DIGIT, "reading": TEXT}),
    ],
)
def test_whatever_is_more_than_text_is_a_whole_grammar(dialect: str, fields: dict[str, Any]) -> None:
    made = source(*ALL, dialect=dialect, **fields)
    assert made is not None
    assert made.form == "lark"
    with pytest.raises(BadRequest):
        source(*XGRAMMAR, dialect=dialect, **fields)


FORCED: dict[str, Any] = {"calling": Calling(required=True), "reading": Reading(tools=TOOLS)}
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
    made = source("structural_tag", dialect="hermes", **fields)
    assert made is not None
    told = json.loads(made.text)
    assert (made.form, told["type"]) == ("structural_tag", "structural_tag")
    return told["format"], made.after_reasoning


def test_tags_of_the_client_are_handed_over() -> None:
    structures = [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]
    older = Wanted(
        syntax="structural_tag", value={"structures": structures, "triggers": ["<a"]}, param="response_format"
    )
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    newer = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}
    assert tagged(wanted=older) == (newer, False)


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
    assert tagged(in_reasoning=True, wanted=DIGIT, reading=TEXT) == (begun, False)


def test_a_call_or_text() -> None:
    made, _ = tagged(skips=True, wanted=DIGIT, reading=Reading(tools=TOOLS))
    assert made == {
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
    made, _ = tagged(skips=True, calling=Calling(), reading=Reading(tools=strict))
    assert made == {
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
        source(*ALL, thinking=Thinking(tokens=1, param="thinking_budget"), reading=TEXT)
    assert caught.value.param == "thinking_budget"


def test_one_call_at_most_needs_no_grammar() -> None:
    single = Reading(tools=TOOLS, most_calls=1)
    assert source(*ALL, "structural_tag", dialect="hermes", reading=single) is None
