"""JSON Schema checked keyword by keyword and written as llguidance enforces it: `%json {...}`.

    {"type": "string", "format": "date"}  gets a pattern for the format
    {"not": {"type": "string"}}           gets a problem: '#/not' cannot be enforced; say what is allowed ...

Every keyword goes through `keywords.py`, so nothing that forbids a value is left out. Errors of llguidance
about the whole schema are also reported with their location.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dragoman.constrain.compile_limits import compile_grammar, read_schema
from dragoman.constrain.schema.keywords import (
    APPLICATORS,
    OF_TYPES,
    SHAPES,
    Keyword,
    SchemaProblem,
    SchemaProblems,
    at,
    fate_of,
    fits,
    suggest_keyword,
)
from dragoman.constrain.schema.rewrites import rewrite_words
from dragoman.constrain.vocabulary import byte_vocabulary
from dragoman.dialects.schema import resolve
from dragoman.errors import BadRequest
from dragoman.limits import Limits

OPTIONS: dict[str, Any] = {
    # Whitespace where JSON allows it: one space, or a line break with an indent. With more, a model that only
    # writes whitespace never ends.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,64}",
    # Without \\u, a property name has only one spelling, so the rule for the name always applies.
    "json_allowed_escapes": 'nrbtf\\"',
}
EXACT: dict[str, Any] = {
    **{word: value for word, value in OPTIONS.items() if word != "whitespace_pattern"},
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON as models write it in calls: a space after commas and colons is optional."""
_MOST_PAIRS = 5000
_OVERLAPPING = (
    "has options that one value may match at the same time; use anyOf, or a required property with a "
    "different const in each option"
)
_LIKELY = (
    ("not disjoint", "has patternProperties that may match the same name; make them exclude each other"),
    ("min/maxProperties", "has minProperties or maxProperties with optional properties; make these required"),
    (
        "sibling keys",
        "has keywords beside a recursive $ref; move them into the schema it refers to",
    ),
    ("too large", "is too large when its parts are combined; use fewer of allOf, anyOf and $ref"),
    ("Unable to determine", "has patterns that cannot be combined; use a single pattern"),
    ("Unsatisfiable", "allows no value"),
    ("empty", "allows no value"),
)


def json_lark(
    schema: Any, param: str = "schema", limits: Limits | None = None, options: dict[str, Any] = OPTIONS
) -> str:
    """Return `%json {...}` for a rule; raise `BadRequest` if the schema cannot be fully enforced."""
    problems = SchemaProblems()
    prepared = prepare_schema(schema, problems, param, limits)
    problems.check(param)
    return write_json(prepared, options)


def check_inner_schemas(grammar: str, param: str, limits: Limits) -> str:
    """Check each `%json {...}` in a client's grammar like any other schema."""
    before, *pieces = grammar.split("%json")
    texts = [before]
    for piece in pieces:
        text = piece.lstrip()
        try:
            schema, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            message = f"'{param}' has a %json without JSON after it."
            raise BadRequest(message, param=param, code="invalid_grammar") from error
        options = _own_options(schema)
        texts.append(json_lark(schema, param, limits, options) + text[end:])
    return "".join(texts)


def _own_options(schema: Any) -> dict[str, Any]:
    """Remove our own options from a schema: another dragoman may forward a grammar that it generated."""
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    if guidance not in (OPTIONS, EXACT):
        return OPTIONS
    options: dict[str, Any] = schema.pop("x-guidance")
    return options


def write_json(prepared: Any, options: dict[str, Any] = OPTIONS) -> str:
    words = prepared if isinstance(prepared, dict) else {"allOf": [prepared]}
    return f"%json {json.dumps({**words, 'x-guidance': options}, ensure_ascii=False)}"


def with_type(schema: Any) -> Any:
    """Add the type to a schema whose keywords are all for one type.

    In JSON Schema `{"minItems": 3}` also allows 1, which is not an array. Clients do not want that.
    """
    if not isinstance(schema, dict) or not APPLICATORS.isdisjoint(schema):
        return schema
    kinds = [kind for kind, words in OF_TYPES.items() if not words.isdisjoint(schema)]
    return {"type": kinds[0], **schema} if len(kinds) == 1 else schema


def prepare_schema(
    schema: Any,
    problems: SchemaProblems,
    param: str = "schema",
    limits: Limits | None = None,
    *,
    watched: bool = False,
) -> Any:
    """Return the schema as llguidance enforces it, and add what cannot be enforced to `problems`.

    `watched` means that the caller handles `problems.watched` and has the answer watched.
    """
    value = with_type(read_schema(schema, param, limits or Limits()))
    prepared = check_schema(value, problems)
    if not watched:
        for pointer in problems.watched:
            problems.add(pointer, "cannot be enforced together with reasoning or calls; leave it out")
    for pointer, options in problems.exclusive if not problems.items else ():
        if _overlap(options, prepared):
            problems.add(pointer, _OVERLAPPING)
    if not problems.items and is_endless(prepared):
        problems.add("", "allows only infinite values; make a recursive property optional")
    if not problems.items:
        wrong = _wrong(prepared)
        if wrong is not None:
            problems.items.append(_narrow(prepared, wrong))
    return prepared


def _overlap(options: list[Any], root: Any) -> bool:
    """Whether a value may match two of the options, or llguidance cannot decide.

    Each pair is combined into one schema, and all of these must allow nothing.
    """
    if len(options) == 1 or _are_tagged(options, root):
        return False
    pairs = [
        {"allOf": [left, right]} for number, left in enumerate(options) for right in options[number + 1 :]
    ]
    if len(pairs) > _MOST_PAIRS:
        return True
    asked = {"anyOf": _move_references(pairs), "$defs": {"root": _move_references(root)}}
    native = compile_grammar(byte_vocabulary(), "start: " + write_json(asked))
    if native.is_error():
        detail = native.get_error().partition("JSON schema: ")[2]
        return not detail.startswith("Unsatisfiable schema")
    native.compute_bitmask()
    return not native.is_error()


def _are_tagged(options: list[Any], root: Any) -> bool:
    """Whether one property distinguishes the options, as in most unions; llguidance is then not needed."""
    each = [_tags(option, root) for option in options]
    return any(len({tags[name] for tags in each if name in tags}) == len(options) for name in each[0])


def _tags(option: Any, root: Any) -> dict[str, str]:
    """Return the required properties of an object that have a fixed text."""
    result = resolve(root, option["$ref"]) if isinstance(option, dict) and "$ref" in option else option
    if not isinstance(result, dict) or result.get("type") != "object":
        return {}
    named = result.get("properties", {})
    must = {name: named[name] for name in result.get("required", ()) if isinstance(named.get(name), dict)}
    return {name: schema["const"] for name, schema in must.items() if isinstance(schema.get("const"), str)}


def _move_references(schema: Any) -> Any:
    """Move references to `#/$defs/root`."""
    if isinstance(schema, list):
        return [_move_references(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        word: value if word in ("enum", "const") else _move_references(value)
        for word, value in schema.items()
    }
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        result["$ref"] = f"#/$defs/root{target[1:]}"
    return result


def _wrong(prepared: Any) -> str | None:
    """Return llguidance's objection to the schema, if any."""
    native = compile_grammar(byte_vocabulary(), "start: " + write_json(prepared))
    if native.is_error():
        error = native.get_error()
        return next((message for sign, message in _LIKELY if sign in error), "cannot be compiled")
    native.compute_bitmask()
    return "allows no value" if native.is_error() else None


def _narrow(prepared: Any, message: str) -> SchemaProblem:
    """Find the smallest part with the same problem, so that the error has an exact location."""
    pointer, part = "", prepared
    shared = {
        word: prepared[word]
        for word in ("$defs", "definitions")
        if isinstance(prepared, dict) and word in prepared
    }
    searching = True
    while searching:
        searching = False
        for step, inner in _parts(part):
            text = _wrong({**shared, **inner})
            if text is not None:
                pointer, part, message, searching = at(pointer, *step), inner, text, True
                break
    return SchemaProblem(pointer, message)


def _parts(schema: Any) -> list[tuple[tuple[str | int, ...], dict[str, Any]]]:
    result: list[tuple[tuple[str | int, ...], Any]] = []
    for word, value in schema.items() if isinstance(schema, dict) else ():
        if word in ("properties", "patternProperties", "$defs", "definitions"):
            result += [((word, key), inner) for key, inner in value.items()]
        elif word in ("anyOf", "allOf", "prefixItems"):
            result += [((word, number), inner) for number, inner in enumerate(value)]
        elif word in ("items", "additionalProperties"):
            result.append(((word,), value))
    return [(step, inner) for step, inner in result if isinstance(inner, dict)]


_EMPTY: dict[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
"""Keywords that have no effect without one of these in the same schema."""
_MOST_LEVELS = 1000
"""Maximum depth of references: llguidance follows them by recursion without a limit, and crashes at 3000."""


def check_schema(schema: Any, problems: SchemaProblems) -> Any:
    """Return the schema as it is enforced, and add what cannot be enforced to `problems`. Its depth was
    checked before.
    """
    walk = _SchemaWalker(schema, problems)
    result = walk.schema(schema, "")
    walk.check_references()
    return result


class _SchemaWalker:
    def __init__(self, root: Any, problems: SchemaProblems) -> None:
        self.root = root
        self.problems = problems
        self.heights: dict[str, int] = {}
        """Number of nested schemas at each location."""
        self.anchors: dict[str, str] = {}
        self.level = self.reached = 0
        self.references: list[tuple[str, str]] = []

    def schema(self, schema: Any, pointer: str) -> Any:
        self.level += 1
        above, self.reached = self.reached, self.level
        result = self._words(schema, pointer)
        self.heights[pointer] = self.reached - self.level + 1
        self.level, self.reached = self.level - 1, max(above, self.reached)
        return result

    def _words(self, schema: Any, pointer: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.problems.add(pointer, f"must be {SHAPES['schema']}")
            return False
        before = len(self.problems.items)
        result = {
            name: self._word(name, value, at(pointer, name))
            for name, value in schema.items()
            if self._counts(name, schema, pointer)
        }
        if len(self.problems.items) > before:
            return False
        return rewrite_words(result, schema, self.root, pointer, self.problems)

    def _counts(self, name: str, schema: Mapping[str, Any], pointer: str) -> bool:
        """Whether the keyword is to be enforced. Add a problem if it cannot be."""
        row = fate_of(name)
        where = at(pointer, name)
        if row is None:
            self.problems.add(
                where, f"is not a keyword of JSON Schema; did you mean '{suggest_keyword(name)}'?"
            )
            return False
        if name in _EMPTY and not any(other in schema for other in _EMPTY[name]):
            return False
        if row.handling == "refused":
            self.problems.add(where, f"cannot be enforced; {row.note}")
            return False
        if name in ("$id", "id") and pointer:
            self.problems.add(
                where, "is only allowed at the top level, because it changes the meaning of references"
            )
        if name == "required" and isinstance(schema[name], bool):
            # Draft 3's flag of a property; in later drafts the object around it lists required properties.
            return False
        return row.handling == "enforced" and self._fits(row, schema[name], where)

    def _fits(self, row: Keyword, value: Any, where: str) -> bool:
        if not fits(value, row.shape):
            self.problems.add(where, f"must be {SHAPES[row.shape]}")
            return False
        return True

    def _word(self, name: str, value: Any, pointer: str) -> Any:
        """Return the value of one keyword, with its schemas checked."""
        match fate_of(name):
            case Keyword(shape="schema"):
                return self.schema(value, pointer)
            case Keyword(shape="schemas"):
                return [self.schema(item, at(pointer, number)) for number, item in enumerate(value)]
            case Keyword(shape="schema map"):
                return {key: self.schema(item, at(pointer, key)) for key, item in value.items()}
        if name == "items":
            if not isinstance(value, list):
                return self.schema(value, pointer)
            return [self.schema(item, at(pointer, number)) for number, item in enumerate(value)]
        if name == "dependencies":
            return self._dependencies(value, pointer)
        if name == "$anchor":
            self.anchors[value] = pointer.rpartition("/")[0]
        if name == "$ref":
            return self._reference(value, pointer)
        return value

    def _dependencies(self, value: Any, pointer: str) -> Any:
        if not isinstance(value, dict):
            self.problems.add(pointer, "must be an object of lists of names or schemas")
            return {}
        return {
            key: item if fits(item, "names") else self.schema(item, at(pointer, key))
            for key, item in value.items()
        }

    def _reference(self, value: str, pointer: str) -> str:
        own = self.root.get("$id")
        if isinstance(own, str) and own and value.startswith(own.rstrip("#")):
            value = "#" + value[len(own.rstrip("#")) :].lstrip("#")
        if not value.startswith("#"):
            self.problems.add(pointer, "refers to another document; put that schema under $defs of this one")
        else:
            self.references.append((pointer, unquote(value[1:])))
        return value

    def check_references(self) -> None:
        """Check that references lead to checked schemas: anything else would be enforced unchecked."""
        reached = {""}
        for pointer, target in self.references:
            by_path = not target or target.startswith("/")
            if not by_path and self.problems.watched:
                self.problems.add(pointer, "must be a path such as #/$defs/name in a schema with uniqueItems")
            text = target if by_path else self.anchors.get(target)
            if text not in self.heights:
                self.problems.add(pointer, f"refers to '#{target}', where there is no schema")
            else:
                reached.add(text)
        if sum(self.heights[json_path] for json_path in reached) > _MOST_LEVELS:
            self.problems.add("", "refers to more than {_MOST_LEVELS} nested schemas; use fewer $ref")


_MOST_ROUNDS = 20


def is_endless(root: Any) -> bool:
    """Whether the schema allows only infinite values. Returns False if unknown."""
    known: dict[str, bool] = {}
    look = _EndlessCheck(known)
    # Every reference counts as endless until a finite value is found for it; each round finds more.
    for _ in range(_MOST_ROUNDS):
        before = dict(known)
        look.endless(root)
        for reference in before:
            known[reference] = known[reference] and look.endless(resolve(root, reference))
        if known == before:
            return look.endless(root)
    return False


class _EndlessCheck:
    def __init__(self, known: dict[str, bool]) -> None:
        self.known = known

    def endless(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return False
        parts = [self.endless(part) for part in schema.get("allOf", [])]
        options = [self.endless(option) for option in schema.get("anyOf", [])]
        referred = "$ref" in schema and self.known.setdefault(schema["$ref"], True)
        return referred or any(parts) or (bool(options) and all(options)) or self._holds_one(schema)

    def _holds_one(self, schema: Mapping[str, Any]) -> bool:
        """Whether the schema allows only an object or a list that must contain an endless value."""
        kind = schema.get("type")
        if kind == "object":
            named = schema.get("properties", {})
            return any(self.endless(named.get(name, True)) for name in schema.get("required", []))
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        if kind != "array" or not least:
            return False
        must = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return any(self.endless(item) for item in must)
