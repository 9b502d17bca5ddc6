from typing import Any

import pytest

from dragoman.constrain.vocabulary import GrammarMatcher
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import BadRequest, ConstraintFailed
from dragoman.limits import Limits
from dragoman.turns.constraints import ConstraintBuilder
from dragoman.turns.plan import dialect_for
from dragoman.turns.spec import OutputConstraint, ParseOptions, ReasoningTokenLimit, ToolCallPolicy, TurnSpec
from tests.support.turns import spec

TOOLS = ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}})
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
DIGIT = OutputConstraint(syntax="regex", value="[0-9]", param="regex")


def constrainer(constrains: bool = True, limits: Limits | None = None) -> ConstraintBuilder:
    card = ModelCard(name="m", max_model_len=99, constrains=constrains)
    return ConstraintBuilder(card, ByteTokenizer(), limits or Limits())


def takes(asked: TurnSpec, text: str, dialect: str = "hermes", *, in_reasoning: bool = False) -> bool:
    constraint = constrainer().constraint(asked, get_dialect(dialect), in_reasoning=in_reasoning)
    assert constraint is not None
    matcher = constraint.new_matcher()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except ConstraintFailed:
        return False
    return matcher.is_accepting


def calls(**fields: Any) -> ParseOptions:
    return ParseOptions(tools=TOOLS, **fields)


@pytest.mark.parametrize(
    ("fields", "text", "good"),
    [
        ({"output_constraint": DIGIT}, "5", True),
        ({"output_constraint": DIGIT}, "<think>\n5\n</think>\n\n5", False),
        (
            {"output_constraint": DIGIT, "parsing": ParseOptions(calls=False)},
            "<think>\n5\n</think>\n\n5",
            True,
        ),
        (
            {"output_constraint": DIGIT, "parsing": ParseOptions(calls=False, reasoning=False)},
            "<think>\n</think>\n\n5",
            False,
        ),
        ({"output_constraint": DIGIT, "parsing": calls()}, CALL, True),
        ({"output_constraint": DIGIT, "parsing": calls()}, "5", True),
        (
            {"output_constraint": DIGIT, "parsing": calls(), "tool_policy": ToolCallPolicy(required=True)},
            "5",
            False,
        ),
        ({"parsing": calls(), "tool_policy": ToolCallPolicy(required=True, names=("g",))}, CALL, False),
        ({"parsing": calls(), "tool_policy": ToolCallPolicy(names=("g",))}, "Well.", True),
        ({"parsing": calls(), "tool_policy": ToolCallPolicy(names=("g",))}, CALL, False),
        ({"parsing": calls(most_calls=1)}, f"{CALL}\n{CALL}", False),
    ],
)
def test_what_an_answer_may_be(fields: dict[str, Any], text: str, good: bool) -> None:
    assert takes(spec(**fields), text) is good


def test_a_compiled_constraint_is_kept_and_every_answer_walks_alone() -> None:
    builder = constrainer()
    first = builder.constraint(spec(output_constraint=DIGIT), get_dialect("plain"), in_reasoning=False)
    again = builder.constraint(spec(output_constraint=DIGIT), get_dialect("plain"), in_reasoning=False)
    assert first is not None
    assert again is not None
    one, other = first.new_matcher(), again.new_matcher()
    one.accept(ord("1"))
    assert (one.is_complete, other.is_complete) == (True, False)
    assert isinstance(one, GrammarMatcher)


def test_one_call_at_most_needs_no_grammar() -> None:
    own = Dialect(name="own", models="", response_template=object())
    constraint = constrainer().constraint(spec(parsing=calls(most_calls=1)), own, in_reasoning=False)
    assert constraint is None
    with pytest.raises(BadRequest):
        constrainer().constraint(
            spec(parsing=calls(), tool_policy=ToolCallPolicy(required=True)), own, in_reasoning=False
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_constraint": DIGIT}, "regex"),
        ({"tool_policy": ToolCallPolicy(required=True, param="function_call")}, "function_call"),
        ({"reasoning_limit": ReasoningTokenLimit(tokens=1, param="thinking_budget")}, "thinking_budget"),
    ],
)
def test_an_engine_that_cannot_is_not_asked(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        constrainer(constrains=False).check(spec(**fields))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_field")


def test_what_the_template_was_told_is_no_demand() -> None:
    soft = spec(
        reasoning_limit=ReasoningTokenLimit(tokens=0, param="reasoning_effort", soft=True),
        parsing=ParseOptions(),
    )
    builder = constrainer(constrains=False)
    builder.check(soft)
    assert builder.constraint(soft, get_dialect("hermes"), in_reasoning=True) is None
    assert constrainer().constraint(soft, get_dialect("plain"), in_reasoning=False) is None
    assert constrainer().constraint(soft, get_dialect("hermes"), in_reasoning=True) is not None


def test_limits_are_those_of_the_server() -> None:
    long = OutputConstraint(syntax="regex", value="a" * 50, param="guided_regex")
    with pytest.raises(BadRequest) as caught:
        constrainer(limits=Limits(pattern_chars=40)).constraint(
            spec(output_constraint=long), get_dialect("plain"), in_reasoning=False
        )
    assert (caught.value.param, caught.value.code) == ("guided_regex", "limit_exceeded")


def test_who_knows_no_calls_writes_them_as_json() -> None:
    asked, not_asked = spec(parsing=calls()), spec(parsing=ParseOptions(calls=False))
    assert dialect_for(asked, get_dialect("plain")).name == "json"
    assert dialect_for(asked, get_dialect("holo2")).reasoning == get_dialect("holo2").reasoning
    assert dialect_for(not_asked, get_dialect("plain")) is get_dialect("plain")
    assert dialect_for(asked, get_dialect("hermes")) is get_dialect("hermes")
