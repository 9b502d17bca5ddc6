"""Handling of every JSON Schema keyword: one row each, used by the check and the documentation.

No keyword is silently ignored: it is enforced, only annotates, or is refused. A problem with one is a
`SchemaProblem`, with its location.
"""

from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct

from dragoman.errors import BadRequest, is_typo_of

Fate = Literal["enforced", "note", "refused"]
Shape = Literal[
    "any",
    "schema",
    "schemas",
    "schema map",
    "names",
    "names map",
    "count",
    "number",
    "text",
    "flag",
    "list",
    "type",
]


class Keyword(Struct, frozen=True):
    name: str
    handling: Fate
    shape: Shape = "any"
    note: str = ""
    """Restrictions; for a refused keyword, what to use instead."""


def _rows() -> list[Keyword]:
    enforced = [
        Keyword("type", "enforced", "type", "an integer is written without a fraction: `1`, not `1.0`"),
        Keyword("enum", "enforced", "list", "integers up to 2^53 in size"),
        Keyword("const", "enforced", "any", "integers up to 2^53 in size"),
        Keyword("anyOf", "enforced", "schemas"),
        Keyword("oneOf", "enforced", "schemas", "if no value can match two options; otherwise refused"),
        Keyword("allOf", "enforced", "schemas"),
        Keyword("$ref", "enforced", "text", "within the schema: `#`, `#/$defs/name`, `#anchor`"),
        Keyword("$defs", "enforced", "schema map"),
        Keyword("definitions", "enforced", "schema map"),
        Keyword("$anchor", "enforced", "text"),
        Keyword("nullable", "enforced", "flag", "OpenAPI's: together with `type`, null is allowed too"),
        Keyword("properties", "enforced", "schema map", "written in this order"),
        Keyword("required", "enforced", "names"),
        Keyword("additionalProperties", "enforced", "schema", "written after those of `properties`"),
        Keyword("patternProperties", "enforced", "schema map", "no name may match two patterns"),
        Keyword("propertyNames", "enforced", "schema", "only `type`, `enum`, `const`, `pattern`, lengths"),
        Keyword("minProperties", "enforced", "count", "up to one more than `required`"),
        Keyword("maxProperties", "enforced", "count", "if all of `properties` are required"),
        Keyword("dependentRequired", "enforced", "names map", "for up to 6 names"),
        Keyword("dependentSchemas", "enforced", "schema map", "for up to 6 names"),
        Keyword("dependencies", "enforced", "any", "draft 7's spelling of the two above"),
        Keyword("unevaluatedProperties", "enforced", "schema", "without allOf, anyOf or $ref beside it"),
        Keyword("items", "enforced", "any", "a list of schemas is draft 7's `prefixItems`"),
        Keyword("prefixItems", "enforced", "schemas"),
        Keyword("additionalItems", "enforced", "schema", "draft 7's `items` after a list"),
        Keyword("unevaluatedItems", "enforced", "schema", "without allOf, anyOf or $ref beside it"),
        Keyword("minItems", "enforced", "count"),
        Keyword("maxItems", "enforced", "count"),
        Keyword("uniqueItems", "enforced", "flag", "for strings of any length, or an `enum` of strings"),
        Keyword("minLength", "enforced", "count"),
        Keyword("maxLength", "enforced", "count"),
        Keyword("pattern", "enforced", "text", "without \\b, lookaround and backreferences"),
        Keyword("format", "enforced", "text", "those in the table below"),
        Keyword(
            "minimum", "enforced", "number", "up to 2^53 in size; numbers are written without an exponent"
        ),
        Keyword("maximum", "enforced", "number", "as `minimum`"),
        Keyword("exclusiveMinimum", "enforced", "any", "as `minimum`; or draft 4's true"),
        Keyword("exclusiveMaximum", "enforced", "any", "as `maximum`; or draft 4's true"),
        Keyword(
            "multipleOf",
            "enforced",
            "number",
            "at most 10,000, not counting the decimal point: 250, 12.5 or 0.01",
        ),
    ]
    return [*enforced, *_notes(), *_refused()]


def _notes() -> list[Keyword]:
    words = (
        "$schema $comment title description default examples example deprecated readOnly writeOnly "
        "contentMediaType contentEncoding contentSchema discriminator xml externalDocs $vocabulary "
        "markdownDescription enumNames enumDescriptions propertyOrdering"
    )
    return [
        *(Keyword(word, "note") for word in words.split()),
        Keyword("$id", "note", "text", "at the top"),
        Keyword("id", "note", "any", "at the top"),
        Keyword("...", "note", note="any unknown keyword, unless it looks like a typo of one above"),
    ]


def _refused() -> list[Keyword]:
    return [
        Keyword("not", "refused", note="say what is allowed instead, with `enum` or `pattern`"),
        Keyword("if", "refused", note="use `anyOf` with one option for each case"),
        Keyword("then", "refused", note="use `anyOf` with one option for each case"),
        Keyword("else", "refused", note="use `anyOf` with one option for each case"),
        Keyword("contains", "refused", note="use `prefixItems` and `items`"),
        Keyword("minContains", "refused", note="use `prefixItems` and `items`"),
        Keyword("maxContains", "refused", note="use `prefixItems` and `items`"),
        Keyword("$dynamicRef", "refused", note="use `$ref`"),
        Keyword("$dynamicAnchor", "refused", note="use `$anchor`"),
        Keyword("$recursiveRef", "refused", note="use `$ref`"),
        Keyword("$recursiveAnchor", "refused", note="use `$anchor`"),
        Keyword("x-guidance", "refused", note="leave it out: it would change what is enforced"),
    ]


KEYWORDS = {keyword.name: keyword for keyword in _rows()}

SHAPES: dict[Shape, str] = {
    "any": "anything",
    "schema": "a schema: an object, true or false",
    "schemas": "a list of at least one schema",
    "schema map": "an object of schemas",
    "names": "a list of names",
    "names map": "an object of lists of names",
    "count": "a whole number from 0",
    "number": "a number",
    "text": "a string",
    "flag": "true or false",
    "list": "a list of at least one value",
    "type": "a type or a list of types: null, boolean, integer, number, string, array, object",
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

APPLICATORS = frozenset(["$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const"])
OF_TYPES = {
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    "object": frozenset(["properties", "required", "additionalProperties", "minProperties", "maxProperties"]),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems", "uniqueItems"]),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""Keywords that apply to values of one type."""


def fate_of(name: str) -> Keyword | None:
    """Return the row of a keyword; None for a typo. Keywords that no draft defines are notes, as JSON Schema
    says.
    """
    keyword = KEYWORDS.get(name)
    return keyword if keyword is not None else None if suggest_keyword(name) else KEYWORDS["..."]


@lru_cache(maxsize=4096)
def suggest_keyword(name: str) -> str | None:
    """Return the keyword that a name is a typo of: `suggest_keyword("minlength")` is `minLength`."""
    return next((known for known in KEYWORDS if is_typo_of(name, known)), None) if name[:2] != "x-" else None


def fits(value: object, shape: Shape) -> bool:
    """Whether a keyword's value has the right form: `fits(-1, "count")` is false."""
    match shape:
        case "schema":
            return isinstance(value, dict | bool)
        case "schemas":
            return isinstance(value, list) and bool(value) and all(fits(item, "schema") for item in value)
        case "schema map":
            return isinstance(value, dict) and all(fits(item, "schema") for item in value.values())
        case "names":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "names map":
            return isinstance(value, dict) and all(fits(item, "names") for item in value.values())
        case "count":
            return fits(value, "number") and float(value).is_integer() and value >= 0  # type: ignore[arg-type,operator]
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "list":
            return isinstance(value, list) and bool(value)
        case "type":
            many = value if isinstance(value, list) else [value]
            return bool(many) and all(isinstance(item, str) and item in TYPES for item in many)
        case "any":
            return True


class SchemaProblem(Struct, frozen=True):
    pointer: str
    """JSON pointer such as `/properties/a/pattern`; "" is the whole schema."""
    message: str
    """Predicate of the location: "has \\\\b, which depends on the text around it"."""

    def sentence(self, param: str) -> str:
        where = f"'{param}#{self.pointer}'" if self.pointer else f"'{param}'"
        return f"{where} {self.message}."


class SchemaProblems:
    """Problems of one schema."""

    def __init__(self) -> None:
        self.items: list[SchemaProblem] = []
        self.watched: list[str] = []
        """Pointers of keywords that no grammar can enforce, but `unique_items.py` can while
        the answer is written.
        """
        self.exclusive: list[tuple[str, list[Any]]] = []
        """Options of which a value must match exactly one, with their pointers."""

    def add(self, json_path: str, message: str) -> None:
        self.items.append(SchemaProblem(json_path, message))

    def check(self, param: str) -> None:
        """Raise for the first problem, with the number of further ones."""
        if self.items:
            first = self.items[0]
            more = f" It has {len(self.items) - 1} more problems." if len(self.items) > 1 else ""
            message = f"The schema cannot be enforced: {first.sentence(param)}{more}"
            raise BadRequest(
                message,
                param=f"{param}#{first.pointer}" if first.pointer else param,
                code="unsupported_schema",
            )


def at(json_path: str, *steps: str | int) -> str:
    """Extend a JSON pointer: `at("/properties", "a/b")` is `/properties/a~1b`."""
    return json_path + "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)
