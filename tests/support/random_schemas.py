"""Random tools and schemas, and whether an answer is in them.

Every schema is bounded, so that an answer in it has an end that even a small model at temperature 1 comes to.
"""

import json
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

NAMES = ("city", "unit", "days", "user_id", "tags", "notes", "filter", "is-new", "größe", "from", "x")
WORDS = ("red", "green", "dark blue", "a/b", "it's", 'say "so"', "naïve", "Ω")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
"""Those whose texts have an end."""
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{4}$", "^(on|off)$")


def schema(chance: Random, depth: int = 2) -> dict[str, Any]:
    """A schema of an object: nested ones, lists, enums, formats, unions, and some of it optional."""
    names = chance.sample(NAMES, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _value(chance: Random, depth: int) -> dict[str, Any]:
    deep = depth > 0 and chance.random() < 0.4
    if not deep:
        return _scalar(chance)
    match chance.randrange(3):
        case 0:
            return schema(chance, depth - 1)
        case 1:
            least = chance.randint(0, 2)
            return {
                "type": "array",
                "items": _value(chance, depth - 1),
                "minItems": least,
                "maxItems": least + chance.randint(0, 2),
            }
        case _:
            return {"anyOf": [_scalar(chance), _value(chance, depth - 1)]}


def _scalar(chance: Random) -> dict[str, Any]:
    low = chance.randint(-1000, 1000)
    rows: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chance.randint(1, 16)},
        {"type": "string", "minLength": 2, "maxLength": 12},
        {"type": "string", "pattern": chance.choice(PATTERNS)},
        {"type": "string", "format": chance.choice(FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 500)},
        {"type": "boolean"},
        {"type": ["boolean", "null"]},
        {"enum": chance.sample(WORDS, chance.randint(1, 4))},
        {"enum": [chance.randint(0, 9), None, "none", True]},
        {"const": chance.choice(WORDS)},
    ]
    return chance.choice(rows)


def tools(chance: Random, depth: int = 2) -> list[dict[str, Any]]:
    names = chance.sample(("get_weather", "search", "sendMail", "db_query"), chance.randint(1, 3))
    return [
        {"type": "function", "function": {"name": name, "parameters": schema(chance, depth)}}
        for name in names
    ]


def wrong_text(text: str, wanted: dict[str, Any]) -> str | None:
    """What is wrong with a text that should be JSON in a schema; None: nothing."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON ({error}): {text!r}"
    checker = Draft202012Validator(wanted, format_checker=Draft202012Validator.FORMAT_CHECKER)
    item = next(checker.iter_errors(value), None)
    return None if item is None else f"{item.message}: {text!r} in {json.dumps(wanted)}"


def wrong_calls(calls: list[tuple[str, str]], declared: list[dict[str, Any]]) -> str | None:
    """What is wrong with calls, as `(name, arguments)`; there must be one at least."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in declared}
    if not calls:
        return "no call"
    for name, arguments in calls:
        if name not in schemas:
            return f"a call of {name!r}"
        if (text := wrong_text(arguments, schemas[name])) is not None:
            return f"{name}: {text}"
    return None
