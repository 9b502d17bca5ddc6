"""Grammar of arguments between tags. A string is written unchanged, any other value as JSON.

The parser takes the type of a text between tags from the schema. Where a string may be replaced by other
types, it must not look like one of them, and a value that the parser would read as another type is not
written.
"""

import json
from collections.abc import Mapping
from html import escape
from math import ceil, floor
from typing import Any

import msgspec

from dragoman.constrain.calls.literal_grammar import (
    BARE_KEY,
    JSON,
    NUMBER_WORDS,
    LiteralRules,
    is_readable,
    split_object,
    write_items,
)
from dragoman.constrain.calls.tool_schemas import (
    SchemaLocation,
    SchemaResolver,
    ToolSchema,
    TypeOption,
    languages,
)
from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, either, is_possible, literal, regex
from dragoman.constrain.quoted.quoted_lark import QuotedLark
from dragoman.dialects.declarations import AttributedCalls, TaggedCalls, TreeCalls
from dragoman.dialects.schema import ArgumentSchema

NUMBERISH = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
SPACE = r"[\s\x1c-\x1f]*"
FORBIDDEN_IN_KEYS = frozenset("<>\n\"'")
CDATA = ("<![CDATA[", "]]>")
NAMES = {"integer": "number"}


class TagRules:
    """Grammar of the arguments of one tool."""

    def __init__(self, rules: LarkBuilder, shape: TaggedCalls, tool: ToolSchema, banned: str = "") -> None:
        self.rules = rules
        self.shape = shape
        self.lead = shape.lead if isinstance(shape, TreeCalls) else ""
        """In a tree of tags: the text before each tag."""
        self.tool = tool
        self.schemas = SchemaResolver(tool.schema)
        # The parser takes a key inside a value for the next argument's, whose predecessor was not closed.
        keys = () if self.lead else [key.strip() for key in shape.key]
        self.no_key = rules.without(keys) if len(tool.declared.get("properties", ())) != 1 else None
        ends = [
            *((self.lead,) if self.lead else shape.value_end),
            *keys,
            *([CDATA[1]] if shape.cdata else []),
        ]
        avoid = [rules.without(end.strip() for end in ends), regex(f"[^{banned}]*") if banned else None]
        inner = [language for language in avoid if language]
        style = msgspec.structs.replace(JSON, avoid=Symbol(" & ".join(inner)) if inner else None)
        self.json = LiteralRules(rules, self.schemas, style)
        self.text = tool.text(rules)
        self._trees: dict[str, Symbol] = {}

    def arguments(self) -> Symbol | None:
        """Return a rule for all arguments; None if the tool has none."""
        where, schema = self.tool.where, ArgumentSchema(self.tool.declared, self.tool.declared)
        options = self.schemas.objects(where)
        written = [self._members(option.schema, where, schema) for option in options]
        bodies = [self.rules.rule(body) for body in written if body]
        if not bodies:
            return None
        return Symbol(either(bodies) + ("" if all(written) else "?"))

    def _members(self, schema: Mapping[str, Any], where: SchemaLocation, place: ArgumentSchema) -> str:
        properties, required, extra = split_object(schema, where)
        texts = []
        for key, inner in properties.items():
            if inner is False:
                continue
            at = where.at("properties", key)
            member = self._member(key, inner, at, place.member(key))
            texts.append(member if key in required else f"{member}?")
        if extra is not False:
            texts.append(f"{self._further(list(properties), extra, where, place)}*")
        return " ".join(texts)

    def _member(self, key: str, schema: Any, where: SchemaLocation, place: ArgumentSchema) -> Symbol:
        shape = self.shape
        if not key or key != key.strip() or FORBIDDEN_IN_KEYS & set(key):
            where.refuse("has a name that cannot be written in this model's call syntax")
        if self.lead:
            value = self._tree(key, schema, where, place)
            return self.rules.rule(self.rules.sequence(f"{self.lead}<{key}>", value))
        written = escape(key) if isinstance(shape, AttributedCalls) else key
        lead = shape.key[0] + written + shape.key_end[0]
        return self.rules.rule(either(self._write_typed(lead, schema, where, place)))

    def _further(
        self, others: list[str], schema: Any, where: SchemaLocation, place: ArgumentSchema
    ) -> Symbol:
        """Return a rule for an undeclared property."""
        shape, at = self.shape, where.at("additionalProperties")
        if self.lead:
            at.refuse("must be false: this model's call syntax requires declared names")
        taken = f" & ~{either(map(literal, others))}" if others else ""
        key = self.rules.terminal(regex(BARE_KEY) + taken)
        ways = self._write_typed(shape.key_end[0], schema, at, place.member(""))
        return self.rules.rule(self.rules.sequence(shape.key[0], key, self.rules.rule(either(ways))))

    def _write_typed(
        self, lead: str, schema: Any, where: SchemaLocation, place: ArgumentSchema
    ) -> list[Symbol]:
        """Return the text after the key: the type, if the syntax states one, the value and its end."""
        shape = self.shape
        options = self.schemas.options(schema, where)
        if not shape.types:
            value = TagValueRules(self, shape.value_end[0], where, place, shape.untyped)
            return [self.rules.sequence(lead + shape.value, value.any_of(options))]
        symbols = []
        for option in options:
            # The parser trusts a stated type, except a type other than string where only a string is allowed.
            if option.kind != "string" and not (
                is_readable(option.kind, place) and place.types != {"string"}
            ):
                continue
            name = "true" if option.kind == "string" else "false"
            stated = name if shape.types == "string" else NAMES.get(option.kind, option.kind)
            value = TagValueRules(self, shape.value_end[0], where, place, "text")
            symbols.append(
                self.rules.sequence(lead + stated + shape.type_end[0] + shape.value, value.one(option))
            )
        if not symbols:
            where.refuse("allows no value that can be written in this model's call syntax")
        return symbols

    # Trees of tags

    def _tree(self, key: str, schema: Any, where: SchemaLocation, place: ArgumentSchema) -> Symbol:
        """Return a rule for the contents of a tag and its end."""
        known = json.dumps([key, schema, place.options])
        if known not in self._trees:
            self._trees[known] = name = self.rules.reserve()
            ways = self._ways(f"{self.lead}</{key}>", schema, where, place)
            self.rules.define(name, either(self.rules.rule(way) for way in ways))
        return self._trees[known]

    def _ways(self, end: str, schema: Any, where: SchemaLocation, place: ArgumentSchema) -> list[Symbol]:
        options = self.schemas.options(schema, where)
        if {"object", "array"} <= place.types and any(map(_is_tree, options)):
            where.refuse("allows a list and an object, which are the same when empty; allow one of them")
        scalars = [option for option in options if not _is_tree(option)]
        symbols = [TagValueRules(self, end, where, place, "json").any_of(scalars)] if scalars else []
        for option in options:
            if _is_tree(option) and option.kind == "object":
                inside = self._members(option.schema, where, place)
                symbols.append(self.rules.sequence(Symbol(inside), end))
            elif _is_tree(option):
                symbols.append(self.rules.sequence(Symbol(self._items(option.schema, where, place)), end))
        if not symbols:
            where.refuse("allows no value")
        return symbols

    def _items(self, schema: Mapping[str, Any], where: SchemaLocation, place: ArgumentSchema) -> str:
        if schema.get("prefixItems"):
            where.at("prefixItems").refuse("is not supported in this model's call syntax")
        items = schema.get("items", True)
        if items is False:
            return ""
        inner = self._tree("item", items, where.at("items"), place.item())
        item = self.rules.rule(self.rules.sequence(f"{self.lead}<item>", inner))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        return write_items(self.rules, "", [], item, least, most, where)


def _is_tree(option: TypeOption) -> bool:
    """Whether the option is written as nested tags: a list or object with a schema. Without one it is JSON,
    in which names are free.
    """
    if option.values is not None or option.kind not in ("object", "array"):
        return False
    return "properties" in option.schema if option.kind == "object" else "items" in option.schema


class TagValueRules:
    """Grammar of one value up to the end of its tag."""

    def __init__(
        self, tags: TagRules, end: str, where: SchemaLocation, schema: ArgumentSchema, untyped: str
    ) -> None:
        self.tags = tags
        self.rules = tags.rules
        self.end = end
        self.where = where
        self.argument_schema = schema
        self.kinds = _read_as(schema, untyped)

    def one(self, option: TypeOption) -> Symbol:
        """Return a rule for a value whose type is stated."""
        if option.kind == "string":
            return self._text(option)
        return self.rules.sequence(self.tags.json.option(option, self.where), self.end)

    def any_of(self, options: list[TypeOption]) -> Symbol:
        """Return a rule for a value whose type the parser infers."""
        known = [
            option for option in options if option.kind in self.kinds or NAMES.get(option.kind) in self.kinds
        ]
        if self.kinds == {"string"}:
            known = [option for option in known if option.kind == "string"]
        if any(option.free for option in known):
            # Any text is read as some value, and any value is allowed.
            return self._write_raw([])
        symbols = [self._write_option(option, known) for option in known]
        ways = [way for way in symbols if way]
        if not ways:
            self.where.refuse("allows no value that can be written in this model's call syntax")
        return self.rules.rule(either(ways))

    def _write_option(self, option: TypeOption, options: list[TypeOption]) -> Symbol | None:
        if option.values is not None:
            return self._write_listed(option)
        if option.kind == "string":
            apart = all(_number(other) for other in options if other.kind in ("number", "integer"))
            wanted = [*languages(option.schema, self.where), *self._no_other(apart)]
            return self._write_raw(wanted) if not wanted or is_possible(" & ".join(wanted)) else None
        pattern = _number(option) if "string" in self.kinds else None
        if pattern:
            # One lexeme with the end of the tag, as for a string, so that neither hides the other.
            return self._write_whole(regex(pattern))
        if "string" in self.kinds and option.kind in ("boolean", "null"):
            words = ["null"] if option.kind == "null" else ["true", "false"]
            return self._write_whole(either(map(literal, words)))
        return self.rules.sequence(self.tags.json.option(option, self.where), self.end)

    def _no_other(self, apart: bool) -> list[Symbol]:
        """Exclude texts that the parser would take for another type."""
        kinds, symbols = self.kinds - {"string"}, []
        if not kinds:
            return []
        # A text in quotes would be read as a JSON string.
        symbols.append(regex(f'{SPACE}"(?s:.*)'))
        if kinds & {"number", "integer"}:
            symbols.append(regex(rf"{SPACE}{NUMBERISH}{SPACE}" if apart else rf"{SPACE}[0-9-](?s:.*)"))
        if kinds & {"boolean", "null"}:
            symbols.append(regex(rf"{SPACE}(?:true|false|null|True|False|None){SPACE}"))
        if kinds & {"object", "array"}:
            symbols += [regex(rf"{SPACE}[{{\[(](?s:.*)"), *([regex(SPACE)] if self.tags.lead else [])]
        return [Symbol(f"~{either(symbols)}")]

    def _write_listed(self, option: TypeOption) -> Symbol | None:
        """Return a rule for listed values, as far as the parser reads them back unchanged."""
        assert option.values is not None
        texts = []
        for value in option.values:
            written = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            core = self.tags.lead or self.end.strip()
            if self.rules.is_text(core) and core in written:
                self.where.refuse("has a value that contains its own closing tag")
            stated = self.tags.shape.types
            if (
                stated
                or msgspec.json.decode(self.argument_schema.json(written, self.tags.shape.untyped)) == value
            ):
                texts.append(literal(written))
        return self._write_whole(either(texts)) if texts else None

    def _text(self, option: TypeOption) -> Symbol:
        if option.values is not None:
            return self._write_listed(option) or self.where.refuse("allows no value")
        wanted = languages(option.schema, self.where)
        if wanted and not is_possible(" & ".join(wanted)):
            self.where.refuse("allows no text")
        return self._write_raw(wanted)

    def _write_raw(self, wanted: list[Symbol]) -> Symbol:
        shape = self.tags.shape
        core = self.tags.lead or self.end.strip()
        if self.tags.text is not None:
            return self._write_in_grammar(self.tags.text, core)
        bare = [*wanted, *([self.tags.no_key] if self.tags.no_key else [])]
        raw = self.rules.text_until(self.end, *bare, core=core)
        if not shape.cdata:
            return raw
        opening, closing = CDATA
        bare.append(Symbol(f"~({literal(opening)} /(?s:.*)/)"))
        unfenced = self.rules.text_until(self.end, *bare, core=core)
        fenced = self.rules.text_until(closing + self.end, *wanted, core=closing)
        return self.rules.rule(either([unfenced, self.rules.rule(f"{literal(opening)} {fenced}")]))

    def _write_in_grammar(self, text: QuotedLark, core: str) -> Symbol:
        if not self.tags.shape.cdata:
            return text.write_raw(self.end, core)
        opening, closing = CDATA
        return self.rules.rule(f"{literal(opening)} {text.write_raw(closing + self.end, closing)}")

    def _write_whole(self, terminal: str) -> Symbol:
        """Return a rule for a terminal that is a whole value, as one lexeme with the text that ends it."""
        pieces = self.rules.pieces(self.end)
        lead = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        value = self.rules.terminal(terminal)
        whole = self.rules.terminal(f"{value} {literal(lead)}") if lead else value
        return self.rules.sequence(whole, self.end[len(lead) :])


def _number(option: TypeOption) -> str | None:
    """Return an expression for numbers, if one can express the schema."""
    if option.values is not None or option.kind == "integer":
        return integer_range(option.schema) if option.values is None else NUMBERISH
    return (
        None if option.kind != "number" or any(word in option.schema for word in NUMBER_WORDS) else NUMBERISH
    )


def _read_as(schema: ArgumentSchema, untyped: str) -> frozenset[str]:
    """Return the types that the parser may take a text for."""
    if schema.types:
        return schema.types
    every = {"string", "number", "integer", "boolean", "null", "object", "array"}
    return frozenset({"string"} if untyped == "text" else every)


MOST_DIGITS = 30


def integer_range(schema: Mapping[str, Any]) -> str | None:
    """Return an expression for the integers that the schema allows; None if no expression can."""
    if "multipleOf" in schema:
        return None
    least, most = _bounds(schema)
    if any(bound is not None and len(str(abs(bound))) > MOST_DIGITS for bound in (least, most)):
        return None
    ways = []
    if least is None or least < 0:
        ways += [f"-{way}" for way in _positive(max(1, 1 if most is None else -most), least and -least)]
    if (least is None or least <= 0) and (most is None or most >= 0):
        ways.append("0")
    if most is None or most > 0:
        ways += _positive(max(1, least or 0), most)
    return f"(?:{'|'.join(ways)})" if ways else None


def _bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    least = [ceil(schema["minimum"])] if "minimum" in schema else []
    least += [floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    most = [floor(schema["maximum"])] if "maximum" in schema else []
    most += [ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(least, default=None), min(most, default=None)


def _positive(least: int, most: int | None) -> list[str]:
    """Return expressions for positive integers: one per number of digits, and one for all above."""
    if most is not None and most < least:
        return []
    longest = len(str(least if most is None else most))
    ways = []
    for digits in range(len(str(least)), longest + 1):
        low, high = max(least, 10 ** (digits - 1)), 10**digits - 1
        ways += _alike(str(low), str(high if most is None else min(most, high)))
    return ways if most is not None else [*ways, f"[1-9][0-9]{{{longest},}}"]


def _alike(low: str, high: str) -> list[str]:
    """Return expressions for a range of integers; both bounds have the same number of digits."""
    if low == high:
        return [low]
    if low[0] == high[0]:
        return [low[0] + way for way in _alike(low[1:], high[1:])]
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    ways = []
    if int(low[1:] or 0) > 0:
        ways += [low[0] + way for way in _alike(low[1:], "9" * rest)]
        first += 1
    if int(high[1:] or 0) < 10**rest - 1:
        ways += [high[0] + way for way in _alike("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return ways
