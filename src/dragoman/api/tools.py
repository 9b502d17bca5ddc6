"""The tools of a request: their declarations, and the tool choice."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import Struct
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from dragoman.constrain.calls.tool_schemas import LARK
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpTool
from dragoman.mcp.servers import AllowedTools, RequireApproval
from dragoman.turns.choice_reader import INPUT
from dragoman.turns.spec import ToolCallPolicy

MAX_NAME = 256
ECHOED = frozenset({"cache_control", "id"})
"""Fields that clients send with tools to every server; none reaches the model."""
KINDS = ("function", "custom")
Function: TypeAlias = dict[str, Any]


# Custom tools take a text: for the model each is a function with one argument.


class Grammar(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class CustomTool(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


def as_function(tool: CustomTool, param: str, *, grammar: str = "format.grammar") -> dict[str, Any]:
    """Return the function that represents a custom tool. It is strict, so that its input can be parsed.

    `grammar` is the path of the tool's grammar, relative to `place`, for errors.
    """
    return {
        "name": tool.name,
        "description": _description(tool),
        "parameters": {
            "type": "object",
            "properties": {INPUT: _schema(tool.format, f"{param}.{grammar}")},
            "required": [INPUT],
            "additionalProperties": False,
        },
        "strict": True,
    }


def as_arguments(text: str) -> str:
    """Return the arguments that represent an earlier call of a custom tool in the prompt."""
    return encode_json({INPUT: text}).decode()


def _schema(wanted: CustomFormat | None, param: str) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {"type": "string"}
    if wanted.grammar is None:
        raise BadRequest(f"'{param}' is required.", param=param, code="missing_field")
    if wanted.grammar.syntax == "lark":
        return {"type": "string", LARK: wanted.grammar.definition}
    return {"type": "string", "pattern": f"^(?:{wanted.grammar.definition})$"}


def _description(tool: CustomTool) -> str | None:
    """Return the description with the grammar, which the model must know: not every template includes the
    schema."""
    grammar = tool.format.grammar if tool.format else None
    if grammar is None:
        return tool.description
    kind = "this Lark grammar" if grammar.syntax == "lark" else "this regular expression"
    text = f"The input must match {kind}:\n{grammar.definition}"
    return f"{tool.description}\n\n{text}" if tool.description else text


# All tools of a request.


class Tool(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED | {"defer_loading", "allowed_callers"}
    type: Literal["function", "custom", "mcp"] = "function"
    function: Function | None = None
    custom: CustomTool | None = None
    # Fields of an MCP server from the operator's settings, whose tools the server runs itself.
    server_label: str | None = None
    server_description: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None


class DeclaredTools(Struct, frozen=True):
    """The functions of a request, from `tools` or `functions`."""

    field: str
    functions: Sequence[Function]
    params: Sequence[str]
    """The field of each declaration: `tools[2].function`."""
    custom: frozenset[str] = frozenset()
    """Names of the functions that represent custom tools."""
    schema: str = "parameters"
    """Name of the field with each function's schema."""

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, functions: Sequence[Function] | None = None) -> "DeclaredTools":
        if not tools and not functions:
            return _NONE
        if functions and not tools:
            return cls("functions", functions, [f"functions[{number}]" for number in range(len(functions))])
        known = [(number, tool) for number, tool in enumerate(tools or ()) if tool.type != "mcp"]
        converted = [_function(tool, f"tools[{number}]") for number, tool in known]
        paths = [f"tools[{number}].{tool.type}" for number, tool in known]
        return cls("tools", converted, paths, frozenset(tool.custom.name for _, tool in known if tool.custom))

    def placed(self) -> Iterator[tuple[str, Function]]:
        return zip(self.params, self.functions, strict=True)


_NONE = DeclaredTools("tools", (), ())


def _function(tool: Tool, param: str) -> Function:
    item = tool.function if tool.type == "function" else tool.custom
    if item is None or (tool.function is not None and tool.custom is not None):
        raise bad_param(param, f"must have only a '{tool.type}' beside its type")
    return as_function(item, f"{param}.custom") if isinstance(item, CustomTool) else item


def check_tools(declared: DeclaredTools, limits: Limits) -> None:
    """Raise at the first invalid tool, with its field: `tools[3].function.name`."""
    check_count(len(declared.functions), limits.tools, declared.field, declared.field)
    _check_functions(declared.placed(), declared.schema)
    _check_bytes(declared, limits.tool_bytes)


def _check_bytes(declared: DeclaredTools, most: int) -> None:
    try:
        size = len(encode_json(declared.functions))
    except RecursionError:
        raise bad_param(declared.field, "is nested too deeply") from None
    check_count(size, most, declared.field, f"bytes of {declared.field}")


def _check_functions(placed: Iterable[tuple[str, Function]], schema: str) -> None:
    seen: set[str] = set()
    for param, function in placed:
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise bad_param(f"{param}.name", f"must be a string of 1 to {MAX_NAME} characters")
        if name in seen:
            raise bad_param(f"{param}.name", f"{name!r} is used twice; names must differ")
        seen.add(name)
        if not isinstance(function.get("description"), str | None):
            raise bad_param(f"{param}.description", "must be a string")
        _check_parameters(function.get("parameters"), f"{param}.{schema}")
        if function.get("strict") not in (None, False, True):
            raise bad_param(f"{param}.strict", "must be true or false")


def _check_parameters(schema: Any, param: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise bad_param(param, "must be a JSON Schema object")
    if schema.get("type", "object") != "object":
        raise bad_param(f"{param}.type", "must be 'object': arguments are passed by name")
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_param(f"{param}.properties", "must be an object")


def for_template(functions: Iterable[Function]) -> tuple[Function, ...]:
    """Return the tools for the template; null means unset there too."""
    return tuple(
        {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
        for function in functions
    )


def join_name(space: str, name: str) -> str:
    """Return a joined name: `join_name("files", "read")` and `join_name("files__", "read")` are
    `files__read`."""
    return f"{space.rstrip('_')}__{name}"


def free_name(name: str, label: str, taken: Container[str]) -> str:
    """Return the name of an MCP tool for the model: its own, or a longer one if that is taken."""
    if name not in taken:
        return name
    longer = join_name(label, name)
    numbered = (f"{longer}_{number}" for number in count(2))
    return longer if longer not in taken else next(each for each in numbered if each not in taken)


def name_tools(
    declared: DeclaredTools, listed: Mapping[str, Sequence[McpTool]]
) -> tuple[list[Function], dict[str, tuple[str, str]]]:
    """Return the tools of MCP servers as functions, and for each name its server and tool."""
    taken = {function["name"] for function in declared.functions}
    functions: list[Function] = []
    fields: dict[str, tuple[str, str]] = {}
    for label, offered in listed.items():
        for tool in offered:
            name = free_name(tool.name, label, taken)
            taken.add(name)
            fields[name] = (label, tool.name)
            functions.append({"name": name, "description": tool.description, "parameters": tool.input_schema})
    return functions, fields


def bad_param(param: str, what: str) -> BadRequest:
    return BadRequest(f"'{param}' {what}.", param=param, code="invalid_value")


# Tool choice.


def read_tool_policy(choice: Any, param: str, declared: DeclaredTools) -> ToolCallPolicy | None:
    """Return the tool choice, or one for strict tools; None leaves the model free.

    `"required"` is `ToolCallPolicy(required=True)`, `{"type": "function", "function": {"name": "f"}}` is
    `ToolCallPolicy(required=True, named=True, names=("f",))`.
    """
    if choice == "none":
        return None
    strict = _strict(declared)
    if choice in (None, "auto"):
        return None if strict is None else ToolCallPolicy(param=strict)
    asked = _read_asked(choice, param)
    _check_declared(asked.names, param, declared)
    return replace(asked, param=param)


def relax_tool_policy(policy: ToolCallPolicy | None, declared: DeclaredTools) -> ToolCallPolicy | None:
    """Return the tool choice after a call was made: a required call is not required again."""
    if policy is None or not policy.required:
        return policy
    allowed = None if policy.named or policy.names is None else replace(policy, required=False)
    return allowed or read_tool_policy(None, policy.param, declared)


def _strict(declared: DeclaredTools) -> str | None:
    """Return the field of the first strict tool, or None."""
    paths = (f"{param}.strict" for param, function in declared.placed() if function.get("strict"))
    return next(paths, None)


def _read_asked(choice: Any, param: str) -> ToolCallPolicy:
    if choice == "required":
        return ToolCallPolicy(required=True)
    if not isinstance(choice, Mapping):
        raise _unknown(param)
    if param == "function_call":
        return ToolCallPolicy(required=True, named=True, names=(_name(choice, param),))
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools", choice), f"{param}.allowed_tools")
    if kind in KINDS:
        return ToolCallPolicy(required=True, named=True, names=(_tool_name(choice, param),))
    raise _unknown(param)


def _read_allowed(asked: Any, param: str) -> ToolCallPolicy:
    if not isinstance(asked, Mapping):
        raise bad_param(param, "must be an object")
    mode, tools = asked.get("mode", "auto"), asked.get("tools")
    if mode not in ("auto", "required"):
        raise bad_param(f"{param}.mode", "must be auto or required")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise bad_param(f"{param}.tools", "must be a list of at least one tool")
    names = [_tool_name(tool, f"{param}.tools[{number}]") for number, tool in enumerate(tools)]
    return ToolCallPolicy(required=mode == "required", names=tuple(dict.fromkeys(names)))


def _tool_name(tool: Any, param: str) -> str:
    """Read `{"type": "function", "function": {"name": "f"}}`, or the flat form of the Responses API."""
    if not isinstance(tool, Mapping):
        raise bad_param(param, "must be an object")
    kind = tool.get("type", "function")
    if kind not in KINDS:
        raise bad_param(f"{param}.type", "must be function or custom")
    inner = tool.get(kind)
    if inner is None:
        return _name(tool, f"{param}.{kind}")
    if not isinstance(inner, Mapping):
        raise bad_param(f"{param}.{kind}", "must be an object")
    return _name(inner, f"{param}.{kind}")


def _name(fields: Mapping[str, Any], param: str) -> str:
    name = fields.get("name")
    if not isinstance(name, str):
        raise bad_param(f"{param}.name", "must be the name of a tool")
    return name


def _check_declared(names: tuple[str, ...] | None, param: str, declared: DeclaredTools) -> None:
    if not declared.functions:
        raise bad_param(param, "requires a call, but the request has no tools; send tools")
    available = dict.fromkeys(function["name"] for function in declared.functions)
    missing = [name for name in names or () if name not in available]
    if missing:
        listed = ", ".join(list(available)[:16]) + (" ..." if len(available) > 16 else "")
        message = f"'{param}' names {missing[0][:64]!r}, which is not among the {declared.field}: {listed}."
        raise BadRequest(message, param=param, code="invalid_value")


def _unknown(param: str) -> BadRequest:
    if param == "function_call":
        return bad_param(param, 'must be auto, none or {"name": ...}')
    return bad_param(param, "must be auto, none, required, a tool, or allowed_tools")
