"""Grammars of values as literals: Python's, Gemma's, and JSON between tags.

Properties have the order of the schema, as in llguidance's own JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from dragoman.constrain.calls.tool_schemas import (
    EVERYTHING,
    SchemaLocation,
    SchemaResolver,
    TypeOption,
    languages,
    lengths,
)
from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, either, is_possible, literal, regex
from dragoman.constrain.quoted.quoted_lark import QuotedLark
from dragoman.constrain.schema.json_schema import EXACT
from dragoman.dialects.render import python_value
from dragoman.dialects.schema import ArgumentSchema

_JSON_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00[01][0-9a-f])'
_CODES = (
    r"\\x[0-9a-f]{2}|\\u(?:[0-9a-ce-f][0-9a-f]{3}|d[0-7][0-9a-f]{2})"
    r"|\\U000[1-9a-f][0-9a-f]{4}|\\U0010[0-9a-f]{4}"
)
_SINGLE = rf"(?:[^'\\\x00-\x1f\x7f]|\\['\"\\nrtbf]|{_CODES})"
_DOUBLE = rf"(?:[^\"\\\x00-\x1f\x7f]|\\['\"\\nrtbf]|{_CODES})"
_PLAIN = r"[^'\"\\\x00-\x1f\x7f]*"
"""Characters that need no escape in any kind of quotes. A string with a `pattern` consists of these only,
because a pattern describes the unescaped characters.
"""


class LiteralStyle(Struct, frozen=True):
    """How literals are written."""

    words: Mapping[str, str]
    separator: Symbol
    colon: Symbol
    python: bool = False
    """Whether strings are Python strings."""
    quote: str = ""
    """Quotation mark around strings without escapes."""
    avoid: Symbol | None = None
    """A language that every string must be in, such as strings without the tag that would end them."""


_WORDS = {"true": "true", "false": "false", "null": "null"}
JSON = LiteralStyle(_WORDS, regex(", ?"), regex(": ?"))
PYTHON = LiteralStyle(
    {"true": "True", "false": "False", "null": "None"}, regex(", ?"), regex(": ?"), python=True
)


def brace_style(quote: str) -> LiteralStyle:
    return LiteralStyle(_WORDS, literal(","), literal(":"), quote=quote)


class LiteralRules:
    """Rules for the values of one tool. A schema that refers to itself becomes a recursive rule."""

    def __init__(
        self, rules: LarkBuilder, schemas: SchemaResolver, style: LiteralStyle, text: QuotedLark | None = None
    ) -> None:
        self.rules = rules
        self.schemas = schemas
        self.style = style
        self.text = text
        """Grammar that strings must match, if there is one."""
        self._known: dict[str, Symbol] = {}

    def value(
        self, schema: Any, where: SchemaLocation, argument_schema: ArgumentSchema | None = None
    ) -> Symbol:
        """Return a rule for one value that the schema allows. `place` is the parser's view of the schema, if
        it uses it.
        """
        key = json.dumps([schema, argument_schema.options if argument_schema else None])
        if key not in self._known:
            self._known[key] = name = self.rules.reserve()
            options = [
                option
                for option in self.schemas.options(schema, where)
                if is_readable(option.kind, argument_schema)
            ]
            if not options:
                where.refuse("allows no value that can be written in this model's call syntax")
            self.rules.define(name, either(self.option(option, where, argument_schema) for option in options))
        return self._known[key]

    def option(
        self, option: TypeOption, where: SchemaLocation, schema: ArgumentSchema | None = None
    ) -> Symbol:
        if option.values is not None:
            return either(spelling for value in option.values for spelling in self.spellings(value, where))
        match option.kind:
            case "string":
                return self.string(option.schema, where)
            case "boolean":
                return self.rules.terminal(
                    f"{literal(self.style.words['true'])} | {literal(self.style.words['false'])}"
                )
            case "null":
                return literal(self.style.words["null"])
            case "object":
                return self.object(option.schema, where, schema)
            case "array":
                return self.array(option.schema, where, schema)
        return self.number(option)

    # Scalars

    def number(self, option: TypeOption) -> Symbol:
        """Return a rule for a number. Numbers look alike in all syntaxes, so llguidance's own are used."""
        keywords = {key: value for key, value in option.schema.items() if key in NUMBER_WORDS}
        schema = {"type": option.kind, **keywords, "x-guidance": EXACT}
        return self.rules.rule(f"%json {json.dumps(schema)}")

    def spellings(self, value: Any, where: SchemaLocation) -> list[Symbol]:
        """Return the spellings of one fixed value.

        They use the same lexemes as other values of the type: the lexer takes the longest lexeme and never
        backtracks, so one lexeme for all of `["a"]` would hide the `[` of other lists.
        """
        if isinstance(value, list):
            members = [either(self.spellings(item, where)) for item in value]
            return [self.rules.rule(self._enclose("[", members, "]"))]
        if isinstance(value, dict):
            members = [
                self._member(key, either(self.spellings(member, where)), (), where)
                for key, member in value.items()
            ]
            return [self.rules.rule(self._enclose("{", members, "}"))]
        text = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            return [literal(python_value(text) if self.style.python else text)]
        if self.style.quote:
            if self.style.quote in value and self.rules.is_text(self.style.quote):
                where.refuse("has a value that contains this model's quotation mark for strings")
            return [
                self.rules.sequence(self.style.quote, self.rules.text_until(self.style.quote, literal(value)))
            ]
        return [literal(python_value(text)), literal(text)] if self.style.python else [literal(text)]

    def _enclose(self, opening: str, members: Sequence[Symbol], closing: str) -> str:
        return f"{literal(opening)} {f' {self.style.separator} '.join(members)} {literal(closing)}"

    def string(self, schema: Mapping[str, Any], where: SchemaLocation) -> Symbol:
        if self.text is not None:
            if self.style.quote:
                return self.rules.sequence(
                    self.style.quote, self.text.write_raw(self.style.quote, self.style.quote)
                )
            return either(map(self.text.write_escaped, "'\"" if self.style.python else '"'))
        wanted = languages(schema, where)
        if wanted and not is_possible(" & ".join([*([] if self.style.quote else [regex(_PLAIN)]), *wanted])):
            where.refuse("allows no text that can be written in this model's call syntax")
        if self.style.quote:
            return self.rules.sequence(self.style.quote, self.rules.text_until(self.style.quote, *wanted))
        if "pattern" in schema or "format" in schema:
            inner = self.rules.terminal(" & ".join([regex(_PLAIN), *wanted]))
            quotes = ["'", '"'] if self.style.python else ['"']
            return self._quote(f"{literal(quote)} {inner} {literal(quote)}" for quote in quotes)
        count = lengths(schema, where) or "*"
        if self.style.python:
            return self._quote([f"/'{_SINGLE}{count}'/", f'/"{_DOUBLE}{count}"/'])
        return self._quote([f'/"{_JSON_CHARACTER}{count}"/'])

    def _quote(self, forms: Any) -> Symbol:
        form = self.rules.terminal(" | ".join(forms))
        return self.rules.terminal(f"{form} & {self.style.avoid}") if self.style.avoid else form

    # Containers

    def array(
        self, schema: Mapping[str, Any], where: SchemaLocation, argument_schema: ArgumentSchema | None
    ) -> Symbol:
        first = schema.get("prefixItems", [])
        if first and argument_schema is not None:
            where.at("prefixItems").refuse("is not supported in this model's call syntax")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = schema.get("items", True)
        rest = (
            None
            if items is False
            else self.value(items, where.at("items"), argument_schema and argument_schema.item())
        )
        members = [self.value(one, where.at("prefixItems", str(at))) for at, one in enumerate(first)]
        inside = write_items(self.rules, self.style.separator, members, rest, least, most, where)
        return self.rules.rule(f'"[" {inside} "]"')

    def object(
        self, schema: Mapping[str, Any], where: SchemaLocation, argument_schema: ArgumentSchema | None
    ) -> Symbol:
        inside = self.members(schema, where, self._member, argument_schema)
        return self.rules.rule(f'"{{" {inside} "}}"')

    def _member(self, key: str | None, value: Symbol, others: Sequence[str], where: SchemaLocation) -> Symbol:
        """Return a rule for one property; without a key, for any property except `others`."""
        if key is None:
            return self.rules.rule(f"{self._any_key(others, where)} {self.style.colon} {value}")
        if self.style.quote:
            check_bare_key(key, where)
            return self.rules.rule(f"{literal(key)} {self.style.colon} {value}")
        return self.rules.rule(f"{either(self.spellings(key, where))} {self.style.colon} {value}")

    def _any_key(self, others: Sequence[str], where: SchemaLocation) -> Symbol:
        if self.style.quote:
            return self.rules.terminal(exclude(regex(BARE_KEY), map(literal, others)))
        taken = [spelling for other in others for spelling in self.spellings(other, where)]
        quotes = "'\"" if self.style.python else '"'
        return self.rules.terminal(
            exclude(self._quote([f"/{quote}{_PLAIN}{quote}/" for quote in quotes]), taken)
        )

    def members(
        self,
        schema: Mapping[str, Any],
        where: SchemaLocation,
        member: Callable[[str | None, Symbol, Sequence[str], SchemaLocation], Symbol],
        argument_schema: ArgumentSchema | None = None,
    ) -> str:
        """Return the properties of an object with separators between them."""
        properties, required, extra = split_object(schema, where)
        present = []
        for key, inner in properties.items():
            at = where.at("properties", key)
            if inner is not False:
                value = self.value(inner, at, argument_schema and argument_schema.member(key))
                present.append((member(key, value, (), at), key in required))
        further = None
        if extra is not False:
            at = where.at("additionalProperties")
            value = self.value(extra, at, argument_schema and argument_schema.member(""))
            further = member(None, value, list(properties), at)
        return write_members(self.rules, self.style.separator, present, further)


def is_readable(kind: str, schema: ArgumentSchema | None) -> bool:
    """Whether the parser reads a bare word as a value of this type; it consults the schema."""
    if schema is None or kind in ("string", "object", "array") or not schema.types:
        return True
    return kind in schema.types or (kind == "integer" and "number" in schema.types)


NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BARE_KEY = r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}"
PLAIN_KEY = frozenset(" \t\r\n:,{}[]<>\"'|")


def exclude(terminal: str, taken: Any) -> Symbol:
    others = list(taken)
    return Symbol(f"{terminal} & ~{either(others)}" if others else terminal)


def check_bare_key(key: str, where: SchemaLocation) -> None:
    if not key or PLAIN_KEY & set(key):
        where.refuse("has a name that cannot be written in this model's call syntax")


def split_object(schema: Mapping[str, Any], where: SchemaLocation) -> tuple[Mapping[str, Any], set[str], Any]:
    """Return the properties, the names of the required ones, and the schema of others, which may be False.

    If properties are declared and `additionalProperties` is unset, a call may have no others.
    """
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    extra = schema.get("additionalProperties", "properties" not in schema)
    extra = EVERYTHING if extra is True else extra
    missing = required - set(properties)
    if missing:
        if extra is False:
            where.at("required").refuse(f"asks for {min(missing)!r}, which is not declared")
        properties = {**properties, **{key: extra for key in schema["required"] if key in missing}}
    for key in required:
        if properties[key] is False:
            where.at("properties", key).refuse("is required and forbidden")
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if least > len(required):
        where.at("minProperties").refuse("is enforced only as far as properties are required")
    if most is not None and (extra is not False or most < len(properties)):
        where.at("maxProperties").refuse("is enforced only where there are no more properties than that")
    return properties, required, extra


def write_members(
    rules: LarkBuilder, separator: str, members: Sequence[tuple[Symbol, bool]], further: Symbol | None
) -> str:
    """Return members in order, some of them optional, with separators between those present."""
    tail = f"({separator} {further})*" if further else ""
    ways = [f"{further} {tail}"] if further else []
    none_required = True
    for member, required in reversed(members):
        none_required = none_required and not required
        # If the list begins with this member, all optional members before it are missing.
        ways = [f"{member} {tail}"] if required else [f"{member} {tail}", *ways]
        following = f"{separator} {member}" if required else f"({separator} {member})?"
        tail = rules.rule(f"{following} {tail}")
    inside = either(rules.rule(way) for way in ways) if ways else ""
    return f"{inside}?" if none_required and inside else inside


def write_items(
    rules: LarkBuilder,
    separator: str,
    first: Sequence[Symbol],
    rest: Symbol | None,
    least: int,
    most: int | None,
    where: SchemaLocation,
) -> str:
    """Return between `least` and `most` items with separators between them."""
    if rest is None:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and most < least:
        where.refuse("allows no list")
    if most == 0:
        return ""
    leading = list(first[:most])
    if not leading:
        assert rest is not None
        upper = "" if most is None else most - 1
        body = f"{rest} ({separator} {rest}){{{max(least - 1, 0)},{upper}}}" if most != 1 else rest
        return f"({body})" if least else f"({body})?"
    members = [(item, at < least) for at, item in enumerate(leading)]
    return _in_turn(rules, separator, members, rest, least, most)


def _in_turn(
    rules: LarkBuilder,
    separator: str,
    members: Sequence[tuple[Symbol, bool]],
    rest: Symbol | None,
    least: int,
    most: int | None,
) -> str:
    """Return items with a schema each: one may be present only if all before it are."""
    tail = ""
    if rest is not None and most != len(members):
        upper = "" if most is None else most - len(members)
        tail = f"({separator} {rest}){{{max(least - len(members), 0)},{upper}}}"
    for at, (item, needed) in reversed(list(enumerate(members))):
        lead = f"{separator} " if at else ""
        tail = f"({lead}{item} {tail})" + ("" if needed else "?")
    return tail
