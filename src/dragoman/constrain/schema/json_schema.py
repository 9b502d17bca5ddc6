"""A JSON Schema, checked word by word and written as llguidance enforces it: `%json {...}`.

    {"type": "string", "format": "date"}  has a pattern for the format
    {"not": {"type": "string"}}           has a problem: '#/not' cannot be enforced; say what is allowed ...

Every word goes through `keywords.py`: nothing that forbids a value is left out. What llguidance then has
against the whole is told by its place, too.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dragoman.constrain.budget import compile_grammar, read_schema
from dragoman.constrain.schema.keywords import (
    APPLICATORS,
    OF_TYPES,
    SHAPES,
    Keyword,
    Problems,
    SchemaProblem,
    at,
    fate_of,
    fits,
    slip_of,
)
from dragoman.constrain.schema.rewrites import rewrite_words
from dragoman.constrain.vocabulary import byte_vocabulary
from dragoman.dialects.schema import resolve
from dragoman.errors import BadRequest
from dragoman.limits import Limits

OPTIONS: dict[str, Any] = {
    # Space where JSON allows it, one or a line break with an indent: a model that only makes room never ends.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,64}",
    # Without \u, no name can be spelled in a way that a rule for that name does not see.
    "json_allowed_escapes": 'nrbtf\\"',
}
EXACT: dict[str, Any] = {
    **{word: value for word, value in OPTIONS.items() if word != "whitespace_pattern"},
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON as models write it in calls: with a space after a comma and a colon, or without."""
_MOST_PAIRS = 5000
_OVERLAPPING = (
    "has options that one value may fit both of; use anyOf, or a required property with a const of its own "
    "in each option"
)
_LIKELY = (
    ("not disjoint", "has patternProperties that one name may fit both of; make them exclude each other"),
    ("min/maxProperties", "has minProperties or maxProperties beside properties that are not required"),
    (
        "sibling keys",
        "has words beside a $ref that leads back to itself; put them into the schema it refers to",
    ),
    ("too large", "is too large when its parts are put together; use fewer of allOf, anyOf and $ref"),
    ("Unable to determine", "has patterns that cannot be put together; use one that says all"),
    ("Unsatisfiable", "allows no value at all"),
    ("empty", "allows no value at all"),
)


def json_lark(
    schema: Any, param: str = "schema", limits: Limits | None = None, options: dict[str, Any] = OPTIONS
) -> str:
    """`%json {...}` for a rule; raises `BadRequest` where the schema cannot be enforced in full."""
    problems = Problems()
    prepared = prepare_schema(schema, problems, param, limits)
    problems.check(param)
    return write_json(prepared, options)


def check_inner_schemas(grammar: str, param: str, limits: Limits) -> str:
    """A person's grammar, with each `%json {...}` in it checked like any other schema."""
    before, *pieces = grammar.split("%json")
    found = [before]
    for piece in pieces:
        text = piece.lstrip()
        try:
            schema, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            message = f"'{param}' has a %json that no JSON follows."
            raise BadRequest(message, param=param, code="invalid_grammar") from error
        options = _own_options(schema)
        found.append(json_lark(schema, param, limits, options) + text[end:])
    return "".join(found)


def _own_options(schema: Any) -> dict[str, Any]:
    """Takes our own instructions out of a schema: another dragoman may hand on a grammar that it has made."""
    given = schema.get("x-guidance") if isinstance(schema, dict) else None
    if given not in (OPTIONS, EXACT):
        return OPTIONS
    options: dict[str, Any] = schema.pop("x-guidance")
    return options


def write_json(prepared: Any, options: dict[str, Any] = OPTIONS) -> str:
    words = prepared if isinstance(prepared, dict) else {"allOf": [prepared]}
    return f"%json {json.dumps({**words, 'x-guidance': options}, ensure_ascii=False)}"


def with_type(schema: Any) -> Any:
    """A schema that speaks of one type of values only means values of that type.

    In JSON Schema `{"minItems": 3}` also allows 1, because 1 is no array. Nobody who asks for it wants that.
    """
    if not isinstance(schema, dict) or not APPLICATORS.isdisjoint(schema):
        return schema
    kinds = [kind for kind, words in OF_TYPES.items() if not words.isdisjoint(schema)]
    return {"type": kinds[0], **schema} if len(kinds) == 1 else schema


def prepare_schema(
    schema: Any,
    problems: Problems,
    param: str = "schema",
    limits: Limits | None = None,
    *,
    watched: bool = False,
) -> Any:
    """The schema as llguidance enforces it; what cannot be is in `problems`.

    `watched`: whoever asks looks at `problems.watched`, too, and has the answer watched.
    """
    value = with_type(read_schema(schema, param, limits or Limits()))
    prepared = check_schema(value, problems)
    if not watched:
        for place in problems.watched:
            problems.add(place, "cannot be enforced beside reasoning or calls; leave it out")
    for place, options in problems.exclusive if not problems.found else ():
        if _overlap(options, prepared):
            problems.add(place, _OVERLAPPING)
    if not problems.found and is_endless(prepared):
        problems.add("", "allows only values that never end; make a property that leads back to it optional")
    if not problems.found:
        wrong = _wrong(prepared)
        if wrong is not None:
            problems.found.append(_narrow(prepared, wrong))
    return prepared


def _overlap(options: list[Any], root: Any) -> bool:
    """Whether a value may fit two of the options. It may, where llguidance cannot tell.

    All that fits two of them is put into one schema, which must be one that allows nothing.
    """
    if len(options) == 1 or _are_tagged(options, root):
        return False
    pairs = [{"allOf": [one, other]} for number, one in enumerate(options) for other in options[number + 1 :]]
    if len(pairs) > _MOST_PAIRS:
        return True
    asked = {"anyOf": _move_references(pairs), "$defs": {"root": _move_references(root)}}
    native = compile_grammar(byte_vocabulary(), "start: " + write_json(asked))
    if native.is_error():
        said = native.get_error().partition("JSON schema: ")[2]
        return not said.startswith("Unsatisfiable schema")
    native.compute_bitmask()
    return not native.is_error()


def _are_tagged(options: list[Any], root: Any) -> bool:
    """Whether one property tells them apart, as in most unions: then there is no need to ask."""
    each = [_tags(option, root) for option in options]
    return any(len({tags[name] for tags in each if name in tags}) == len(options) for name in each[0])


def _tags(option: Any, root: Any) -> dict[str, str]:
    """The properties that an object must have, and that have one text only."""
    found = resolve(root, option["$ref"]) if isinstance(option, dict) and "$ref" in option else option
    if not isinstance(found, dict) or found.get("type") != "object":
        return {}
    named = found.get("properties", {})
    must = {name: named[name] for name in found.get("required", ()) if isinstance(named.get(name), dict)}
    return {name: schema["const"] for name, schema in must.items() if isinstance(schema.get("const"), str)}


def _move_references(schema: Any) -> Any:
    """With references to what is now `#/$defs/root`."""
    if isinstance(schema, list):
        return [_move_references(one) for one in schema]
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
    """What llguidance has against it."""
    native = compile_grammar(byte_vocabulary(), "start: " + write_json(prepared))
    if native.is_error():
        error = native.get_error()
        return next((message for sign, message in _LIKELY if sign in error), "cannot be compiled")
    native.compute_bitmask()
    return "allows no value at all" if native.is_error() else None


def _narrow(prepared: Any, message: str) -> SchemaProblem:
    """The smallest part with the same trouble, so that a person finds the place."""
    place, part = "", prepared
    shared = {
        word: prepared[word]
        for word in ("$defs", "definitions")
        if isinstance(prepared, dict) and word in prepared
    }
    searching = True
    while searching:
        searching = False
        for step, inner in _parts(part):
            found = _wrong({**shared, **inner})
            if found is not None:
                place, part, message, searching = at(place, *step), inner, found, True
                break
    return SchemaProblem(place, message)


def _parts(schema: Any) -> list[tuple[tuple[str | int, ...], dict[str, Any]]]:
    found: list[tuple[tuple[str | int, ...], Any]] = []
    for word, value in schema.items() if isinstance(schema, dict) else ():
        if word in ("properties", "patternProperties", "$defs", "definitions"):
            found += [((word, key), inner) for key, inner in value.items()]
        elif word in ("anyOf", "allOf", "prefixItems"):
            found += [((word, number), inner) for number, inner in enumerate(value)]
        elif word in ("items", "additionalProperties"):
            found.append(((word,), value))
    return [(step, inner) for step, inner in found if isinstance(inner, dict)]


_EMPTY: dict[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
"""Words that mean nothing unless one of these stands beside them."""
_MOST_LEVELS = 1000
"""llguidance follows references by recursion and has no bound of its own: 3000 levels end the process."""


def check_schema(schema: Any, problems: Problems) -> Any:
    """The schema as it is enforced; what cannot be goes to `problems`. Its depth was checked before."""
    walk = _Walk(schema, problems)
    result = walk.schema(schema, "")
    walk.check_references()
    return result


class _Walk:
    def __init__(self, root: Any, problems: Problems) -> None:
        self.root = root
        self.problems = problems
        self.heights: dict[str, int] = {}
        """How many schemas stand within each other at a place."""
        self.anchors: dict[str, str] = {}
        self.level = self.reached = 0
        self.references: list[tuple[str, str]] = []

    def schema(self, schema: Any, place: str) -> Any:
        self.level += 1
        above, self.reached = self.reached, self.level
        result = self._words(schema, place)
        self.heights[place] = self.reached - self.level + 1
        self.level, self.reached = self.level - 1, max(above, self.reached)
        return result

    def _words(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.problems.add(place, f"must be {SHAPES['schema']}")
            return False
        before = len(self.problems.found)
        result = {
            name: self._word(name, value, at(place, name))
            for name, value in schema.items()
            if self._counts(name, schema, place)
        }
        if len(self.problems.found) > before:
            return False
        return rewrite_words(result, schema, self.root, place, self.problems)

    def _counts(self, name: str, schema: Mapping[str, Any], place: str) -> bool:
        """Whether the word is to be enforced. Adds a problem where it cannot be."""
        row = fate_of(name)
        where = at(place, name)
        if row is None:
            self.problems.add(where, f"is no word of JSON Schema; did you mean '{slip_of(name)}'?")
            return False
        if name in _EMPTY and not any(other in schema for other in _EMPTY[name]):
            return False
        if row.fate == "refused":
            self.problems.add(where, f"cannot be enforced; {row.note}")
            return False
        if name in ("$id", "id") and place:
            self.problems.add(where, "is only allowed at the top: references would mean something else below")
        if name == "required" and isinstance(schema[name], bool):
            # Draft 3's, of a property: the object around it says what is required.
            return False
        return row.fate == "enforced" and self._fits(row, schema[name], where)

    def _fits(self, row: Keyword, value: Any, where: str) -> bool:
        if not fits(value, row.shape):
            self.problems.add(where, f"must be {SHAPES[row.shape]}")
            return False
        return True

    def _word(self, name: str, value: Any, place: str) -> Any:
        """The value of one word, with the schemas in it checked."""
        match fate_of(name):
            case Keyword(shape="schema"):
                return self.schema(value, place)
            case Keyword(shape="schemas"):
                return [self.schema(one, at(place, number)) for number, one in enumerate(value)]
            case Keyword(shape="schema map"):
                return {key: self.schema(one, at(place, key)) for key, one in value.items()}
        if name == "items":
            if not isinstance(value, list):
                return self.schema(value, place)
            return [self.schema(one, at(place, number)) for number, one in enumerate(value)]
        if name == "dependencies":
            return self._dependencies(value, place)
        if name == "$anchor":
            self.anchors[value] = place.rpartition("/")[0]
        if name == "$ref":
            return self._reference(value, place)
        return value

    def _dependencies(self, value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            self.problems.add(place, "must be an object of lists of names or schemas")
            return {}
        return {
            key: one if fits(one, "names") else self.schema(one, at(place, key)) for key, one in value.items()
        }

    def _reference(self, value: str, place: str) -> str:
        own = self.root.get("$id")
        if isinstance(own, str) and own and value.startswith(own.rstrip("#")):
            value = "#" + value[len(own.rstrip("#")) :].lstrip("#")
        if not value.startswith("#"):
            self.problems.add(place, "refers to another document; put that schema under $defs of this one")
        else:
            self.references.append((place, unquote(value[1:])))
        return value

    def check_references(self) -> None:
        """Only what was checked may be referred to: anything else would be enforced as it stands."""
        reached = {""}
        for place, target in self.references:
            by_path = not target or target.startswith("/")
            if not by_path and self.problems.watched:
                self.problems.add(place, "must be a path, as #/$defs/name, in a schema with uniqueItems")
            found = target if by_path else self.anchors.get(target)
            if found not in self.heights:
                self.problems.add(place, f"refers to '#{target}', where there is no schema")
            else:
                reached.add(found)
        if sum(self.heights[place] for place in reached) > _MOST_LEVELS:
            self.problems.add("", "refers to more schemas than can be followed; use fewer of $ref")


_MOST_ROUNDS = 20


def is_endless(root: Any) -> bool:
    """Whether no value fits that ever ends. It says no where it does not know."""
    known: dict[str, bool] = {}
    look = _Look(known)
    # Every reference counts as endless until something is found that ends it; each round finds more.
    for _ in range(_MOST_ROUNDS):
        before = dict(known)
        look.endless(root)
        for reference in before:
            known[reference] = known[reference] and look.endless(resolve(root, reference))
        if known == before:
            return look.endless(root)
    return False


class _Look:
    def __init__(self, known: dict[str, bool]) -> None:
        self.known = known

    def endless(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return False
        parts = [self.endless(one) for one in schema.get("allOf", [])]
        options = [self.endless(one) for one in schema.get("anyOf", [])]
        referred = "$ref" in schema and self.known.setdefault(schema["$ref"], True)
        return referred or any(parts) or (bool(options) and all(options)) or self._holds_one(schema)

    def _holds_one(self, schema: Mapping[str, Any]) -> bool:
        """An object or a list, and nothing else, with an endless value in it that must be there."""
        kind = schema.get("type")
        if kind == "object":
            named = schema.get("properties", {})
            return any(self.endless(named.get(name, True)) for name in schema.get("required", []))
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        if kind != "array" or not least:
            return False
        must = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return any(self.endless(one) for one in must)
