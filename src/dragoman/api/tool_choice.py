"""What a request says about calling its tools: whether, which, and how many at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dragoman.api.tools import Declared, wrong
from dragoman.errors import BadRequest
from dragoman.turns.spec import Calling

KINDS = ("function", "custom")


def calling(choice: Any, param: str, declared: Declared) -> Calling | None:
    """What the choice asks for, or a tool that is strict; None: the model does as it pleases.

    `"required"` gives `Calling(required=True)`, `{"type": "function", "function": {"name": "f"}}` gives
    `Calling(required=True, named=True, names=("f",))`.
    """
    if choice == "none":
        return None
    strict = _strict(declared)
    if choice in (None, "auto"):
        return None if strict is None else Calling(param=strict)
    asked = _asked(choice, param)
    _check_declared(asked.names, param, declared)
    return replace(asked, param=param)


def ease_calling(found: Calling | None, declared: Declared) -> Calling | None:
    """What holds once a call has been made: one that was asked for is not asked for again."""
    if found is None or not found.required:
        return found
    allowed = None if found.named or found.names is None else replace(found, required=False)
    return allowed or calling(None, found.param, declared)


def _strict(declared: Declared) -> str | None:
    """The place of the first tool whose calls must be in its schema."""
    places = (f"{place}.strict" for place, function in declared.placed() if function.get("strict"))
    return next(places, None)


def _asked(choice: Any, param: str) -> Calling:
    if choice == "required":
        return Calling(required=True)
    if not isinstance(choice, Mapping):
        raise _unknown(param)
    if param == "function_call":
        return Calling(required=True, named=True, names=(_name(choice, param),))
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), f"{param}.allowed_tools")
    if kind in KINDS:
        return Calling(required=True, named=True, names=(_tool_name(choice, param),))
    raise _unknown(param)


def _allowed(asked: Any, param: str) -> Calling:
    if not isinstance(asked, Mapping):
        raise wrong(param, "must be an object")
    mode, tools = asked.get("mode", "auto"), asked.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{param}.mode", "must be auto or required")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise wrong(f"{param}.tools", "must be a list of at least one tool")
    names = [_tool_name(tool, f"{param}.tools[{number}]") for number, tool in enumerate(tools)]
    return Calling(required=mode == "required", names=tuple(dict.fromkeys(names)))


def _tool_name(tool: Any, param: str) -> str:
    """`{"type": "function", "function": {"name": "f"}}`, or the flat form of the Responses API."""
    if not isinstance(tool, Mapping):
        raise wrong(param, "must be an object")
    kind = tool.get("type", "function")
    if kind not in KINDS:
        raise wrong(f"{param}.type", "must be function or custom")
    inner = tool.get(kind)
    if inner is None:
        return _name(tool, f"{param}.{kind}")
    if not isinstance(inner, Mapping):
        raise wrong(f"{param}.{kind}", "must be an object")
    return _name(inner, f"{param}.{kind}")


def _name(given: Mapping[str, Any], param: str) -> str:
    name = given.get("name")
    if not isinstance(name, str):
        raise wrong(f"{param}.name", "must be the name of a tool")
    return name


def _check_declared(names: tuple[str, ...] | None, param: str, declared: Declared) -> None:
    if not declared.functions:
        raise wrong(param, "asks for a call, but there are no tools")
    known = dict.fromkeys(function["name"] for function in declared.functions)
    missing = [name for name in names or () if name not in known]
    if missing:
        listed = ", ".join(list(known)[:16]) + (" ..." if len(known) > 16 else "")
        message = f"'{param}' names {missing[0][:64]!r}, which is not among the {declared.field}: {listed}."
        raise BadRequest(message, param=param, code="invalid_value")


def _unknown(param: str) -> BadRequest:
    if param == "function_call":
        return wrong(param, 'must be auto, none or {"name": ...}')
    return wrong(param, "must be auto, none, required, a tool, or allowed_tools")
