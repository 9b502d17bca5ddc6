"""The tools of a Responses request, and what the model is offered of them.

A model knows each function by one name. A tool of a namespace is therefore offered as `namespace__name`, a
custom tool as a function, and a tool of an MCP server after the server has listed it. A `ToolRef` records
what each name stands for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.responses.items import ItemDict
from dragoman.api.tools import (
    ECHOED,
    CustomFormat,
    CustomTool,
    DeclaredTools,
    Function,
    Grammar,
    as_function,
    bad_param,
    check_tools,
    free_name,
    join_name,
)
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpTool
from dragoman.mcp.servers import AllowedTools, RequireApproval, pin_of
from dragoman.turns.tool_loop import McpServerRequest

Label: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
# fmt: off
HOSTED = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    "file_search", "code_interpreter", "image_generation", "computer", "computer_use_preview",
    "local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling",
)
# fmt: on
"""Tools that only hosted services have. Clients declare them to every server, so requests must work without
them."""


# MCP servers that a request names: their address and allowed tools.


class McpDeclaration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server in a request. A label without a URL names a server from the operator's settings."""

    echoed: ClassVar[frozenset[str]] = ECHOED

    type: Literal["mcp"]
    server_label: Label
    server_url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None
    server_description: str | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    # Without effect: every tool is loaded at once, and the model is the only caller.
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    @property
    def wish(self) -> McpServerRequest:
        return McpServerRequest(
            label=self.server_label,
            url=self.server_url,
            headers=self.headers,
            authorization=self.authorization,
            allowed_tools=self.allowed_tools,
            require_approval=self.require_approval,
        )


_READER = RequestDecoder.for_type(McpDeclaration)


def read_mcp(tool: dict[str, Any], param_path: str, ignored: IgnoredFields) -> McpDeclaration:
    declared: McpDeclaration = _READER.convert(tool, param_path, ignored)
    for name in ("connector_id", "tunnel_id"):
        if getattr(declared, name) is not None:
            message = f"'{param_path}.{name}' belongs to a hosted service; send server_url instead."
            raise BadRequest(message, param=f"{param_path}.{name}", code="unsupported_field")
    url = declared.server_url
    if url is not None and not url.startswith(("http://", "https://")):
        raise bad_param(f"{param_path}.server_url", "must begin with http:// or https://")
    return declared


def without_secrets(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration for storing and returning: headers keep only their names."""
    shown = {key: value for key, value in tool.items() if key != "authorization"}
    if isinstance(shown.get("headers"), dict):
        shown["headers"] = dict.fromkeys(shown["headers"], "<redacted>")
    return shown


# All tools of a request.


class FunctionTool(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    # Without effect: every tool is loaded at once, and the model is the only caller.
    output_schema: Any = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    async_: bool | None = field(name="async", default=None)


class PlainFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class GrammarFormat(Grammar, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """A grammar, which Chat Completions has one level deeper."""


class FlatCustomTool(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: PlainFormat | GrammarFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    async_: bool | None = field(name="async", default=None)


class NamespaceTool(Struct, forbid_unknown_fields=True):
    type: Literal["namespace"]
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class ToolRef(Struct, frozen=True):
    """The tool behind a visible name."""

    kind: Literal["function", "custom", "mcp"]
    name: str
    namespace: str | None = None
    server_label: str | None = None
    pin: str = ""
    """Digest of the tool's description by its MCP server."""

    @property
    def space(self) -> str | None:
        return self.namespace or self.server_label


class ModelTools(DeclaredTools, frozen=True):
    """The tools offered to the model; functions have the names that the model sees."""

    refs: dict[str, ToolRef] = field(default_factory=dict)
    mcp: tuple[McpDeclaration, ...] = ()
    hidden: tuple[str, ...] = ()
    """Types of declared tools that the server cannot run."""

    def with_mcp(self, label: str, tools: Sequence[McpTool]) -> "ModelTools":
        """Add the tools that an MCP server listed; a tool whose name is taken becomes `label__name`."""
        functions, paths, refs = list(self.functions), list(self.params), dict(self.refs)
        for tool in tools:
            name = free_name(tool.name, label, refs)
            refs[name] = ToolRef("mcp", tool.name, server_label=label, pin=pin_of(tool))
            functions.append({"name": name, "description": tool.description, "parameters": tool.input_schema})
            paths.append(f"tools.{label}.{tool.name}")
        return replace(self, functions=functions, params=paths, refs=refs)

    def without_mcp(self) -> "ModelTools":
        """Remove the tools of all MCP servers, because no further call of them is allowed."""
        kept = [
            (function, param_path)
            for function, param_path in zip(self.functions, self.params, strict=True)
            if self.refs[function["name"]].kind != "mcp"
        ]
        return replace(
            self,
            functions=[function for function, _ in kept],
            params=[pointer for _, pointer in kept],
        )

    def visible(self) -> Callable[[str | None, str], str]:
        """Return a function from a namespace or MCP server label, and a name, to the name that the model
        sees.

        Histories have calls of tools that are no longer declared: these get a name of the same form.
        """
        shown = {(ref.space, ref.name): name for name, ref in self.refs.items()}
        return lambda space, name: shown.get((space, name)) or (join_name(space, name) if space else name)


_FUNCTION, _CUSTOM, _NAMESPACE = (
    RequestDecoder.for_type(FunctionTool),
    RequestDecoder.for_type(FlatCustomTool),
    RequestDecoder.for_type(NamespaceTool),
)


def offer_tools(
    tools: Sequence[dict[str, Any]] | None,
    limits: Limits,
    items: Sequence[ItemDict] = (),
    ignored: IgnoredFields | None = None,
) -> ModelTools:
    """Return the tools offered before MCP servers list theirs; raise at the first invalid tool.

    Tools loaded by items of the context are included. Tool fields without effect are added to `ignored`.
    """
    ignored = ignored or IgnoredFields()
    placed = [(f"tools[{number}]", tool) for number, tool in enumerate(tools or ())]
    placed += [("input", tool) for tool in _find_loaded(items, tools or ())]
    check_count(sum(_inside(tool) for _, tool in placed), limits.tools, "tools", "tools")
    functions: list[_DeclaredFunction] = []
    mcp: list[McpDeclaration] = []
    hidden: list[str] = []
    for param_path, tool in placed:
        kind = tool.get("type")
        if kind in HOSTED:
            hidden.append(kind)
        elif kind == "mcp":
            mcp.append(read_mcp(tool, param_path, ignored))
            _check_label([each.server_label for each in mcp], param_path)
        else:
            functions.extend(_functions(tool, param_path, ignored))
    offer = ModelTools(
        field="tools",
        functions=[each.function for each in functions],
        params=[each.param for each in functions],
        custom=frozenset(each.function["name"] for each in functions if each.ref.kind == "custom"),
        refs={each.function["name"]: each.ref for each in functions},
        mcp=tuple(mcp),
        hidden=tuple(dict.fromkeys(hidden)),
    )
    check_tools(offer, limits)
    return offer


def _inside(tool: dict[str, Any]) -> int:
    """Count the tools of an entry; a namespace has several."""
    inner = tool.get("tools") if tool.get("type") == "namespace" else None
    return max(len(inner), 1) if isinstance(inner, list) else 1


def _find_loaded(items: Sequence[ItemDict], declared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools loaded by items, each once in its last form: a search may find a tool again."""
    loaded = {
        _identity(tool): tool
        for item in items
        if item["type"] in ("additional_tools", "tool_search_output")
        for tool in item["tools"]
    }
    for tool in declared:
        loaded.pop(_identity(tool), None)
    return list(loaded.values())


def _identity(tool: dict[str, Any]) -> tuple[str, ...]:
    names = (tool.get(key) for key in ("type", "name", "server_label"))
    return tuple(name if isinstance(name, str) else "" for name in names)


class _DeclaredFunction(Struct, frozen=True):
    param: str
    function: Function
    ref: ToolRef


def _functions(tool: dict[str, Any], param_path: str, ignored: IgnoredFields) -> Iterator[_DeclaredFunction]:
    if tool.get("type") != "namespace":
        yield _place_tool(tool, param_path, None, ignored)
        return
    space: NamespaceTool = _NAMESPACE.convert(tool, param_path, ignored)
    if not space.name:
        raise bad_param(f"{param_path}.name", "must not be empty")
    for number, inner in enumerate(space.tools):
        yield _place_tool(inner, f"{param_path}.tools[{number}]", space, ignored)


def _place_tool(
    tool: dict[str, Any], param_path: str, space: NamespaceTool | None, ignored: IgnoredFields
) -> _DeclaredFunction:
    kind = tool.get("type")
    if kind == "function":
        function = _plain(_FUNCTION.convert(tool, param_path, ignored))
    elif kind == "custom":
        function = _custom(_CUSTOM.convert(tool, param_path, ignored), param_path)
    else:
        allowed = "function or custom" if space else "function, custom, namespace, mcp or a hosted tool's"
        shown = repr(kind[:64]) if isinstance(kind, str) else "not a string"
        raise bad_param(f"{param_path}.type", f"is {shown}; it must be {allowed}")
    name = function["name"]
    if space is None:
        return _DeclaredFunction(param_path, function, ToolRef(kind, name))
    value = "\n".join(text for text in (space.description, function["description"]) if text)
    function |= {"name": join_name(space.name, name), "description": value or None}
    return _DeclaredFunction(param_path, function, ToolRef(kind, name, namespace=space.name))


def _plain(tool: FunctionTool) -> Function:
    names = ("name", "description", "parameters", "strict")
    return {name: getattr(tool, name) for name in names}


def _custom(tool: FlatCustomTool, param_path: str) -> Function:
    wanted = CustomFormat("grammar", tool.format) if isinstance(tool.format, GrammarFormat) else None
    return as_function(CustomTool(tool.name, tool.description, wanted), param_path, grammar="format")


def _check_label(labels: Sequence[str], param_path: str) -> None:
    if labels[-1] in labels[:-1]:
        raise bad_param(f"{param_path}.server_label", f"{labels[-1]!r} is used twice; labels must differ")


def echo(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools as sent, with the fields that SDKs require, and without secrets."""
    return [_echo_tool(tool) for tool in tools or ()]


def _echo_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "function":
        return {"description": None, "parameters": None, "strict": None, **tool}
    return without_secrets(tool) if tool.get("type") == "mcp" else tool
