"""Calls of tools whose text is in a grammar, in every dialect."""

import json
import random

import pytest

from dragoman.constrain.calls.answer_grammar import CallMode, answer_constraint
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.errors import BadRequest
from dragoman.types import Answer, ToolCall
from tests.constrain.calls.test_call_grammar import NAMES, read, walker_of
from tests.support.apply_patch import APPLY_PATCH, NO_PATCHES, PATCH, as_tool

pytestmark = pytest.mark.thorough

CUSTOM = ["apply_patch"]
ONE_OF_EACH = ["hermes", "kimi_k2", "qwen3_coder", "pythonic", "gemma4", "harmony", "minimax_m3"]
every_way = pytest.mark.parametrize(
    ("name", "choice"), [*((name, "required") for name in NAMES), *((name, "auto") for name in ONE_OF_EACH)]
)
TOOLS = [as_tool("apply_patch", APPLY_PATCH)]
SMALL = 'start: "say \\"" WORD "\\"\\n" ("{" WORD "}")?\nWORD: /[a-z \\\\\t]{1,4}/'


def call(text: str) -> Answer:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return Answer(calls=[ToolCall(id=None, name="apply_patch", arguments=arguments)])


@every_way
def test_patches_are_accepted_and_nothing_else(name: str, choice: CallMode) -> None:
    dialect = get_dialect(name)
    grammar = answer_constraint(dialect, TOOLS, choice=choice, strict=CUSTOM, custom=CUSTOM)
    assert grammar.accepts(render(dialect, call(PATCH)))
    assert grammar.accepts(render(dialect, call(PATCH + "\n")))
    for text in NO_PATCHES:
        assert not grammar.accepts(render(dialect, call(text))), text


@every_way
def test_what_is_read_back_is_in_the_language(name: str, choice: CallMode) -> None:
    """Some markers are special tokens if a call is required, and text if not."""
    dialect, walker, chance = get_dialect(name), walker_of(name, choice == "required"), random.Random(7)
    tools, plain = [as_tool("f", SMALL)], Constraint.from_lark(SMALL)
    grammar = answer_constraint(dialect, tools, parallel=False, custom=["f"], special=walker.special)
    for _ in range(3):
        walked = walker.walk(grammar, chance)
        if walked.complete:
            [tool_call] = read(dialect, walked, walker, tools, False).calls
            assert plain.accepts(json.loads(tool_call.arguments)["input"])


def test_the_word_means_nothing_in_the_schema_of_a_function() -> None:
    grammar = answer_constraint(get_dialect("hermes"), [as_tool("f", "no grammar")])
    written = render(
        get_dialect("hermes"), Answer(calls=[ToolCall(id=None, name="f", arguments='{"input": "x"}')])
    )
    assert grammar.accepts(written)


@pytest.mark.parametrize("grammar", ["start: ", "start: x", 'start: "a"\nx: %json {', "start: <|end|>"])
def test_errors_name_the_tool(grammar: str) -> None:
    tools = [as_tool("g", 'start: "a"'), as_tool("f", grammar + '\ny: "(')]
    with pytest.raises(BadRequest) as caught:
        places = ["tools[0].custom.parameters", "tools[1].custom.parameters"]
        answer_constraint(get_dialect("hermes"), tools, custom=["f", "g"], pointers=places)
    assert caught.value.param == "tools[1].custom.format"


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /" + "a?" * 30_000 + "/",
        "start: a0\n" + "\n".join(f"a{number}: a{number + 1}" for number in range(3000)) + '\na3000: "x"',
        "start: A0\n" + "\n".join(f"A{number}: A{number + 1}" for number in range(3000)) + '\nA3000: "x"',
        "start: " + '("\\n" | "b"?) ' * 4000,
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        "start: " + '"a" ' * 20_000,
    ],
    ids=["expression", "rules", "terminals", "optional", "brackets", "long"],
)
def test_what_would_cost_too_much_is_refused(grammar: str) -> None:
    with pytest.raises(BadRequest):
        answer_constraint(get_dialect("hermes"), [as_tool("f", grammar)], custom=["f"])
