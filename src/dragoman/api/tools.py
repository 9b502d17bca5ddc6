"""The tools of a request: how they are declared, and what may be said about calling them."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count

MAX_NAME = 256
FORCING = ("function", "custom", "allowed_tools")

Function: TypeAlias = dict[str, Any]


class FunctionTool(Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


def check_tools(tools: Sequence[FunctionTool], limits: Limits, param: str = "tools") -> None:
    """Raises at the first tool that cannot be used: `tools[3].function.name`."""
    check_count(len(tools), limits.tools, param, "tools")
    _check_functions([(f"{param}[{n}].function", tool.function) for n, tool in enumerate(tools)])
    _check_bytes(tools, limits, param)


def check_legacy(functions: Sequence[Function], limits: Limits) -> None:
    """The same for `functions`, which is what tools were called first."""
    check_count(len(functions), limits.tools, "functions", "functions")
    _check_functions([(f"functions[{n}]", function) for n, function in enumerate(functions)])
    _check_bytes(functions, limits, "functions")


def _check_bytes(declared: Sequence[Any], limits: Limits, param: str) -> None:
    try:
        size = len(encode_json(declared))
    except RecursionError:
        raise _wrong(param, "is nested too deeply") from None
    check_count(size, limits.tool_bytes, param, f"bytes of {param}")


def _check_functions(placed: Iterable[tuple[str, Function]]) -> None:
    seen: set[str] = set()
    for place, function in placed:
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise _wrong(f"{place}.name", f"must be a string of 1 to {MAX_NAME} characters")
        if name in seen:
            raise _wrong(f"{place}.name", f"is {name!r} a second time; names must differ")
        seen.add(name)
        if not isinstance(function.get("description"), str | None):
            raise _wrong(f"{place}.description", "must be a string")
        _check_parameters(function.get("parameters"), f"{place}.parameters")
        _check_strict(function.get("strict"), f"{place}.strict")


def _check_parameters(schema: Any, place: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise _wrong(place, "must be a JSON Schema object")
    if schema.get("type", "object") != "object":
        raise _wrong(f"{place}.type", "must be 'object': arguments are passed by name")
    if not isinstance(schema.get("properties", {}), dict):
        raise _wrong(f"{place}.properties", "must be an object")


def _check_strict(strict: Any, place: str) -> None:
    if strict not in (None, False, True):
        raise _wrong(place, "must be true or false")
    if strict:
        message = "This server does not force arguments into a schema yet; leave out strict, or send false."
        raise BadRequest(message, param=place, code="unsupported_field")


def check_choice(choice: Any, param: str) -> None:
    """`auto` and `none` are honoured; what forces a call is refused."""
    if choice in (None, "auto", "none"):
        return
    kind = choice.get("type", "function") if isinstance(choice, dict) else choice
    if kind == "required" or kind in FORCING:
        message = f"Forcing a call is not offered yet: {param} can be auto or none."
        raise BadRequest(message, param=param, code="unsupported_field")
    raise _wrong(param, "must be auto or none")


def for_template(functions: Iterable[Function]) -> tuple[Function, ...]:
    """Tools as templates know them; null means unset there too."""
    return tuple(
        {"type": "function", "function": {key: value for key, value in one.items() if value is not None}}
        for one in functions
    )


def _wrong(place: str, what: str) -> BadRequest:
    return BadRequest(f"'{place}' {what}.", param=place, code="invalid_value")
