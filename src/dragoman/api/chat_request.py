"""Chat Completions: the request."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.json import encode as encode_json

from dragoman.api.fields import SharedFields, ShortText, check_shared, sampling, turn_spec
from dragoman.api.read import Reader
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec
from dragoman.types import Conversation, Message, Role, ToolCall

MEDIA_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


class FunctionCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Struct, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class MessageBody(Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: ShortText | None = None
    # What servers and clients leave in messages they send back; none of it is part of a prompt.
    id: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    provider_specific_fields: Any = None


class FunctionTool(Struct, forbid_unknown_fields=True):
    function: dict[str, Any]
    type: Literal["function"] = "function"


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Any = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


class ChatRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    # What makes the prompt.
    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    tools: list[FunctionTool] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    response_prefix: str | None = None
    # What the answer is to be.
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    store: bool | None = None


READER = Reader.of(ChatRequest)


def read(body: bytes, limits: Limits) -> ChatRequest:
    request: ChatRequest = READER.read(body)
    check_conversation(request, limits)
    check_shared(request, limits)
    _check_chat(request, limits)
    return request


def read_to_render(body: bytes, limits: Limits) -> ChatRequest:
    """For the routes that stop at the prompt, where tools are no more than a part of it."""
    request: ChatRequest = READER.read(body)
    check_conversation(request, limits)
    return request


def spec(request: ChatRequest) -> TurnSpec:
    most = request.max_completion_tokens or request.max_tokens
    asked = sampling(request, max_tokens=most, logprobs=_wanted_logprobs(request))
    return turn_spec(request, (conversation(request),), asked, request.n or 1)


def echoed(request: ChatRequest) -> str:
    """The text that the answer is to be preceded by: with `echo`, what the client began itself."""
    if not request.echo:
        return ""
    last = request.messages[-1]
    begun = _joined(last.content) if request.continue_final_message else ""
    return begun + (request.response_prefix or "")


def _wanted_logprobs(request: ChatRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_chat(request: ChatRequest, limits: Limits) -> None:
    check_count(request.top_logprobs or 0, limits.logprobs, "top_logprobs", "alternatives")
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value")
    _check_tools(request)
    if request.response_format and request.response_format.type != "text":
        message = "This server does not constrain output yet; response_format can only be text."
        raise BadRequest(message, param="response_format", code="unsupported_field")
    if request.add_special_tokens:
        message = (
            "The chat template writes the special tokens of a conversation; leave out add_special_tokens."
        )
        raise BadRequest(message, param="add_special_tokens", code="unsupported_field")
    if request.store:
        raise BadRequest("Answers are not stored by this server.", param="store", code="unsupported_field")


def _check_tools(request: ChatRequest) -> None:
    message = "Tool calls are not offered by this server yet; leave out tools, or send tool_choice: none."
    if request.tools and request.tool_choice != "none":
        raise BadRequest(message, param="tools", code="unsupported_field")
    if request.tool_choice not in (None, "none", "auto"):
        raise BadRequest(message, param="tool_choice", code="unsupported_field")


def check_conversation(request: ChatRequest, limits: Limits) -> None:
    check_count(len(request.messages), limits.messages, "messages", "messages")
    check_count(len(request.tools or ()), limits.tools, "tools", "tools")
    size = 0
    for number, message in enumerate(request.messages):
        size += _size(message.content, f"messages[{number}].content")
    check_count(
        size + len(request.response_prefix or ""), limits.content_chars, "messages", "characters of content"
    )
    if request.continue_final_message and request.add_generation_prompt:
        message_ = "continue_final_message and add_generation_prompt exclude each other."
        raise BadRequest(message_, param="continue_final_message", code="invalid_value")


def _size(content: str | list[dict[str, Any]] | None, param: str) -> int:
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(_part_text(part, f"{param}[{number}]")) for number, part in enumerate(content))


def _part_text(part: dict[str, Any], param: str) -> str:
    kind = part.get("type")
    if kind in MEDIA_PARTS:
        message = f"This model takes text only; {MEDIA_PARTS[kind]} are not supported."
        raise BadRequest(message, param=param, code="unsupported_content")
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadRequest(f"Unknown content part type {kind!r}.", param=f"{param}.type", code="invalid_value")
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(f"'{param}.{key}' must be a string.", param=f"{param}.{key}", code="invalid_value")
    return text


def conversation(request: ChatRequest) -> Conversation:
    """The template's view: everything that does not belong into a prompt is gone."""
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return Conversation(
        messages=tuple(_message(body) for body in request.messages),
        tools=tuple({"type": tool.type, "function": tool.function} for tool in request.tools or ()),
        documents=tuple(request.documents or ()),
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(request),
        response_prefix=request.response_prefix or "",
    )


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    named = {
        "enable_thinking": request.enable_thinking,
        "reasoning_effort": request.reasoning_effort,
        "verbosity": request.verbosity,
    }
    if request.reasoning_effort == "none" and request.enable_thinking is None:
        named["enable_thinking"] = False
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **(request.template_vars or {}), **(request.chat_template_kwargs or {})}


def _message(body: MessageBody) -> Message:
    return Message(
        role=body.role,
        content=_parts(body.content) if isinstance(body.content, list) else body.content,
        name=body.name,
        reasoning=body.reasoning_content or body.reasoning or body.thinking,
        tool_calls=tuple(_tool_calls(body)),
        tool_call_id=body.tool_call_id,
    )


def _parts(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": _part_text(part, "content")} for part in content]


def _joined(content: str | list[dict[str, Any]] | None) -> str:
    return "".join(p["text"] for p in _parts(content)) if isinstance(content, list) else content or ""


def _tool_calls(body: MessageBody) -> list[ToolCall]:
    calls = [_tool_call(call.id, call.function) for call in body.tool_calls or ()]
    if body.function_call:
        calls.append(_tool_call(None, body.function_call))
    return calls


def _tool_call(id_: str | None, function: FunctionCall) -> ToolCall:
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = encode_json(arguments).decode()
    return ToolCall(id=id_, name=function.name, arguments=arguments or "{}")
