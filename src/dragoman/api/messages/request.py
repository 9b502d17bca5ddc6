"""Messages: the request, its tools, and the turn built from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from dragoman.api.compat_fields import MESSAGES
from dragoman.api.content_parts import ConversationMedia
from dragoman.api.messages.blocks import BlockMessageBuilder, Content, MessageParam, Unseal
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import IDLE, JsonSchema, read_wanted
from dragoman.api.shared_fields import (
    Effort,
    Natural,
    ShortText,
    TemplateFields,
    check_reasoning,
    check_shared,
    check_template,
    sampling,
    template_kwargs,
    turn_spec,
)
from dragoman.api.shared_fields import thinking as budget_beside
from dragoman.api.tools import (
    DeclaredTools,
    Function,
    bad_param,
    check_tools,
    for_template,
    name_tools,
    read_tool_policy,
    relax_tool_policy,
)
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpTool
from dragoman.turns.spec import OutputConstraint, ParseOptions, ReasoningTokenLimit, ToolCallPolicy, TurnSpec
from dragoman.turns.tool_loop import McpServerRequest
from dragoman.types import Conversation, Message

# Tools: the client's own, and those of MCP servers.


class ToolParam(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = frozenset({"id"})
    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None
    # Without effect: arguments are always streamed as generated, and the prefix cache is automatic.
    eager_input_streaming: bool | None = None
    cache_control: Any = None


class ToolConfig(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    defer_loading: bool | None = None


class ToolsetParam(Struct, forbid_unknown_fields=True):
    """Selects the tools of an MCP server."""

    mcp_server_name: ShortText
    type: Literal["mcp_toolset"] = "mcp_toolset"
    default_config: ToolConfig | None = None
    configs: dict[str, ToolConfig] | None = None
    tools: None = None
    cache_control: Any = None


class ServerToolConfig(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    allowed_tools: list[str] | None = None


class ServerParam(Struct, forbid_unknown_fields=True):
    name: ShortText
    url: Annotated[str, Meta(max_length=4096)]
    type: Literal["url"] = "url"
    authorization_token: str | None = None
    tool_configuration: ServerToolConfig | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


TOOLS: Mapping[str, RequestDecoder] = {
    "custom": RequestDecoder.for_type(ToolParam),
    "mcp_toolset": RequestDecoder.for_type(ToolsetParam),
}


# Fields that determine the answer.


class ThinkingConfig(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Natural | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema_: JsonSchema = field(name="schema")


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class EditAmount(Struct, forbid_unknown_fields=True):
    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Natural = 0


class ContextEdit(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"]
    trigger: EditAmount | None = None
    keep: EditAmount | Literal["all"] | None = None
    clear_at_least: EditAmount | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagementConfig(Struct, forbid_unknown_fields=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=16)] = []


class CompactionConfig(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    type: Literal["summarize"]
    instructions: str | None = None


HARMLESS = (
    "metadata cache_control diagnostics inference_geo speed fallbacks fallback_credit_token user_profile_id"
    " workspace_id betas billing_policy"
)
"""Fields of this API without effect: the server has its own models, and caches prefixes automatically."""


class MessagesRequest(TemplateFields, kw_only=True, forbid_unknown_fields=True):
    # Fields that determine the prompt.
    messages: list[MessageParam] | None = None
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    mcp_servers: Annotated[list[ServerParam], Meta(max_length=64)] | None = None
    context_management: ContextManagementConfig | None = None
    compaction: CompactionConfig | None = None
    thread: Any = None
    # Fields that determine the answer.
    stop_sequences: list[str] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    # Fields without effect.
    cache_control: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    betas: Any = None
    billing_policy: Any = None

    def formats(self) -> Iterator[OutputConstraint]:
        beside = self.output_config.format if self.output_config else None
        for wish, param in (
            (beside, "output_config.format.schema"),
            (self.output_format, "output_format.schema"),
        ):
            if wish is not None:
                yield OutputConstraint(syntax="json_schema", value=wish.schema_, param=param)

    @property
    def stops(self) -> tuple[str, ...]:
        return (*(self.stop_sequences or ()), *super().stops)

    @property
    def effort(self) -> Effort | None:
        """The latest effort set: a message may change it from there on."""
        items = [each.output_config.effort for each in self.messages or () if each.output_config]
        asked = self.output_config.effort if self.output_config else None
        return next((effort for effort in reversed(items) if effort), None) or asked or super().effort

    @property
    def thinks(self) -> bool | None:
        return super().thinks if self.thinking is None else self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def wants_none(self) -> bool:
        """Whether to compute only the prompt, and generate nothing."""
        return self.max_tokens == 0

    @property
    def edits(self) -> Sequence[ContextEdit]:
        return self.context_management.edits if self.context_management else ()


READER = RequestDecoder.for_type(MessagesRequest, MESSAGES, (*IDLE, *HARMLESS.split()))
NOT_HERE = {
    "echo": "a message contains only the answer",
    "prompt_logprobs": "a message has no log probabilities",
    "return_token_ids": "a message has no token ids",
    "return_tokens_as_token_ids": "a message has no log probabilities",
    "add_special_tokens": "the chat template writes the special tokens of a conversation",
    "response_format": "use output_config.format",
}


class ParsedMessagesRequest(Struct, frozen=True, kw_only=True):
    """A validated request, with the values derived from it."""

    request: MessagesRequest
    messages: tuple[Message, ...]
    declared: DeclaredTools
    """Tools that the client runs and that are offered now."""
    servers: Sequence[McpServerRequest] = ()
    gallery: ConversationMedia
    """The media of the messages."""


def read(
    body: bytes, limits: Limits, unseal: Unseal, ignored: IgnoredFields | None = None, *, counts: bool = False
) -> ParsedMessagesRequest:
    """Read and validate a request; `counts` requires no fields about the answer, for counting tokens."""
    ignored = ignored or IgnoredFields("error")
    request: MessagesRequest = READER.read(body, ignored)
    for name in () if counts else ("model", "max_tokens"):
        if getattr(request, name) is None:
            raise BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    if not request.messages:
        raise BadRequest("'messages' is required.", param="messages", code="missing_field")
    check_count(len(request.messages), limits.messages, "messages", "messages")
    _check_here(request)
    check_shared(request)
    check_reasoning(request)
    check_template(request, limits)
    telling = BlockMessageBuilder(unseal, ignored, limits)
    messages = telling.build(request.system, request.messages)
    gallery = telling.reader.gallery
    gallery.check(limits, "messages")
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        message = "The last message has tool calls; add a user message with their results."
        raise BadRequest(message, param=f"messages[{len(request.messages) - 1}]", code="invalid_value")
    declared, toolsets = _declared(request, messages, telling.referenced, ignored)
    check_tools(declared, limits)
    servers = [*_wishes(request, toolsets)]
    asked = ParsedMessagesRequest(
        request=request, messages=messages, declared=declared, servers=servers, gallery=gallery
    )
    if not asked.servers:
        read_calling(asked)
    return asked


def _check_here(request: MessagesRequest) -> None:
    if request.thread is not None:
        message = "'thread' is not supported: the server stores no conversations; send all messages."
        # Anthropic's SDKs recognize this code and send all messages.
        raise BadRequest(message, param="thread", code="thread_unsupported_request")
    for name, reason in NOT_HERE.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise BadRequest(f"'{name}' is not supported: {reason}.", param=name, code="unsupported_field")
    if request.n not in (None, 1):
        raise BadRequest(
            "'n' is not supported: a message is one answer; leave it out.",
            param="n",
            code="unsupported_field",
        )
    if "" in (request.stop_sequences or ()):
        raise bad_param("stop_sequences", "must not contain an empty string")
    kinds = [each.type for each in request.edits]
    if len(kinds) > len(set(kinds)):
        # Each edit requires counting the tokens of the prompt.
        raise bad_param("context_management.edits", "must have each type of edit at most once")
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        param = "thinking.budget_tokens"
        raise BadRequest(f"'{param}' is required.", param=param, code="missing_field")


def _declared(
    request: MessagesRequest, messages: Sequence[Message], referenced: set[str], ignored: IgnoredFields
) -> tuple[DeclaredTools, dict[str, ToolsetParam]]:
    """Return the tools; a tool with `defer_loading` is declared only after the conversation has named it."""
    tools = request.tools or ()
    called = {call.name for message in messages for call in message.tool_calls}
    known = referenced | called | {request.tool_choice.name if request.tool_choice else ""}
    functions: list[Function] = []
    paths: list[str] = []
    toolsets: dict[str, ToolsetParam] = {}
    for number, fields in enumerate(tools):
        param = f"tools[{number}]"
        tool = _read_tool(fields, param, ignored)
        if isinstance(tool, ToolsetParam):
            toolsets[tool.mcp_server_name] = tool
        elif not tool.defer_loading or tool.name in known:
            functions.append(_function(tool))
            paths.append(param)
    if tools and not functions and not toolsets:
        raise bad_param("tools", "must have at least one tool without defer_loading")
    return DeclaredTools("tools", functions, paths, schema="input_schema"), toolsets


def _read_tool(fields: dict[str, Any], param: str, ignored: IgnoredFields) -> ToolParam | ToolsetParam:
    kind = fields.get("type") or "custom"
    if kind not in TOOLS:
        message = (
            f"'{param}' has the type {str(kind)[:64]!r}, which this server does not support; declare the tool"
            " with a name and an input_schema, and run it yourself."
        )
        raise BadRequest(message, param=f"{param}.type", code="unsupported_tool")
    tool: ToolParam | ToolsetParam = TOOLS[kind].convert(fields, param, ignored)
    if isinstance(tool, ToolParam) and tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise bad_param(
            f"{param}.allowed_callers",
            "must contain 'direct': the server runs no code that could call the tool",
        )
    return tool


def _function(tool: ToolParam) -> Function:
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(encode_json(example).decode() for example in tool.input_examples)
        description = f"{description or tool.name}\n\nExamples of the input:\n{examples}"
    return {
        "name": tool.name,
        "description": description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }


def _wishes(request: MessagesRequest, toolsets: dict[str, ToolsetParam]) -> Iterator[McpServerRequest]:
    """Yield the MCP servers to list tools from. Calls need no approval: this API cannot ask for it."""
    servers = request.mcp_servers or ()
    names = [server.name for server in servers]
    for number, server in enumerate(servers):
        param = f"mcp_servers[{number}]"
        if server.name in names[:number]:
            raise bad_param(f"{param}.name", "is used twice; names must differ")
        options = server.tool_configuration or ServerToolConfig()
        allowed = _allowed(toolsets.pop(server.name, None), options)
        if options.enabled is False or allowed == []:
            continue
        yield McpServerRequest(
            label=server.name,
            url=server.url,
            authorization=server.authorization_token,
            allowed_tools=allowed,
            require_approval="never",
        )
    for name in toolsets:
        # A server from the operator's settings.
        yield McpServerRequest(
            label=name, allowed_tools=_allowed(toolsets[name], ServerToolConfig()), require_approval="never"
        )


def _allowed(toolset: ToolsetParam | None, options: ServerToolConfig) -> list[str] | None:
    """Return the names of allowed tools; None allows all."""
    if toolset is None:
        return options.allowed_tools
    configs = toolset.configs or {}
    if toolset.default_config is not None and toolset.default_config.enabled is False:
        return [name for name, config in configs.items() if config.enabled]
    if any(config.enabled is False for config in configs.values()):
        param = "tools[].configs"
        message = f"'{param}' disables tools; set default_config.enabled to false and enable the others."
        raise BadRequest(message, param=param, code="unsupported_field")
    return options.allowed_tools


def with_tools(
    asked: ParsedMessagesRequest, listed: Mapping[str, Sequence[McpTool]]
) -> tuple[ParsedMessagesRequest, dict[str, tuple[str, str]]]:
    """Return the request with the servers' tools, and for each of these its server and name there."""
    more, fields = name_tools(asked.declared, listed)
    functions = [*asked.declared.functions, *more]
    paths = [*asked.declared.params, *["mcp_servers"] * len(more)]
    return replace(asked, declared=replace(asked.declared, functions=functions, params=paths)), fields


def without_servers(asked: ParsedMessagesRequest) -> TurnSpec:
    """Return the turn as far as it is determined before the MCP servers list tools, which `tool_choice` may
    name."""
    return spec(replace(asked, request=replace(asked.request, tool_choice=None)))


# The turn.


_CHOICES: Mapping[str, str] = {"auto": "auto", "none": "none", "any": "required"}


def read_calling(asked: ParsedMessagesRequest) -> ToolCallPolicy | None:
    choice = asked.request.tool_choice
    if choice is None or choice.type != "tool":
        if choice is not None and choice.name is not None:
            raise bad_param("tool_choice.name", "is only valid with type tool")
        return read_tool_policy(_CHOICES[choice.type] if choice else None, "tool_choice", asked.declared)
    return read_tool_policy({"type": "function", "name": choice.name}, "tool_choice", asked.declared)


def conversation(asked: ParsedMessagesRequest) -> Conversation:
    continues = asked.messages[-1].role == "assistant"
    return Conversation(
        messages=asked.messages,
        tools=for_template(asked.declared.functions),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=template_kwargs(asked.request, None),
        media=asked.gallery.media,
        media_params=asked.gallery.params,
    )


def spec(asked: ParsedMessagesRequest) -> TurnSpec:
    request, result = asked.request, conversation(asked)
    choice, calls = request.tool_choice, read_calling(asked)
    single = bool(choice and choice.disable_parallel_tool_use) or (calls is not None and calls.named)
    reading = ParseOptions(
        tools=result.tools,
        calls=bool(result.tools) and not (choice and choice.type == "none"),
        most_calls=1 if single else None,
        verbatim=read_wanted(request) is not None,
        params=tuple(f"{param}.input_schema" for param in asked.declared.params),
    )
    most = 1 if request.wants_none else request.max_tokens
    chosen = sampling(request, max_tokens=most, logprobs=None)
    return turn_spec(request, (result,), chosen, 1, reading, calls, _budget(request))


def _budget(request: MessagesRequest) -> ReasoningTokenLimit | None:
    """Return the limit of reasoning tokens; engines that cannot enforce it get it only through the prompt."""
    asked = request.thinking
    if asked is not None and asked.type == "enabled" and asked.budget_tokens is not None:
        return ReasoningTokenLimit(tokens=asked.budget_tokens, param="thinking.budget_tokens", soft=True)
    return budget_beside(request)


def after_calls(asked: ParsedMessagesRequest) -> TurnSpec:
    """Return the turn for requests after the first, in which a required call has already been made."""
    first, calls = spec(asked), read_calling(asked)
    if calls is None or not calls.required or first.parsing is None:
        return first
    single = asked.request.tool_choice and asked.request.tool_choice.disable_parallel_tool_use
    reading = replace(first.parsing, most_calls=1 if single else None)
    return replace(first, tool_policy=relax_tool_policy(calls, asked.declared), parsing=reading)
