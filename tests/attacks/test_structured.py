"""Schemas, expressions and grammars that would take for ever, or take the server down."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.attacks.bodies import GENERATING, changed, good
from tests.attacks.frame import AttackedServer, Frame, attacked, check

MEMORY_MB = 64
"""Grammars are kept for who asks for them again, up to a limit."""
KEPT, SCHEMAS = 260, 300
"""More than are kept, and as many again and again, each other than all before it."""
CHAT = "/v1/chat/completions"
PARENTHESES = "(" * 30_000 + "a" + ")" * 30_000
NAMES = "root ::= a0\n" + "\n".join(f"a{n} ::= a{n + 1}" for n in range(4000)) + '\na4000 ::= "x"'
PRODUCT = " & ".join(f"/(?:.{{{length}}})*/" for length in (97, 89, 83))
REFUSED: dict[str, tuple[str, Any]] = {
    "a root of itself": ("grammar", "root ::= root"),
    "roots of each other": ("grammar", "root ::= a\na ::= b\nb ::= a"),
    "a start of itself": ("guided_grammar", "start: start"),
    "parentheses": ("guided_regex", PARENTHESES[:8000]),
    "long parentheses": ("guided_regex", PARENTHESES),
    "GBNF parentheses": ("grammar", "root ::= " + PARENTHESES),
    "GBNF repetitions": ("grammar", 'root ::= "a"' + "?" * 60_000),
    "GBNF names": ("grammar", NAMES),
    "Lark parentheses": ("guided_grammar", "start: " + PARENTHESES),
    "very many states": ("guided_grammar", f"start: T\nT: {PRODUCT}"),
    "a deep schema": ("guided_json", '{"items":' * 100 + "{}" + "}" * 100),
    "no expression": ("guided_regex", "(a"),
    "repetitions": ("guided_regex", "a" + "{2}" * 1000),
    "no type": ("guided_json", {"type": "nothing"}),
    "a type of types": ("guided_json", {"type": {"type": "string"}}),
    "no pattern": ("guided_json", {"type": "string", "pattern": "(a"}),
    "a pattern that looks back": ("guided_json", {"type": "string", "pattern": "(a)\\1"}),
    "a reference to nothing": ("guided_json", {"$ref": "#/nowhere"}),
    "a reference to elsewhere": ("guided_json", {"$ref": "http://127.0.0.1:1/schema"}),
    "a reference to a file": ("guided_json", {"$ref": "file:///etc/passwd"}),
    "references in a ring": ("guided_json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_every_route(frame: Frame, name: str) -> None:
    field, value = REFUSED[name]
    for route in GENERATING:
        error = frame.refused(route, changed(route, field, value), status=(400,))
        assert (error["param"] or "").startswith(field), error


BACKTRACKING: dict[str, dict[str, Any]] = {
    "an expression": {"guided_regex": "(a+)+b"},
    "GBNF": {"grammar": 'root ::= ("a"+)+ "b"'},
    "Lark": {"guided_grammar": "start: /(a+)+b/"},
    "a schema": {"guided_json": {"type": "string", "pattern": "^(a+)+b$"}},
}


@pytest.mark.parametrize("name", BACKTRACKING)
def test_what_makes_others_backtrack_is_compiled_like_any_other(frame: Frame, name: str) -> None:
    for route in GENERATING:
        assert frame.sent(route, {**good(route), **BACKTRACKING[name]}).status == 200


# Any JSON

WORDS = (
    "type", "properties", "items", "anyOf", "allOf", "oneOf", "not", "enum", "const", "$ref", "$defs",
    "required", "pattern", "format", "minLength", "maxItems", "multipleOf", "minimum", "string", "object",
    "array", "null", "integer", "(a+)+b", "[", "^a*$", "date-time", "#", "#/$defs/a", "\x00", "é", "",
)  # fmt: skip


def anything(chance: Random, depth: int = 4) -> Any:
    """JSON that has the words of schemas in the wrong places, and sometimes in the right ones."""
    kind = chance.randrange(9 if depth else 6)
    if kind < 3:
        return chance.choice(WORDS)
    if kind < 6:
        return chance.choice((0, 1, -1, 1.5, 2**31, 10**18, -1e300, True, False, None))
    if kind == 6:
        return [anything(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(WORDS): anything(chance, depth - 1) for _ in range(chance.randrange(5))}


def places(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way in which a request may bring a schema."""
    function = {"name": "f", "parameters": schema, "strict": True}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    flat = {"type": "json_schema", "name": "a", "schema": schema}
    yield CHAT, {"response_format": named}
    yield CHAT, {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    yield "/v1/responses", {"text": {"format": flat}}
    yield "/v1/responses", {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    yield "/v1/completions", {"guided_json": schema}


@pytest.mark.parametrize("seed", range(10))
def test_a_schema_may_be_any_json(frame: Frame, seed: int) -> None:
    chance = Random(seed)
    for _ in range(8):
        schema = anything(chance)
        for route, fields in places(schema):
            assert frame.sent(route, {**good(route), **fields}).status in (200, 400)


# Caches


def test_no_schema_leaves_anything_on_disk_or_much_in_memory(tmp_path: Path) -> None:
    """One server of its own: a folder where it could write, and a memory that nobody else fills."""
    with attacked(data_dir=str(tmp_path)) as server:
        for number in range(KEPT):
            ask(server, number)
        before, files = server.memory(), written(server)
        for number in range(KEPT, KEPT + SCHEMAS):
            ask(server, number)
        assert (server.memory() - before) / 2**20 < 24
        assert (written(server), list(tmp_path.rglob("*"))) == (files, [])


def ask(server: AttackedServer, number: int) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}}
    reply = server.send(CHAT, {**good(CHAT), "guided_json": schema})
    check(reply)
    assert json.loads(reply.body)["object"] == "chat.completion"


def written(server: AttackedServer) -> set[str]:
    """The files that the server has open."""
    folder = f"/proc/{server.process.pid}/fd"
    links = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
    return {link for link in links if link.startswith("/") and not link.startswith(("/dev", "/proc"))}
