"""A JSON Schema, checked word by word and written as llguidance enforces it.

    check_schema({"type": "string", "format": "date"})  has a pattern for the format
    check_schema({"not": {"type": "string"}})           has a problem: '#/not' cannot be enforced

Every word goes through `keywords.py`: nothing that forbids a value is left out.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dragoman.constrain.schema.keywords import SHAPES, Keyword, fate_of, fits
from dragoman.constrain.schema.problems import Problems, at
from dragoman.constrain.schema.rewrites import rewrite_words
from dragoman.dialects.schema import resolve

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
            self.problems.add(
                where, "is no word of JSON Schema that is known here; leave it out or name it x-..."
            )
            return False
        if name in _EMPTY and not any(other in schema for other in _EMPTY[name]):
            return False
        if row.fate == "refused":
            self.problems.add(where, f"cannot be enforced; {row.note}")
            return False
        if name in ("$id", "id") and place:
            self.problems.add(where, "is only allowed at the top: references would mean something else below")
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
