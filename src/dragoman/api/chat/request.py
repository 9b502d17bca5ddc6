"""Chat Completions: the request, its messages, and the MCP servers that it names."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from dragoman.api.compat_fields import CHAT, ECHOED_IN_CALLS, ECHOED_IN_MESSAGES
from dragoman.api.content_parts import (
    ConversationMedia,
    ImageList,
    join_parts,
    read_images,
    read_part,
    template_part,
)
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import IDLE, read_wanted
from dragoman.api.shared_fields import (
    Longest,
    Natural,
    ShortText,
    TemplateFields,
    TokenId,
    Verbosity,
    check_longest,
    check_reasoning,
    check_shared,
    check_template,
    sampling,
    template_kwargs,
    thinking,
    thought_text,
    turn_spec,
)
from dragoman.api.tools import (
    DeclaredTools,
    Function,
    Tool,
    as_arguments,
    bad_param,
    check_tools,
    for_template,
    name_tools,
    read_tool_policy,
    relax_tool_policy,
)
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.mcp import McpTool
from dragoman.turns.spec import ParseOptions, ToolCallPolicy, TurnSpec
from dragoman.turns.tool_loop import McpServerRequest
from dragoman.types import Conversation, IdsPrompt, Message, Prompt, Role, ToolCall

# Messages: how they are checked and converted for the template.


THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of content parts of an assistant's message that are reasoning."""


class FunctionCall(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED_IN_CALLS
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(Struct, forbid_unknown_fields=True):
    name: str
    input: str


class MessageToolCall(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED_IN_CALLS
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: Natural | None = None

    @property
    def called(self) -> FunctionCall | None:
        """The function call for the prompt; a custom tool's text becomes its arguments."""
        if self.custom is None or self.function is not None:
            return self.function
        return FunctionCall(self.custom.name, as_arguments(self.custom.input))


class MessageBody(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED_IN_MESSAGES
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: ShortText | None = None
    tool_name: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: ShortText | None = None
    # Fields of other servers to continue the last message, and to send reasoning.
    prefix: bool | None = None
    partial: bool | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    reasoning_items: list[dict[str, Any]] | None = None
    images: list[Any] | None = None
    id: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    provider_specific_fields: Any = None


def check_messages(messages: Sequence[MessageBody], limits: Limits, known: int = 0) -> None:
    """Raise if a part or call is invalid, and decode images. The first `known` messages were checked."""
    shows = False
    for number, message in enumerate(messages[known:], known):
        if message.images:
            message.images = read_images(message.images, limits, f"messages[{number}].images")
            shows = True
        if isinstance(message.content, list):
            for at, part in enumerate(message.content):
                if _is_thought(message, part):
                    continue
                message.content[at] = read = read_part(part, limits, f"messages[{number}].content[{at}]")
                shows = shows or read is not part
        for at, call in enumerate(message.tool_calls or ()):
            # Arguments may be anything: a model may have written invalid JSON, or been cut off.
            if call.called is None:
                name = f"messages[{number}].tool_calls[{at}].function"
                raise BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    if shows:
        _shown(messages).check(limits, "messages")


def _shown(messages: Sequence[MessageBody]) -> ConversationMedia:
    """Return the decoded images and audio of the messages."""
    gallery = ConversationMedia()
    for message in messages:
        if isinstance(message.images, ImageList):
            gallery.add(message.images.read)
        if isinstance(message.content, list):
            gallery.add(message.content)
    return gallery


def to_message(body: MessageBody) -> Message:
    """Convert a message for the template, without the fields that are not part of a prompt."""
    content = body.content
    reasoning = body.reasoning_content or body.reasoning or body.thinking
    if _elsewhere(body) != _NOWHERE or isinstance(content, list):
        content, reasoning = _said(body), reasoning or _thoughts(body)
    if body.images:
        content = _beside(body.images, content)
    return Message(
        role=body.role,
        content=content,
        name=body.name or body.tool_name,
        reasoning=reasoning,
        tool_calls=tuple(_tool_calls(body)),
        tool_call_id=body.tool_call_id,
    )


def _is_thought(body: MessageBody, part: dict[str, Any]) -> bool:
    return body.role == "assistant" and part.get("type") in THOUGHTS


def _said(body: MessageBody) -> str | list[dict[str, Any]] | None:
    if not isinstance(body.content, list):
        return body.content
    return [template_part(part, "content") for part in body.content if not _is_thought(body, part)]


def _thoughts(body: MessageBody) -> str | None:
    """Return reasoning in content parts, or in the fields of other services and SDKs."""
    content = body.content if isinstance(body.content, list) else ()
    several = ([part for part in content if _is_thought(body, part)], *_elsewhere(body))
    return next((text for value in several if value and (text := thought_text(value))), None)


_elsewhere = attrgetter("thinking_blocks", "reasoning_details", "reasoning_items")
_NOWHERE = (None, None, None)


def _beside(images: list[Any], content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Put images before the text about them."""
    value = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    shown = images.read if isinstance(images, ImageList) else ()
    return [*(template_part(part, "images") for part in shown), *value]


def _tool_calls(body: MessageBody) -> list[ToolCall]:
    calls = [_tool_call(call.id, call.called) for call in body.tool_calls or () if call.called]
    if body.function_call:
        calls.append(_tool_call(None, body.function_call))
    return calls


def _tool_call(id_: str | None, function: FunctionCall) -> ToolCall:
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = encode_json(arguments).decode()
    return ToolCall(id=id_, name=function.name, arguments=arguments or "{}")


# The request.


class ChatRequest(TemplateFields, kw_only=True, forbid_unknown_fields=True):
    # Fields that determine the prompt.
    messages: list[MessageBody] | None = None
    prompt_token_ids: list[TokenId] | None = None
    input_ids: list[TokenId] | None = None
    tools: list[Tool] | None = None
    functions: list[Function] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Verbosity | None = None
    response_prefix: str | None = None
    # Fields that determine the answer.
    max_completion_tokens: Longest | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs_content_only: bool | None = None
    tool_choice: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    include_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    modalities: list[Literal["text"]] | None = None
    store: bool | None = None

    @property
    def ids(self) -> tuple[str, list[int]] | None:
        """The prompt as token ids with the field that has them, or None if the template renders it."""
        named = {"prompt_token_ids": self.prompt_token_ids, "input_ids": self.input_ids}
        return next(((name, ids) for name, ids in named.items() if ids is not None), None)

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        if self.continue_final_message is not None or not self.messages:
            return bool(self.continue_final_message)
        last = self.messages[-1]
        return last.role == "assistant" and bool(last.prefix or last.partial)

    @property
    def shows_reasoning(self) -> bool:
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded

    @property
    def declared(self) -> DeclaredTools:
        return DeclaredTools.of(self.tools, self.functions)

    @property
    def legacy(self) -> bool:
        """Whether the client uses `functions`, the predecessor of `tools`."""
        return bool(self.functions)

    @property
    def calling(self) -> ToolCallPolicy | None:
        """The tool choice, from `tool_choice` or `function_call`."""
        legacy = self.tool_choice is None and self.function_call is not None
        name = "function_call" if legacy else "tool_choice"
        return read_tool_policy(getattr(self, name), name, self.declared)

    @property
    def names_a_tool(self) -> bool:
        asked = self.calling
        return asked is not None and asked.named


READER = RequestDecoder.for_type(ChatRequest, CHAT, IDLE)


def read(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> ChatRequest:
    request: ChatRequest = READER.read(body, ignored)
    check_request(request, limits, ignored)
    return request


def check_request(
    request: ChatRequest, limits: Limits, ignored: IgnoredFields | None = None, known: int = 0
) -> None:
    """Validate a request; the first `known` messages were checked before."""
    check_conversation(request, limits, known)
    check_shared(request, ignored)
    _check_chat(request)
    if request.stream_reasoning is False and ignored is not None:
        ignored.add("stream_reasoning")


def read_to_render(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> ChatRequest:
    """Read a request for the routes that stop at the prompt, where tools are only a part of the prompt."""
    request: ChatRequest = READER.read(body, ignored)
    check_conversation(request, limits)
    return request


def spec(request: ChatRequest, known: tuple[Message, ...] = ()) -> TurnSpec:
    """Build the turn; `known` are its first messages, already converted for the template."""
    most = request.max_completion_tokens or request.max_tokens
    alternatives = (request.top_logprobs or 0) if request.logprobs else None
    asked = sampling(request, max_tokens=most, logprobs=alternatives)
    return turn_spec(
        request,
        (prompt(request, known),),
        asked,
        request.n or 1,
        _reading(request),
        request.calling,
        thinking(request),
    )


def _reading(request: ChatRequest) -> ParseOptions:
    tools = for_template(request.declared.functions)
    unwanted = "none" in (request.tool_choice, request.function_call) or request.parse_tool_calls is False
    single = request.legacy or request.parallel_tool_calls is False or request.names_a_tool
    return ParseOptions(
        tools=tools,
        calls=bool(tools) and not unwanted,
        reasoning=request.separate_reasoning is not False and request.reasoning_format != "none",
        most_calls=1 if single else None,
        verbatim=read_wanted(request) is not None,
        custom=request.declared.custom,
        logprobs="text" if request.logprobs_content_only else "all",
        params=tuple(f"{param}.parameters" for param in request.declared.params),
    )


def echo_text(request: ChatRequest) -> str:
    """Return the text that precedes the answer: with `echo`, what the client began."""
    if not request.echo:
        return ""
    messages = request.messages or ()
    begun = (_said(messages[-1]) or "") if messages and request.continues else ""
    begun = begun if isinstance(begun, str) else join_parts(begun)
    return begun + (request.response_prefix or "")


def _check_chat(request: ChatRequest) -> None:
    check_longest(request.max_tokens, "max_tokens")
    check_longest(request.max_completion_tokens, "max_completion_tokens")
    for name in ("top_logprobs", "logprobs_content_only"):
        if getattr(request, name) and not request.logprobs:
            raise BadRequest(f"{name} needs logprobs: true.", param=name, code="invalid_value")
    check_reasoning(request)
    if request.parse_tool_calls is False and request.calling is not None:
        message = "parse_tool_calls: false leaves calls in the text; leave out tool_choice and function_call."
        raise BadRequest(message, param="parse_tool_calls", code="invalid_value")
    if request.add_special_tokens:
        message = (
            "The chat template writes the special tokens of a conversation; leave out add_special_tokens."
        )
        raise BadRequest(message, param="add_special_tokens", code="unsupported_field")


def check_conversation(request: ChatRequest, limits: Limits, known: int = 0) -> None:
    if request.ids is not None:
        _check_ids(request, *request.ids)
    elif not request.messages:
        raise BadRequest("'messages' is required.", param="messages", code="missing_field")
    if request.tools and request.functions:
        raise BadRequest("Send tools or functions, not both.", param="functions", code="invalid_value")
    check_tools(request.declared, limits)
    check_template(request, limits)
    check_said(request, limits, known)


def check_said(request: ChatRequest, limits: Limits, known: int = 0) -> None:
    """Validate the messages."""
    check_messages(request.messages or (), limits, known)
    if request.continues and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of them."
        raise BadRequest(message, param="continue_final_message", code="invalid_value")


def _check_ids(request: ChatRequest, param: str, ids: list[int]) -> None:
    """Validate a prompt of token ids; fields that would add to the prompt are rejected."""
    if not ids:
        raise BadRequest(f"'{param}' must not be an empty list.", param=param, code="invalid_value")
    if request.prompt_token_ids is not None and request.input_ids is not None:
        message = "'input_ids' and 'prompt_token_ids' are the same field; send one of them."
        raise BadRequest(message, param="input_ids", code="invalid_value")
    for name in ("continue_final_message", "response_prefix", "documents"):
        if getattr(request, name):
            message = f"'{name}' needs a chat template, which '{param}' bypasses; send one of the two."
            raise BadRequest(message, param=name, code="invalid_value")


def prompt(request: ChatRequest, known: tuple[Message, ...] = ()) -> Prompt:
    """Return the prompt: token ids as sent, or a conversation for the template."""
    if request.ids is None:
        return conversation(request, known)
    param, ids = request.ids
    return IdsPrompt(tuple(ids), param)


def conversation(request: ChatRequest, known: tuple[Message, ...] = ()) -> Conversation:
    """Build the conversation for the template, without what is not part of a prompt."""
    continues = request.continues
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    shown = _shown(request.messages or ())
    return Conversation(
        messages=known + tuple(map(to_message, (request.messages or ())[len(known) :])),
        tools=for_template(request.declared.functions),
        documents=tuple(request.documents or ()),
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=template_kwargs(request, request.verbosity),
        response_prefix=request.response_prefix or "",
        media=shown.media,
        media_params=shown.params,
    )


# MCP servers: this server runs their tools, and the client receives only the answer.


def has_servers(request: ChatRequest) -> bool:
    return any(tool.type == "mcp" for tool in request.tools or ())


def requested_servers(request: ChatRequest) -> list[McpServerRequest]:
    """Return the MCP servers that the request names; their tools run without approval."""
    _check_servers(request)
    return [
        McpServerRequest(
            label=tool.server_label or "", allowed_tools=tool.allowed_tools, require_approval="never"
        )
        for _, tool in _list_servers(request)
    ]


def _check_servers(request: ChatRequest) -> None:
    seen: set[str] = set()
    for param_path, tool in _list_servers(request):
        if not tool.server_label:
            raise bad_param(
                f"{param_path}.server_label", "must be the label of one of this server's MCP servers"
            )
        if tool.server_label in seen:
            raise bad_param(f"{param_path}.server_label", "is used twice; labels must differ")
        seen.add(tool.server_label)
        if tool.require_approval != "never":
            message = (
                'Chat Completions has no way to ask for approval: send require_approval "never", or use the'
                " Responses API."
            )
            raise BadRequest(message, param=f"{param_path}.require_approval", code="invalid_value")
    if seen and request.ids is not None:
        param, _ = request.ids
        message = f"The tools of an MCP server cannot be added to a prompt of token ids; leave out {param}."
        raise BadRequest(message, param=param, code="invalid_value")
    if seen and (request.n or 1) > 1:
        raise BadRequest("n must be 1 with MCP servers; leave it out.", param="n", code="invalid_value")


def _list_servers(request: ChatRequest) -> Iterator[tuple[str, Tool]]:
    for number, tool in enumerate(request.tools or ()):
        if tool.type == "mcp":
            yield f"tools[{number}]", tool


def with_mcp_tools(
    request: ChatRequest, listed: Mapping[str, Sequence[McpTool]]
) -> tuple[ChatRequest, dict[str, tuple[str, str]]]:
    """Return the request with functions for the servers' tools, and for each function its server and tool."""
    functions, fields = name_tools(request.declared, listed)
    tools = [tool for tool in request.tools or () if tool.type != "mcp"]
    return replace(request, tools=[*tools, *(Tool(function=each) for each in functions)]), fields


def without_servers(request: ChatRequest) -> TurnSpec:
    """Return the turn as far as it is determined before the MCP servers list tools, which `tool_choice` may
    name."""
    return spec(replace(request, tool_choice=None))


def follow_up_spec(request: ChatRequest) -> TurnSpec:
    """Return the turn for requests after the first, in which a required call has already been made."""
    asked, first = request.calling, spec(request)
    if asked is None or not asked.required or first.parsing is None:
        return first
    single = request.legacy or request.parallel_tool_calls is False
    reading = replace(first.parsing, most_calls=1 if single else None)
    return replace(first, tool_policy=relax_tool_policy(asked, request.declared), parsing=reading)
