"""The laws of dialects, for every one of them."""

import json
import random
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dragoman.dialects.declarations import (
    BraceCalls,
    Dialect,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    PythonObjects,
    TaggedCalls,
    TreeCalls,
)
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.types import Answer
from tests.support.dialects import NAMES, call, cut, markers, pieces, read, soup, told, tool, valued
from tests.support.laws import examples, tried


def invented(name: str, key: str, key_end: str, value_end: str, value: str = "") -> Dialect:
    """Nobody speaks so: layout in all places, which a family yet to come may have."""
    shape = TaggedCalls(
        open=("<f>",), then=("\n",), close=("</f>",),
        key=(key,), key_end=(key_end,), value=value, value_end=(value_end,),
    )  # fmt: skip
    return Dialect(name=name, models="", calls=(shape,))


INVENTED = (
    invented("lines", "- ", ": ", "\n"),
    invented("wide", " * ", " = ", " ;\n"),
    invented("paragraphs", "# ", "\n", "\n\n", value=" "),
)
DIALECTS = (*map(get_dialect, NAMES), *INVENTED)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)

# Law 1


@every_dialect
@examples(20)
@given(data=st.data(), starts=st.booleans(), seed=st.integers(0, 2**32))
def test_cutting_changes_nothing(dialect: Dialect, data: st.DataObject, starts: bool, seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(data.draw(st.lists(st.sampled_from(pieces(dialect)), min_size=1, max_size=12)))
    whole = told(read(dialect, [text], starts_in_reasoning=starts))
    for parts in (list(text), cut(text, chance), cut(text, chance), cut(text, chance)):
        assert told(read(dialect, parts, starts_in_reasoning=starts)) == whole


@every_dialect
@examples(10)
@given(seed=st.integers(0, 2**32), calls=st.booleans(), reasoning=st.booleans())
def test_cutting_changes_nothing_with_parts_switched_off(
    dialect: Dialect, seed: int, calls: bool, reasoning: bool
) -> None:
    chance = random.Random(seed)
    text = soup(dialect, chance)
    whole = told(read(dialect, [text], calls=calls, reasoning=reasoning))
    assert told(read(dialect, cut(text, chance), calls=calls, reasoning=reasoning)) == whole


# Law 3

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
names = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
arguments = st.dictionaries(keys, values, max_size=4)
hostile = st.sampled_from(
    [
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        "</",
        "|",
        "\n",
        " ",
        "🚀",
        "é",
        "a",
        "1",
        "null",
        ",",
        ":",
    ]
)
strings = st.lists(hostile, max_size=12).map("".join)
hostile_arguments = st.dictionaries(keys, strings, min_size=1, max_size=3)


def schema_of(value: Any) -> dict[str, Any]:
    """The schema that a careful author would have written for the value."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_of(inner) for key, inner in value.items()}}
    if isinstance(value, list):
        items = [schema_of(inner) for inner in value]
        return {"type": "array", "items": items[0] if items and all(one == items[0] for one in items) else {}}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": kinds[type(value)]}


def holds(dialect: Dialect, text: str) -> bool:
    """Whether a text can stand in the dialect as text: it has nothing in it that could be a marker."""
    return not any(mark.strip()[0] in text for mark in markers(dialect)) and text == text.strip()


def speaks(dialect: Dialect) -> tuple[bool, bool]:
    """Whether it has reasoning, and calls."""
    channels = dialect.channels
    return (
        dialect.reasoning is not None or bool(channels and channels.written[0]),
        bool(dialect.calls) or channels is not None,
    )


def can_hold(dialect: Dialect, given: dict[str, Any]) -> bool:
    """Some syntaxes have no way to write some values, because they have no escapes."""
    shape = dialect.calls[0] if dialect.calls else None
    texts = flat_strings(given)
    if isinstance(shape, BraceCalls):
        return not any(shape.quote in text for text in texts)
    if not isinstance(shape, TaggedCalls):
        return True
    # Of an end that is all layout nothing can be stripped; the end of a value may look like its beginning.
    lead = shape.lead if isinstance(shape, TreeCalls) else ""
    ends = [end.strip() or end for end in shape.value_end] + [lead or "]]>", "Ġ", "Ċ"]
    begins_early = any((text + end).index(end) < len(text) for text in texts for end in ends)
    return not begins_early and not (lead and _has_untypable(given))


def flat_strings(given: Any) -> list[str]:
    if isinstance(given, dict):
        return [text for value in given.values() for text in flat_strings(value)]
    if isinstance(given, list):
        return [text for value in given for text in flat_strings(value)]
    return [given] if isinstance(given, str) else []


def _has_untypable(given: Any) -> bool:
    """A tree of tags knows no list of mixed types, and no empty object without a schema."""
    if isinstance(given, dict):
        return any(_has_untypable(value) for value in given.values()) or "item" in given
    if isinstance(given, list):
        shapes = {json.dumps(schema_of(value), sort_keys=True) for value in given}
        return len(shapes) > 1 or any(map(_has_untypable, given))
    return False


@every_dialect
@examples(12)
@given(
    text=words,
    reasoning=words,
    made=st.lists(st.tuples(names, hostile_arguments | arguments), min_size=1, max_size=3),
)
@example(text="Hi.", reasoning="Hm.", made=[])
@example(text="", reasoning="", made=[("f", {})])
@example(text="Hi.", reasoning="Hm.", made=[("f", {"a": ""}), ("g", {"b": "  x\n"})])
def test_what_is_rendered_is_parsed_back(
    dialect: Dialect, text: str, reasoning: str, made: list[tuple[str, dict[str, Any]]]
) -> None:
    reasons, calls = speaks(dialect)
    made = [one for one in made if can_hold(dialect, one[1])] if calls else []
    tried(not calls or any("".join(flat_strings(fields)) for _, fields in made))
    reasoning = reasoning if reasons else ""
    assume(holds(dialect, text) and holds(dialect, reasoning))
    if dialect.prepends:
        text = dialect.prepends + text
    if dialect.reasoning and dialect.reasoning.preface and reasoning:
        reasoning = reasoning.removeprefix(dialect.reasoning.preface)
    answer = Answer(
        text=text,
        reasoning=reasoning,
        calls=[call(who, json.dumps(mapping, ensure_ascii=False)) for who, mapping in made],
    )
    tools = [tool(who, **schema_of(result)["properties"]) for who, result in made]
    assume(len({who for who, _ in made}) == len(made))
    assert valued(read(dialect, [render(dialect, answer)], tools=tools)) == valued(answer)


# Law 8


@every_dialect
@examples(10)
@given(text=words)
def test_prose_passes_as_it_is(dialect: Dialect, text: str) -> None:
    assume(holds(dialect, text))
    assert read(dialect, list(text)).text == dialect.prepends + text


@every_dialect
def test_a_marker_in_prose_is_prose_and_holds_nothing_up(dialect: Dialect) -> None:
    """Whatever marker is quoted, the stream goes on after it within a name's length."""
    for mark in markers(dialect):
        parser = Parser(dialect)
        behind = longest = 0
        for character in f"Write {mark} and then go on, as you know, with many more words of plain prose.":
            behind += 1
            events = parser.feed(character)
            longest = max(longest, behind)
            behind = 0 if events else behind
        assert longest <= len(mark) + 40, mark


# Law 9


def is_json(dialect: Dialect) -> bool:
    shape = dialect.calls[0] if dialect.calls else None
    if isinstance(shape, JsonCalls):
        return not isinstance(shape, PythonObjects)
    return isinstance(shape, NamedCalls) or (dialect.channels is not None and shape is None)


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if is_json(each)], ids=lambda each: each.name)
@examples(12)
@given(
    given=arguments, spaces=st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " :\t")]), ascii=st.booleans()
)
def test_json_arguments_keep_every_byte(
    dialect: Dialect, given: dict[str, Any], spaces: tuple[str, str], ascii: bool
) -> None:
    written = json.dumps(given, separators=spaces, ensure_ascii=ascii)
    written = written.replace("1", "1.0e+0") if '"' not in written else written
    rendered = render(dialect, Answer(calls=[call("f", written)]))
    assert [tool_call.arguments for tool_call in read(dialect, list(rendered)).calls] == [written]


def test_tagged_dialects_are_among_them() -> None:
    shapes = {type(get_dialect(name).calls[0]) for name in NAMES if get_dialect(name).calls}
    assert shapes >= {JsonCalls, NamedCalls, TaggedCalls, TreeCalls, PythonCalls, PythonObjects, BraceCalls}
