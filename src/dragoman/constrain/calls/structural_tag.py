"""xgrammar's structural tags: constraints of answers in this format, for engines that use xgrammar, and the
tags of clients.

They can express less than our grammars: the text around a call's arguments must be the same each time, and
the arguments must be JSON. Whether that holds is determined from the renderer's output.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.constrain.calls.tool_schemas import ToolSchema
from dragoman.constrain.compile_limits import check_text, read_schema
from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, literal
from dragoman.constrain.grammar.lark_builder import either as any_of
from dragoman.constrain.schema.json_schema import prepare_schema, write_json
from dragoman.constrain.schema.keywords import SchemaProblems
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.render import render
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import Answer, ToolCall

Format: TypeAlias = dict[str, Any]

_ARGUMENTS = '{"probe": 0}'


class CallMarkers(Struct, frozen=True):
    """Text around the arguments of calls."""

    section: str
    calls: Mapping[str, str]
    """Opening of a call of each tool."""
    close: str
    between: str | None
    """Text between two calls; None if it varies, so that only one call is possible."""
    end: str


def calls_format(
    dialect: Dialect, tools: Sequence[ToolSchema], *, required: bool, parallel: bool
) -> Format | None:
    """Return the format of calls if they are required, else of text with calls; None if tags cannot express
    it.
    """
    markers = None if dialect.channels or any(tool.lark for tool in tools) else _markers(dialect, tools)
    if markers is None:
        return None
    tags = [
        _tag(markers.calls[tool.name], {"type": "json_schema", "json_schema": tool.schema}, markers.close)
        for tool in tools
    ]
    single = not parallel or markers.between is None
    if required:
        return _section(markers, tags, single=single)
    wrapped = [_section(markers, tags, single=single)] if markers.section else tags
    wrapped = [{**tag, "begin": tag["begin"].lstrip()} for tag in wrapped]
    trigger = _trigger(dialect, reduce(_common_start, (tag["begin"] for tag in wrapped)))
    if not trigger.strip("[{ \n\"'"):
        # Nothing distinguishes a call from text.
        return None
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": wrapped,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def _trigger(dialect: Dialect, opening: str) -> str:
    """Return the marker with which calls begin; a model might omit the layout after it."""
    shape = dialect.calls[0]
    marks = [mark.strip() for mark in (*(shape.section.open if shape.section else ()), *shape.open)]
    return next((mark for mark in marks if mark and opening.startswith(mark)), opening)


def after_reasoning(dialect: Dialect, rest: Format, *, begun: bool) -> Format:
    """Put reasoning before the rest: optional reasoning, or its remainder if it has `begun`. Without
    reasoning in the dialect, return the rest alone.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return rest
    close = thinking.close[0].rstrip()
    trail = thinking.close[0][len(close) :]
    inside = _tag("" if begun else thinking.open[0], {"type": "any_text"}, close.lstrip())
    layout = [{"type": "const_string", "value": trail}] if trail else []
    whole = {"type": "sequence", "elements": [inside, *layout, rest]}
    return whole if begun else either([whole, rest])


def either(formats: list[Format]) -> Format:
    return {"type": "or", "elements": formats}


def _tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _section(markers: CallMarkers, tags: list[Format], *, single: bool) -> Format:
    group = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": markers.between or "",
        "at_least_one": True,
        "stop_after_first": single,
    }
    return _tag(markers.section, group, markers.end) if markers.section or markers.end else group


def _markers(dialect: Dialect, tools: Sequence[ToolSchema]) -> CallMarkers | None:
    markers = [single for tool in tools if (single := _of_one(dialect, tool.name)) is not None]
    calls = {name: text for single in markers for name, text in single.calls.items()}
    alike = [replace(single, calls=calls) for single in markers]
    if len(markers) == len(tools) and all(single == alike[0] for single in alike):
        return alike[0]
    return _single(dialect, tools)


def _of_one(dialect: Dialect, name: str) -> CallMarkers | None:
    """Derive the markers from three rendered calls: the text between two calls ends
    one and begins the next.
    """
    parts = _render_around(dialect, name, name, name)
    if parts is None or parts[1] != parts[2]:
        # For example because of numbers.
        return None
    before, middle, _, after = parts
    close = _common_start(middle, after)
    call = _common_start(middle[len(close) :][::-1], before[::-1])[::-1]
    between = middle[len(close) : len(middle) - len(call)]
    if name not in call or _render_around(dialect, name) != [before, after]:
        return None
    return CallMarkers(before[: len(before) - len(call)], {name: call}, close, between, after[len(close) :])


def _common_start(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    size = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return one[:size]


def _single(dialect: Dialect, tools: Sequence[ToolSchema]) -> CallMarkers | None:
    around = {tool.name: _render_around(dialect, tool.name) for tool in tools}
    ends = {None if one is None else one[1] for one in around.values()}
    if len(ends) != 1 or None in ends:
        return None
    calls = {name: one[0] for name, one in around.items() if one is not None}
    return CallMarkers("", calls, ends.pop() or "", None, "")


def _render_around(dialect: Dialect, *names: str) -> list[str] | None:
    """Return the renderer's text before, between and after arguments, if it writes them as JSON."""
    calls = [ToolCall(id=None, name=name, arguments=_ARGUMENTS) for name in names]
    parts = render(dialect, Answer(calls=calls)).split(_ARGUMENTS)
    return parts if len(parts) == len(names) + 1 else None


# Structural tags of clients, converted to a grammar.


def read_format(asked: Format | str, param: str) -> Format:
    """Return a tag in either form, or its JSON, in the newer form. The older form has
    only JSON in its tags.
    """
    tag_format = _object_of(json.loads(asked) if isinstance(asked, str) else asked, param)
    if tag_format.get("format") is not None:
        return _object_of(tag_format["format"], f"{param}.format")
    tags = [
        _tag(
            structure.get("begin"),
            {"type": "json_schema", "json_schema": structure.get("schema")},
            structure.get("end"),
        )
        for structure in _objects(tag_format, "structures", param)
    ]
    return {"type": "triggered_tags", "triggers": tag_format.get("triggers"), "tags": tags}


def read_tags(
    asked: Format | str, param: str, limits: Limits, special: Mapping[str, int] | None = None
) -> Constraint:
    """Read a structural tag of a client: free text, in which a trigger begins one of the tags.

    For example `{"triggers": ["<f="], "structures": [{"begin": "<f=add>", "schema": {}, "end": "</f>"}]}`.
    """
    tag_format = _object_of(read_schema(asked, param, limits), param)
    older = tag_format.get("format") is None
    reader = _TagReader(limits, special, "structures" if older else "tags")
    start = reader.read(read_format(tag_format, param), param if older else f"{param}.format", last=True)
    return Constraint(reader.rules.grammar(start)).check(
        param, "has tags that cannot be enforced; simplify them"
    )


class _TagReader:
    """Converts formats to rules. Each error names the field.

    `last` means that nothing follows: free text extends to the end of the answer, or of the tag that contains
    it.
    """

    def __init__(self, limits: Limits, special: Mapping[str, int] | None, tags: str) -> None:
        self.rules = LarkBuilder(special)
        self._limits = limits
        self._tags = tags
        """Name of the tags in the client's form of the format."""

    def read(self, asked: Any, pointer: str, *, last: bool) -> Symbol:
        asked = _object_of(asked, pointer)
        match asked.get("type"):
            case "any_text" | "triggered_tags" if not last:
                raise _wrong(pointer, "is free text; it must be the last element, or a tag's only content")
            case "const_string":
                return self.rules.rule(self.rules.sequence(self._text(asked, "value", pointer)))
            case "json_schema":
                return self._schema(asked.get("json_schema"), f"{pointer}.json_schema")
            case "regex":
                pattern = self._text(asked, "pattern", pointer)
                return self._inner(Constraint.from_regex(pattern, f"{pointer}.pattern", self._limits))
            case "grammar":
                grammar = self._text(asked, "grammar", pointer)
                return self._inner(Constraint.from_gbnf(grammar, f"{pointer}.grammar", self._limits))
            case "any_text":
                return self.rules.text()
            case "sequence":
                return self.rules.rule(self.rules.sequence(*self._elements(asked, pointer, last=last)))
            case "or":
                elements = enumerate(_objects(asked, "elements", pointer))
                return self.rules.rule(
                    any_of(self.read(one, f"{pointer}.elements[{n}]", last=last) for n, one in elements)
                )
            case "tag":
                return self.rules.rule(
                    self.rules.sequence(
                        self._text(asked, "begin", pointer), self._rest(asked, pointer, last=last)
                    )
                )
            case "triggered_tags":
                return self._triggered(asked, pointer)
            case "tags_with_separator":
                return self._separated(asked, pointer)
        raise _wrong(f"{pointer}.type", f"must be one of {', '.join(_FORMATS)}")

    def _schema(self, schema: Any, pointer: str) -> Symbol:
        problems = SchemaProblems()
        prepared = prepare_schema(True if schema is None else schema, problems, pointer, self._limits)
        problems.check(pointer)
        return self.rules.rule(write_json(prepared))

    def _inner(self, constraint: Constraint) -> Symbol:
        return self.rules.rule(f"%lark {{\n{constraint.grammar}\n}}")

    def _elements(self, asked: Format, pointer: str, *, last: bool) -> list[Symbol]:
        elements = _objects(asked, "elements", pointer)
        return [
            self.read(one, f"{pointer}.elements[{number}]", last=last and number == len(elements) - 1)
            for number, one in enumerate(elements)
        ]

    def _rest(self, tag: Format, pointer: str, *, last: bool = False) -> Symbol:
        """Return a rule for the contents of a tag and its end."""
        ends = tag.get("end")
        texts = ends if isinstance(ends, list) and ends else [ends]
        ended = [self._check_text(text, f"{pointer}.end") for text in texts]
        content = _object_of(tag.get("content"), f"{pointer}.content")
        if content.get("type") == "any_text" and all(ended):
            return self.rules.rule(any_of(self.rules.text_until(end) for end in ended))
        inner = self.read(content, f"{pointer}.content", last=last and not any(ended))
        return self.rules.rule(any_of(self.rules.sequence(inner, end) for end in ended))

    def _triggered(self, asked: Format, pointer: str) -> Symbol:
        triggers = [self._check_text(one, f"{pointer}.triggers") for one in _list(asked, "triggers", pointer)]
        tags = _objects(asked, "tags", pointer)
        check_count(len(tags) + len(triggers), self._limits.tools, pointer, "tags and triggers")
        led = list[str]()
        text = self.rules.text(self.rules.without(triggers))
        for number, tag in enumerate(tags):
            where = f"{pointer}.{self._tags}[{number}]"
            begin = self._text(tag, "begin", where)
            trigger = max((one for one in triggers if begin.startswith(one)), key=len, default="")
            if not trigger:
                raise _wrong(f"{where}.begin", "must begin with one of the triggers")
            led.append(self._led_in(text, trigger, begin[len(trigger) :], self._rest(tag, where)))
        one = self.rules.rule(any_of(led))
        return self.rules.rule(
            _repeated(asked, one, f"{one}* {text}", f"{one} {one}* {text}", f"({one} | {text})")
        )

    def _led_in(self, text: Symbol, trigger: str, begin: str, rest: Symbol) -> Symbol:
        """Return a rule for text and then the tag; text and trigger are one lexeme, which ends as early as
        possible.
        """
        if self.rules.is_text(trigger):
            symbol = self.rules.rule(f"{text} {literal(trigger)}", lazy=True)
        else:
            symbol = self.rules.rule(self.rules.sequence(text, trigger))
        return self.rules.rule(self.rules.sequence(symbol, begin, rest))

    def _separated(self, asked: Format, pointer: str) -> Symbol:
        tags = [{**tag, "type": "tag"} for tag in _objects(asked, "tags", pointer)]
        one = self.rules.rule(
            any_of(self.read(tag, f"{pointer}.tags[{n}]", last=False) for n, tag in enumerate(tags))
        )
        more = f"{one} ({self.rules.sequence(self._text(asked, 'separator', pointer), one)})*"
        return self.rules.rule(_repeated(asked, one, f"({more})?", more, f"({one})?"))

    def _text(self, asked: Format, name: str, pointer: str) -> str:
        return self._check_text(asked.get(name), f"{pointer}.{name}")

    def _check_text(self, text: Any, pointer: str) -> str:
        return check_text(text, self._limits.grammar_chars, pointer, "characters of a text")


def _objects(asked: Format, name: str, pointer: str) -> list[Format]:
    return [_object_of(one, f"{pointer}.{name}") for one in _list(asked, name, pointer)]


def _list(asked: Format, name: str, pointer: str) -> list[Any]:
    value = asked.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{pointer}.{name}", "must be a non-empty list")
    return value


def _object_of(value: Any, pointer: str) -> Format:
    if not isinstance(value, dict):
        raise _wrong(pointer, "must be an object")
    return value


def _wrong(pointer: str, why: str) -> BadRequest:
    return BadRequest(f"'{pointer}' {why}.", param=pointer, code="invalid_value")


_FORMATS = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)


def _repeated(asked: Format, one: str, any_number: str, several: str, perhaps: str) -> str:
    if asked.get("stop_after_first"):
        return one if asked.get("at_least_one") else perhaps
    return several if asked.get("at_least_one") else any_number
