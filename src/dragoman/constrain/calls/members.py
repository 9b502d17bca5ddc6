"""What objects and lists have in common in all syntaxes: what must be there, and what stands between."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.constrain.calls.schema_parts import EVERYTHING, Where
from dragoman.constrain.grammar.rules import Rules, Symbol, either


def object_parts(schema: Mapping[str, Any], where: Where) -> tuple[Mapping[str, Any], set[str], Any]:
    """The properties, which of them must be there, and the schema of others, which may be False.

    Where properties are declared and nothing is said of others, a call has none: those who mean more say so.
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


def separated(
    rules: Rules, separator: str, members: Sequence[tuple[Symbol, bool]], further: Symbol | None
) -> str:
    """Members in order, some of which may be missing, with separators between those that are there."""
    tail = f"({separator} {further})*" if further else ""
    ways = [f"{further} {tail}"] if further else []
    none_required = True
    for member, required in reversed(members):
        none_required = none_required and not required
        # Beginning with this member, all that were optional before it are missing.
        ways = [f"{member} {tail}"] if required else [f"{member} {tail}", *ways]
        following = f"{separator} {member}" if required else f"({separator} {member})?"
        tail = rules.rule(f"{following} {tail}")
    inside = either(rules.rule(way) for way in ways) if ways else ""
    return f"{inside}?" if none_required and inside else inside


def repeated(
    rules: Rules,
    separator: str,
    first: Sequence[Symbol],
    rest: Symbol | None,
    least: int,
    most: int | None,
    where: Where,
) -> str:
    """Items with separators between them, at least and at most so many."""
    if rest is None:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and most < least:
        where.refuse("allows no list at all")
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
    rules: Rules,
    separator: str,
    members: Sequence[tuple[Symbol, bool]],
    rest: Symbol | None,
    least: int,
    most: int | None,
) -> str:
    """Items of which each has its own schema: one may be there only if all before it are."""
    tail = ""
    if rest is not None and most != len(members):
        upper = "" if most is None else most - len(members)
        tail = f"({separator} {rest}){{{max(least - len(members), 0)},{upper}}}"
    for at, (item, needed) in reversed(list(enumerate(members))):
        lead = f"{separator} " if at else ""
        tail = f"({lead}{item} {tail})" + ("" if needed else "?")
    return tail
