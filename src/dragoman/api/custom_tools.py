"""Tools that take a text instead of arguments. Models know functions only, so each becomes one: `input`."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.constrain.calls.tool_schemas import LARK
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
        "description": _description(tool),
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
        return {"type": "string", LARK: wanted.grammar.definition}
    return {"type": "string", "pattern": f"^(?:{wanted.grammar.definition})$"}


def _description(tool: CustomTool) -> str | None:
    """With the grammar: not every template shows the words of a schema, and the model has to know it."""
    grammar = tool.format.grammar if tool.format else None
    if grammar is None:
        return tool.description
    kind = "this Lark grammar" if grammar.syntax == "lark" else "this regular expression"
    said = f"The input must match {kind}:\n{grammar.definition}"
    return f"{tool.description}\n\n{said}" if tool.description else said
