from typing import Any

import pytest

from dragoman.constrain.vocabulary import GrammarMatcher
from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import BadRequest, ConstraintFailed
from dragoman.limits import Limits
from dragoman.turns.constrain import Constrainer
from dragoman.turns.plan import dialect_for
from dragoman.turns.spec import Calling, Reading, Thinking, TurnSpec, Wanted
from tests.support.turns import spec

TOOLS = ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}})
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
DIGIT = Wanted(syntax="regex", value="[0-9]", param="regex")


def constrainer(constrains: bool = True, limits: Limits | None = None) -> Constrainer:
    card = ModelCard(name="m", max_model_len=99, constrains=constrains)
    return Constrainer(card, ByteTokenizer(), limits or Limits())


def takes(asked: TurnSpec, text: str, dialect: str = "hermes", *, in_reasoning: bool = False) -> bool:
    made = constrainer().constraint(asked, get_dialect(dialect), in_reasoning=in_reasoning)
    assert made is not None
    matcher = made.start()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except ConstraintFailed:
        return False
    return matcher.accepting


def calls(**fields: Any) -> Reading:
    return Reading(tools=TOOLS, **fields)


@pytest.mark.parametrize(
    ("fields", "text", "good"),
    [
        ({"wanted": DIGIT}, "5", True),
        ({"wanted": DIGIT}, "<think>\n5\n</think>\n\n5", False),
        ({"wanted": DIGIT, "reading": Reading(calls=False)}, "<think>\n5\n</think>\n\n5", True),
        (
            {"wanted": DIGIT, "reading": Reading(calls=False, reasoning=False)},
            "<think>\n</think>\n\n5",
            False,
        ),
        ({"wanted": DIGIT, "reading": calls()}, CALL, True),
        ({"wanted": DIGIT, "reading": calls()}, "5", True),
        ({"wanted": DIGIT, "reading": calls(), "calling": Calling(required=True)}, "5", False),
        ({"reading": calls(), "calling": Calling(required=True, names=("g",))}, CALL, False),
        ({"reading": calls(), "calling": Calling(names=("g",))}, "Well.", True),
        ({"reading": calls(), "calling": Calling(names=("g",))}, CALL, False),
        ({"reading": calls(most_calls=1)}, f"{CALL}\n{CALL}", False),
    ],
)
def test_what_an_answer_may_be(fields: dict[str, Any], text: str, good: bool) -> None:
    assert takes(spec(**fields), text) is good


def test_a_compiled_constraint_is_kept_and_every_answer_walks_alone() -> None:
    made = constrainer()
    first = made.constraint(spec(wanted=DIGIT), get_dialect("plain"), in_reasoning=False)
    again = made.constraint(spec(wanted=DIGIT), get_dialect("plain"), in_reasoning=False)
    assert first is not None
    assert again is not None
    one, other = first.start(), again.start()
    one.accept(ord("1"))
    assert (one.over, other.over) == (True, False)
    assert isinstance(one, GrammarMatcher)


def test_one_call_at_most_needs_no_grammar() -> None:
    own = Dialect(name="own", models="", own=object())
    made = constrainer().constraint(spec(reading=calls(most_calls=1)), own, in_reasoning=False)
    assert made is None
    with pytest.raises(BadRequest):
        constrainer().constraint(
            spec(reading=calls(), calling=Calling(required=True)), own, in_reasoning=False
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"wanted": DIGIT}, "regex"),
        ({"calling": Calling(required=True, param="function_call")}, "function_call"),
        ({"thinking": Thinking(tokens=1, param="thinking_budget")}, "thinking_budget"),
    ],
)
def test_an_engine_that_cannot_is_not_asked(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        constrainer(constrains=False).check(spec(**fields))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_field")


def test_what_the_template_was_told_is_no_demand() -> None:
    soft = spec(thinking=Thinking(tokens=0, param="reasoning_effort", soft=True), reading=Reading())
    made = constrainer(constrains=False)
    made.check(soft)
    assert made.constraint(soft, get_dialect("hermes"), in_reasoning=True) is None
    assert constrainer().constraint(soft, get_dialect("plain"), in_reasoning=False) is None
    assert constrainer().constraint(soft, get_dialect("hermes"), in_reasoning=True) is not None


def test_limits_are_those_of_the_server() -> None:
    long = Wanted(syntax="regex", value="a" * 50, param="guided_regex")
    with pytest.raises(BadRequest) as caught:
        constrainer(limits=Limits(pattern_chars=40)).constraint(
            spec(wanted=long), get_dialect("plain"), in_reasoning=False
        )
    assert (caught.value.param, caught.value.code) == ("guided_regex", "limit_exceeded")


def test_who_knows_no_calls_writes_them_as_json() -> None:
    asked, not_asked = spec(reading=calls()), spec(reading=Reading(calls=False))
    assert dialect_for(asked, get_dialect("plain")).name == "json"
    assert dialect_for(asked, get_dialect("holo2")).reasoning == get_dialect("holo2").reasoning
    assert dialect_for(not_asked, get_dialect("plain")) is get_dialect("plain")
    assert dialect_for(asked, get_dialect("hermes")) is get_dialect("hermes")
