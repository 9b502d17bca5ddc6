"""The tools of a request: how they are declared, and what may be said about calling them."""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.api.custom_tools import CustomTool, as_function
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.mcp.policy import AllowedTools, RequireApproval

MAX_NAME = 256

Function: TypeAlias = dict[str, Any]


class Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function", "custom", "mcp"] = "function"
    function: Function | None = None
    custom: CustomTool | None = None
    # Of one of the server's own MCP servers, whose tools the server runs itself.
    server_label: str | None = None
    server_description: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None


class Declared(Struct, frozen=True):
    """The functions of a request, whichever of the two fields they came in."""

    field: str
    functions: Sequence[Function]
    places: Sequence[str]
    """Where each was declared: `tools[2].function`."""
    custom: frozenset[str] = frozenset()
    """Those that stand for custom tools."""

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, functions: Sequence[Function] | None = None) -> "Declared":
        if not tools and not functions:
            return _NONE
        if functions and not tools:
            return cls("functions", functions, [f"functions[{number}]" for number in range(len(functions))])
        known = [(number, tool) for number, tool in enumerate(tools or ()) if tool.type != "mcp"]
        made = [_function(tool, f"tools[{number}]") for number, tool in known]
        places = [f"tools[{number}].{tool.type}" for number, tool in known]
        return cls("tools", made, places, frozenset(tool.custom.name for _, tool in known if tool.custom))

    def placed(self) -> Iterator[tuple[str, Function]]:
        return zip(self.places, self.functions, strict=True)


_NONE = Declared("tools", (), ())


def _function(tool: Tool, place: str) -> Function:
    given = tool.function if tool.type == "function" else tool.custom
    if given is None or (tool.function is not None and tool.custom is not None):
        raise wrong(place, f"must have a '{tool.type}', and nothing else beside its type")
    return as_function(given, f"{place}.custom") if isinstance(given, CustomTool) else given


def check_tools(declared: Declared, limits: Limits) -> None:
    """Raises at the first that cannot be used: `tools[3].function.name`."""
    check_count(len(declared.functions), limits.tools, declared.field, declared.field)
    _check_functions(declared.placed())
    _check_bytes(declared, limits.tool_bytes)


def _check_bytes(declared: Declared, most: int) -> None:
    try:
        size = len(encode_json(declared.functions))
    except RecursionError:
        raise wrong(declared.field, "is nested too deeply") from None
    check_count(size, most, declared.field, f"bytes of {declared.field}")


def _check_functions(placed: Iterable[tuple[str, Function]]) -> None:
    seen: set[str] = set()
    for place, function in placed:
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise wrong(f"{place}.name", f"must be a string of 1 to {MAX_NAME} characters")
        if name in seen:
            raise wrong(f"{place}.name", f"is {name!r} a second time; names must differ")
        seen.add(name)
        if not isinstance(function.get("description"), str | None):
            raise wrong(f"{place}.description", "must be a string")
        _check_parameters(function.get("parameters"), f"{place}.parameters")
        if function.get("strict") not in (None, False, True):
            raise wrong(f"{place}.strict", "must be true or false")


def _check_parameters(schema: Any, place: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise wrong(place, "must be a JSON Schema object")
    if schema.get("type", "object") != "object":
        raise wrong(f"{place}.type", "must be 'object': arguments are passed by name")
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong(f"{place}.properties", "must be an object")


def for_template(functions: Iterable[Function]) -> tuple[Function, ...]:
    """Tools as templates know them; null means unset there too."""
    return tuple(
        {"type": "function", "function": {key: value for key, value in one.items() if value is not None}}
        for one in functions
    )


def joined_name(space: str, name: str) -> str:
    """`joined_name("files", "read")` and `joined_name("files__", "read")` give `files__read`."""
    return f"{space.rstrip('_')}__{name}"


def free_name(name: str, label: str, taken: Container[str]) -> str:
    """What the model knows a tool of an MCP server by: its name, or a longer one where that is taken."""
    if name not in taken:
        return name
    longer = joined_name(label, name)
    numbered = (f"{longer}_{number}" for number in count(2))
    return longer if longer not in taken else next(each for each in numbered if each not in taken)


def wrong(place: str, what: str) -> BadRequest:
    return BadRequest(f"'{place}' {what}.", param=place, code="invalid_value")
