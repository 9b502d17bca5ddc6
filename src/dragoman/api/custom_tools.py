"""Tools that take a text instead of arguments. Models know functions only, so each becomes one: `input`."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.errors import BadRequest
from dragoman.turns.custom_calls import INPUT


class Grammar(Struct, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class CustomTool(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


def as_function(tool: CustomTool, place: str, *, grammar: str = "format.grammar") -> dict[str, Any]:
    """The function that stands for it. It is strict, so that its input can be read back.

    `grammar` is where the grammar of a tool is said, beside its place.
    """
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": {
            "type": "object",
            "properties": {INPUT: _schema(tool.format, f"{place}.{grammar}")},
            "required": [INPUT],
            "additionalProperties": False,
        },
        "strict": True,
    }


def as_arguments(text: str) -> str:
    """What an earlier call of a custom tool is in the prompt."""
    return encode_json({INPUT: text}).decode()


def _schema(wanted: CustomFormat | None, place: str) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {"type": "string"}
    if wanted.grammar is None:
        raise BadRequest(f"'{place}' is required.", param=place, code="missing_field")
    if wanted.grammar.syntax == "lark":
        message = (
            "Inside of a call a text is quoted, which a Lark grammar cannot describe; send a regex, or have"
            " the answer itself in the grammar, with guided_grammar."
        )
        raise BadRequest(message, param=f"{place}.syntax", code="unsupported_field")
    return {"type": "string", "pattern": f"^(?:{wanted.grammar.definition})$"}
