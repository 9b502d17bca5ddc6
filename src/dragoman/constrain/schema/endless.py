"""Schemas that only endless values fit: an object that must hold another of its kind, and so on."""

from collections.abc import Mapping
from typing import Any

from dragoman.constrain.schema.disjoint import resolved

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
            known[reference] = known[reference] and look.endless(resolved(root, reference))
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
