"""The grammar of a whole answer: reasoning before it, text beside calls, and what is refused."""

import json
import random
from typing import Any

import pytest

from dragoman.constrain.calls.answer_grammar import answer_constraint
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.marker_tables import compile_dialect
from dragoman.dialects.parser import parse
from dragoman.dialects.registry import get_dialect, list_dialects
from dragoman.dialects.render import render
from dragoman.dialects.schema import ToolDeclarations
from dragoman.dialects.state_machine import AnswerStateMachine
from dragoman.errors import BadRequest
from dragoman.types import Answer, ToolCall, fold
from tests.support.walks import Walker, WalkResult, special_tokens

pytestmark = pytest.mark.thorough

NAMES = [name for name, dialect in list_dialects().items() if dialect.has_calls]
BARE = ("json", "llama3_json", "llama4_pythonic", "pythonic", "sarashina", "xlam")
"""Their calls have no marker."""
every_dialect = pytest.mark.parametrize("name", NAMES)
by_id = pytest.mark.parametrize("by_id", [False, True], ids=["text", "ids"])


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


F = tool("f", properties={"a": {"type": "integer"}}, required=["a"])
G = tool("g", properties={"s": {"type": "string"}})
TOOLS = [F, G]
SCHEMA = Constraint.from_json_schema(
    {
        "type": "object",
        "properties": {"k": {"enum": ["v", "w"]}},
        "required": ["k"],
        "additionalProperties": False,
    }
)


def call(name: str, value: Any) -> ToolCall:
    return ToolCall(id=None, name=name, arguments=json.dumps(value))


def spelled(dialect: Dialect, walked: WalkResult, walker: Walker, *, verbatim: bool) -> Answer:
    compiled = compile_dialect(dialect, frozenset(walker.special), json_answer=verbatim)
    known = {id_: text for text, id_ in walker.special.items()}
    text = "".join(
        compiled.sentinels.get(known[id_], "") if id_ in known else piece for id_, piece in walked.tokens
    )
    machine = AnswerStateMachine(compiled, ToolDeclarations(TOOLS), verbatim=verbatim)
    return fold([*machine.feed(text), *machine.finish()])


def check(answer: Answer) -> None:
    for tool_call in answer.calls:
        value = json.loads(tool_call.arguments)
        assert tool_call.name in ("f", "g")
        assert tool_call.name == "g" or isinstance(value["a"], int)
        assert tool_call.name == "f" or all(
            key == "s" and isinstance(text, str) for key, text in value.items()
        )


@every_dialect
def test_text_and_calls_in_turn(name: str) -> None:
    dialect = get_dialect(name)
    grammar = answer_constraint(dialect, TOOLS, choice="auto")
    one, two, wrong = call("f", {"a": 1}), call("g", {"s": "x"}), call("f", {"a": "z"})
    for answer in (
        Answer(calls=[one]),
        Answer(calls=[one, two]),
        Answer(text="hello"),
        Answer(text="hello", calls=[two]),
        Answer(reasoning="hm", text="hello"),
        Answer(reasoning="hm", calls=[one]),
    ):
        assert grammar.accepts(render(dialect, answer)), answer
    for answer in (Answer(calls=[wrong]), Answer(text="x", calls=[wrong]), Answer(calls=[call("h", {})])):
        assert not grammar.accepts(render(dialect, answer)), answer
    single = answer_constraint(dialect, TOOLS, choice="auto", parallel=False)
    assert single.accepts(render(dialect, Answer(text="hello", calls=[two])))
    assert not single.accepts(render(dialect, Answer(calls=[one, two])))


@every_dialect
def test_only_strict_tools_are_held_to_their_schemas_under_auto(name: str) -> None:
    dialect = get_dialect(name)
    grammar = answer_constraint(dialect, TOOLS, choice="auto", strict=["g"])
    assert not grammar.accepts(render(dialect, Answer(calls=[call("g", {"t": 1})])))
    free = grammar.accepts(render(dialect, Answer(calls=[call("f", {"b": "z"})])))
    # In a tree of tags all names are known beforehand.
    assert free == (name != "minimax_m3")


@every_dialect
@by_id
def test_whatever_is_written_under_auto_holds_no_other_calls(name: str, by_id: bool) -> None:
    dialect, chance = get_dialect(name), random.Random(name)
    walker = Walker(dialect, special_tokens(dialect) if by_id else ())
    grammar = answer_constraint(dialect, TOOLS, choice="auto", special=walker.special)
    for _ in range(12):
        walked = walker.walk(grammar, chance, most=400)
        if walked.complete:
            check(spelled(dialect, walked, walker, verbatim=False))


@every_dialect
@by_id
def test_text_in_a_schema_beside_calls(name: str, by_id: bool) -> None:
    dialect, chance = get_dialect(name), random.Random(name)
    walker = Walker(dialect, special_tokens(dialect) if by_id else ())
    if name in BARE:
        with pytest.raises(BadRequest, match="without a marker"):
            answer_constraint(dialect, TOOLS, choice="auto", text=SCHEMA)
        return
    grammar = answer_constraint(dialect, TOOLS, choice="auto", text=SCHEMA, special=walker.special)
    for _ in range(6):
        walked = walker.walk(grammar, chance)
        if walked.complete:
            answer = spelled(dialect, walked, walker, verbatim=True)
            check(answer)
            assert not answer.text.strip() if answer.calls else json.loads(answer.text)["k"] in ("v", "w")


@pytest.mark.parametrize("name", list_dialects())
def test_text_in_a_schema_after_reasoning(name: str) -> None:
    dialect = get_dialect(name)
    if dialect.prepends:
        return
    grammar = answer_constraint(dialect, choice="none", text=SCHEMA)
    assert grammar.accepts(render(dialect, Answer(text='{"k": "v"}')))
    assert grammar.accepts(render(dialect, Answer(reasoning="hm", text='{"k": "v"}')))
    assert not grammar.accepts(render(dialect, Answer(reasoning="hm", text='{"k": "x"}')))
    assert not grammar.accepts(render(dialect, Answer(text="hello")))


@pytest.mark.parametrize("name", [name for name in NAMES if get_dialect(name).reasoning])
def test_an_answer_that_begins_inside_of_reasoning(name: str) -> None:
    dialect = get_dialect(name)
    thinking = dialect.reasoning
    assert thinking is not None
    grammar = answer_constraint(dialect, TOOLS, starts_in_reasoning=True)
    written = render(dialect, Answer(calls=[call("f", {"a": 1})]))
    assert grammar.accepts("so be it" + thinking.close[0] + written)
    assert not grammar.accepts(written)
    assert not grammar.accepts("so be it" + written)
    assert parse("so be it" + thinking.close[0] + written, dialect, TOOLS, True).calls


NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["name"],
}


@every_dialect
def test_a_schema_that_refers_to_itself(name: str) -> None:
    dialect = get_dialect(name)
    tree = tool("f", properties={"tree": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": NODE}})
    grammar = answer_constraint(dialect, [tree])
    parts = [{"name": "b"}, {"name": "c", "parts": [{"name": "d"}]}]
    good = {"tree": {"name": "a", "parts": parts}}
    assert grammar.accepts(render(dialect, Answer(calls=[call("f", good)])))
    for wrong in ({"tree": {"parts": parts}}, {"tree": {"name": "a", "parts": [{}]}}):
        assert not grammar.accepts(render(dialect, Answer(calls=[call("f", wrong)])))


@every_dialect
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
        ({"type": "string", "format": "colour"}, "format"),
        ({"type": "string", "maxLenght": 1}, "maxLenght"),
        ({"$ref": "#/$defs/none"}, "$ref"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(name: str, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        answer_constraint(get_dialect(name), [F, tool("lookup", properties={"x": schema})])
    assert caught.value.param == f"tools[1].function.parameters#/properties/x/{place}"
    assert "lookup" in caught.value.message


def test_what_a_syntax_cannot_hold_is_refused() -> None:
    odd = tool("f", properties={"a b<": {"type": "string"}})
    with pytest.raises(BadRequest, match="cannot be written"):
        answer_constraint(get_dialect("qwen3_coder"), [odd])
    with pytest.raises(BadRequest, match="is not a valid keyword argument"):
        answer_constraint(get_dialect("pythonic"), [odd])
    tagged = tool("f", properties={"a": {"enum": ["x", "y</parameter>z"]}})
    with pytest.raises(BadRequest, match="its own closing tag"):
        answer_constraint(get_dialect("qwen3_coder"), [tagged])
    with pytest.raises(BadRequest, match="name 'get weather'") as caught:
        answer_constraint(get_dialect("glm47"), [F, tool("get weather")])
    assert caught.value.param == "tools[1].function.name"
    with pytest.raises(BadRequest, match="cannot be forced"):
        answer_constraint(get_dialect("plain"), [F])


def test_a_string_beside_other_types_is_not_taken_for_one() -> None:
    union = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10, "maximum": 99}]}
    dialect, tools = get_dialect("qwen3_coder"), [tool("f", properties={"a": union}, required=["a"])]
    grammar = answer_constraint(dialect, tools)
    for value in ("text", "12 apples", 42):
        assert grammar.accepts(render(dialect, Answer(calls=[call("f", {"a": value})]))), value
    # It would be read as the number that the schema forbids.
    assert not grammar.accepts(render(dialect, Answer(calls=[call("f", {"a": "5"})])))


def test_properties_that_are_not_declared_are_written_only_where_the_schema_says_so() -> None:
    dialect = get_dialect("qwen3_coder")
    extra = Answer(calls=[call("f", {"a": 1, "more": "x"})])
    assert not answer_constraint(dialect, [F]).accepts(render(dialect, extra))
    opened = tool("f", properties={"a": {"type": "integer"}}, additionalProperties={"type": "string"})
    assert answer_constraint(dialect, [opened]).accepts(render(dialect, extra))


def test_a_library_asks_by_name() -> None:
    grammar = Constraint.from_dialect("hermes", TOOLS, parallel=False)
    assert grammar.accepts('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
