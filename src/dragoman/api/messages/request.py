"""Messages: the request, its tools, and the turn built from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from dragoman.api.choosing_fields import IDLE, JsonSchema, read_wanted
from dragoman.api.foreign_fields import MESSAGES
from dragoman.api.messages.blocks import Content, MessageParam, Telling, Unseal
from dragoman.api.parts import Gallery
from dragoman.api.read import Ignored, Reader
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
    Declared,
    Function,
    calling,
    check_tools,
    ease_calling,
    for_template,
    name_tools,
    wrong,
)
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpTool
from dragoman.turns.spec import Calling, Reading, Thinking, TurnSpec, Wanted
from dragoman.turns.tool_loop import ServerWish
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


class ToolUse(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    defer_loading: bool | None = None


class ToolsetParam(Struct, forbid_unknown_fields=True):
    """Selects the tools of an MCP server."""

    mcp_server_name: ShortText
    type: Literal["mcp_toolset"] = "mcp_toolset"
    default_config: ToolUse | None = None
    configs: dict[str, ToolUse] | None = None
    tools: None = None
    cache_control: Any = None


class ServerTools(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    allowed_tools: list[str] | None = None


class ServerParam(Struct, forbid_unknown_fields=True):
    name: ShortText
    url: Annotated[str, Meta(max_length=4096)]
    type: Literal["url"] = "url"
    authorization_token: str | None = None
    tool_configuration: ServerTools | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


TOOLS: Mapping[str, Reader] = {"custom": Reader.of(ToolParam), "mcp_toolset": Reader.of(ToolsetParam)}


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


class Amount(Struct, forbid_unknown_fields=True):
    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Natural = 0


class ContextEdit(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"]
    trigger: Amount | None = None
    keep: Amount | Literal["all"] | None = None
    clear_at_least: Amount | None = None
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

    def formats(self) -> Iterator[Wanted]:
        beside = self.output_config.format if self.output_config else None
        for wish, param in (
            (beside, "output_config.format.schema"),
            (self.output_format, "output_format.schema"),
        ):
            if wish is not None:
                yield Wanted(syntax="json_schema", value=wish.schema_, param=param)

    @property
    def stops(self) -> tuple[str, ...]:
        return (*(self.stop_sequences or ()), *super().stops)

    @property
    def effort(self) -> Effort | None:
        """The latest effort set: a message may change it from there on."""
        said = [each.output_config.effort for each in self.messages or () if each.output_config]
        asked = self.output_config.effort if self.output_config else None
        return next((effort for effort in reversed(said) if effort), None) or asked or super().effort

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


READER = Reader.of(MessagesRequest, MESSAGES, (*IDLE, *HARMLESS.split()))
NOT_HERE = {
    "echo": "a message contains only the answer",
    "prompt_logprobs": "a message has no log probabilities",
    "return_token_ids": "a message has no token ids",
    "return_tokens_as_token_ids": "a message has no log probabilities",
    "add_special_tokens": "the chat template writes the special tokens of a conversation",
    "response_format": "use output_config.format",
}


class AskedMessage(Struct, frozen=True, kw_only=True):
    """A validated request, with the values derived from it."""

    request: MessagesRequest
    messages: tuple[Message, ...]
    declared: Declared
    """Tools that the client runs and that are offered now."""
    servers: Sequence[ServerWish] = ()
    gallery: Gallery
    """The media of the messages."""


def read(
    body: bytes, limits: Limits, unseal: Unseal, ignored: Ignored | None = None, *, counts: bool = False
) -> AskedMessage:
    """Read and validate a request; `counts` requires no fields about the answer, for counting tokens."""
    ignored = ignored or Ignored("error")
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
    telling = Telling(unseal, ignored, limits)
    messages = telling.tell(request.system, request.messages)
    gallery = telling.reader.gallery
    gallery.check(limits, "messages")
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        message = "The last message has tool calls; add a user message with their results."
        raise BadRequest(message, param=f"messages[{len(request.messages) - 1}]", code="invalid_value")
    declared, toolsets = _declared(request, messages, telling.referenced, ignored)
    check_tools(declared, limits)
    servers = [*_wishes(request, toolsets)]
    asked = AskedMessage(
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
        raise wrong("stop_sequences", "must not contain an empty string")
    kinds = [each.type for each in request.edits]
    if len(kinds) > len(set(kinds)):
        # Each edit requires counting the tokens of the prompt.
        raise wrong("context_management.edits", "must have each type of edit at most once")
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        place = "thinking.budget_tokens"
        raise BadRequest(f"'{place}' is required.", param=place, code="missing_field")


def _declared(
    request: MessagesRequest, messages: Sequence[Message], referenced: set[str], ignored: Ignored
) -> tuple[Declared, dict[str, ToolsetParam]]:
    """Return the tools; a tool with `defer_loading` is declared only after the conversation has named it."""
    tools = request.tools or ()
    called = {call.name for message in messages for call in message.tool_calls}
    known = referenced | called | {request.tool_choice.name if request.tool_choice else ""}
    functions: list[Function] = []
    places: list[str] = []
    toolsets: dict[str, ToolsetParam] = {}
    for number, given in enumerate(tools):
        place = f"tools[{number}]"
        tool = _read_tool(given, place, ignored)
        if isinstance(tool, ToolsetParam):
            toolsets[tool.mcp_server_name] = tool
        elif not tool.defer_loading or tool.name in known:
            functions.append(_function(tool))
            places.append(place)
    if tools and not functions and not toolsets:
        raise wrong("tools", "must have at least one tool without defer_loading")
    return Declared("tools", functions, places, schema="input_schema"), toolsets


def _read_tool(given: dict[str, Any], place: str, ignored: Ignored) -> ToolParam | ToolsetParam:
    kind = given.get("type") or "custom"
    if kind not in TOOLS:
        message = (
            f"'{place}' has the type {str(kind)[:64]!r}, which this server does not support; declare the tool"
            " with a name and an input_schema, and run it yourself."
        )
        raise BadRequest(message, param=f"{place}.type", code="unsupported_tool")
    tool: ToolParam | ToolsetParam = TOOLS[kind].convert(given, place, ignored)
    if isinstance(tool, ToolParam) and tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise wrong(
            f"{place}.allowed_callers",
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


def _wishes(request: MessagesRequest, toolsets: dict[str, ToolsetParam]) -> Iterator[ServerWish]:
    """Yield the MCP servers to list tools from. Calls need no approval: this API cannot ask for it."""
    servers = request.mcp_servers or ()
    names = [server.name for server in servers]
    for number, server in enumerate(servers):
        place = f"mcp_servers[{number}]"
        if server.name in names[:number]:
            raise wrong(f"{place}.name", "is used twice; names must differ")
        options = server.tool_configuration or ServerTools()
        allowed = _allowed(toolsets.pop(server.name, None), options)
        if options.enabled is False or allowed == []:
            continue
        yield ServerWish(
            label=server.name,
            url=server.url,
            authorization=server.authorization_token,
            allowed_tools=allowed,
            require_approval="never",
        )
    for name in toolsets:
        # A server from the operator's settings.
        yield ServerWish(
            label=name, allowed_tools=_allowed(toolsets[name], ServerTools()), require_approval="never"
        )


def _allowed(toolset: ToolsetParam | None, options: ServerTools) -> list[str] | None:
    """Return the names of allowed tools; None allows all."""
    if toolset is None:
        return options.allowed_tools
    configs = toolset.configs or {}
    if toolset.default_config is not None and toolset.default_config.enabled is False:
        return [name for name, config in configs.items() if config.enabled]
    if any(config.enabled is False for config in configs.values()):
        place = "tools[].configs"
        message = f"'{place}' disables tools; set default_config.enabled to false and enable the others."
        raise BadRequest(message, param=place, code="unsupported_field")
    return options.allowed_tools


def with_tools(
    asked: AskedMessage, listed: Mapping[str, Sequence[McpTool]]
) -> tuple[AskedMessage, dict[str, tuple[str, str]]]:
    """Return the request with the servers' tools, and for each of these its server and name there."""
    more, found = name_tools(asked.declared, listed)
    functions = [*asked.declared.functions, *more]
    places = [*asked.declared.places, *["mcp_servers"] * len(more)]
    return replace(asked, declared=replace(asked.declared, functions=functions, places=places)), found


def without_servers(asked: AskedMessage) -> TurnSpec:
    """Return the turn as far as it is determined before the MCP servers list tools, which `tool_choice` may
    name."""
    return spec(replace(asked, request=replace(asked.request, tool_choice=None)))


# The turn.


_CHOICES: Mapping[str, str] = {"auto": "auto", "none": "none", "any": "required"}


def read_calling(asked: AskedMessage) -> Calling | None:
    choice = asked.request.tool_choice
    if choice is None or choice.type != "tool":
        if choice is not None and choice.name is not None:
            raise wrong("tool_choice.name", "is only valid with type tool")
        return calling(_CHOICES[choice.type] if choice else None, "tool_choice", asked.declared)
    return calling({"type": "function", "name": choice.name}, "tool_choice", asked.declared)


def conversation(asked: AskedMessage) -> Conversation:
    continues = asked.messages[-1].role == "assistant"
    return Conversation(
        messages=asked.messages,
        tools=for_template(asked.declared.functions),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=template_kwargs(asked.request, None),
        media=asked.gallery.media,
        places=asked.gallery.places,
    )


def spec(asked: AskedMessage) -> TurnSpec:
    request, told = asked.request, conversation(asked)
    choice, calls = request.tool_choice, read_calling(asked)
    single = bool(choice and choice.disable_parallel_tool_use) or (calls is not None and calls.named)
    reading = Reading(
        tools=told.tools,
        calls=bool(told.tools) and not (choice and choice.type == "none"),
        most_calls=1 if single else None,
        verbatim=read_wanted(request) is not None,
        places=tuple(f"{place}.input_schema" for place in asked.declared.places),
    )
    most = 1 if request.wants_none else request.max_tokens
    chosen = sampling(request, max_tokens=most, logprobs=None)
    return turn_spec(request, (told,), chosen, 1, reading, calls, _budget(request))


def _budget(request: MessagesRequest) -> Thinking | None:
    """Return the limit of reasoning tokens; engines that cannot enforce it get it only through the prompt."""
    asked = request.thinking
    if asked is not None and asked.type == "enabled" and asked.budget_tokens is not None:
        return Thinking(tokens=asked.budget_tokens, param="thinking.budget_tokens", soft=True)
    return budget_beside(request)


def after_calls(asked: AskedMessage) -> TurnSpec:
    """Return the turn for requests after the first, in which a required call has already been made."""
    first, calls = spec(asked), read_calling(asked)
    if calls is None or not calls.required or first.reading is None:
        return first
    single = asked.request.tool_choice and asked.request.tool_choice.disable_parallel_tool_use
    reading = replace(first.reading, most_calls=1 if single else None)
    return replace(first, calling=ease_calling(calls, asked.declared), reading=reading)
