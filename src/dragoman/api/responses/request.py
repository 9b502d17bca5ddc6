"""Responses: the request. `items.normalise` validates its input items."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from dragoman.api.compat_fields import RESPONSES
from dragoman.api.content_parts import ConversationMedia
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.responses.history import BETWEEN_THOUGHTS, Visible, messages
from dragoman.api.responses.tools import HOSTED, ModelTools, echo, offer_tools
from dragoman.api.sampling_fields import IDLE, Description, JsonSchema, SchemaName, read_wanted
from dragoman.api.shared_fields import (
    Longest,
    Natural,
    Positive,
    ReasoningOptions,
    ShortText,
    TemplateFields,
    Verbosity,
    check_longest,
    check_reasoning,
    check_shared,
    check_template,
    sampling,
    template_kwargs,
    thinking,
    turn_spec,
)
from dragoman.api.tools import bad_param, for_template, read_tool_policy, relax_tool_policy
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.media import MediaKind
from dragoman.turns.spec import OutputConstraint, ParseOptions, ToolCallPolicy, TurnSpec
from dragoman.types import Conversation, Sampling

PARAM = "tool_choice"
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# fmt: off
INCLUDABLE = (
    LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)
# fmt: on

NOT_HERE = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "prompt": "the server stores no prompt templates; send instructions and input",
    "moderation": "it belongs to a hosted service",
    "access_programs": "it belongs to a hosted service",
    "echo": "a response contains only the answer",
    "prompt_logprobs": "a response has log probabilities only of the answer",
    "add_special_tokens": "the chat template writes the special tokens of a conversation",
}
"""Fields of other APIs and of hosted services: a 400 is better than an answer that ignores them."""


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: Description | None = None
    schema_: JsonSchema | None = field(name="schema", default=None)
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseReasoning(ReasoningOptions, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = frozenset()
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: ShortText | None = None


class ConversationRef(Struct, forbid_unknown_fields=True):
    id: ShortText


class ContextManagement(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    type: Literal["compaction"]
    compact_threshold: Positive | None = None


class ResponseRequest(TemplateFields, kw_only=True, forbid_unknown_fields=True):
    # Fields that determine the prompt.
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    conversation: ShortText | ConversationRef | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[ContextManagement] | None = None
    # Fields that determine the answer.
    max_output_tokens: Longest | None = None
    max_tool_calls: Positive | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    text: TextOptions | None = None
    top_logprobs: Natural | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    # Fields about storage, background mode and hosted services.
    store: bool | None = None
    background: bool | None = None
    image: dict[str, Any] | None = None
    prompt: Any = None
    moderation: Any = None
    access_programs: Any = None

    def formats(self) -> Iterator[OutputConstraint]:
        wish = self.text.format if self.text else None
        if wish is None or wish.type == "text":
            return
        if wish.type == "json_object":
            yield OutputConstraint(syntax="json_object", param="text.format")
        elif wish.schema_ is None:
            param = "text.format.schema"
            raise BadRequest(f"'{param}' is required.", param=param, code="missing_field")
        else:
            yield OutputConstraint(syntax="json_schema", value=wish.schema_, param="text.format.schema")

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationRef) else named

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED in (self.include or ())

    @property
    def wants_obfuscation(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    @property
    def wants_summary(self) -> bool:
        return bool(self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary))

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives to return, or None for no log probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def compact_threshold(self) -> int | None:
        numbers = [each.compact_threshold for each in self.context_management or () if each.compact_threshold]
        return min(numbers, default=None)

    @property
    def echoed_tools(self) -> list[dict[str, Any]]:
        return echo(self.tools)

    @property
    def echoed_text(self) -> dict[str, Any]:
        text = self.text or TextOptions()
        shown = _said(text.format) if text.format else {"type": "text"}
        return {"format": shown, "verbosity": text.verbosity or "medium"}

    @property
    def echoed_reasoning(self) -> dict[str, Any]:
        return {"effort": self.effort, "summary": None, **(_said(self.reasoning) if self.reasoning else {})}


def _said(options: Struct) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(options)
    return {name: value for name, value in shown.items() if value is not None}


READER = RequestDecoder.for_type(ResponseRequest, RESPONSES, (*IDLE, "image"))


def read(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> ResponseRequest:
    """Read a request, and reject what can be rejected without the store."""
    request: ResponseRequest = READER.read(body, ignored)
    _check_here(request)
    check_shared(request, ignored)
    check_reasoning(request)
    check_template(request, limits)
    _check_context(request, limits)
    _check_answer(request, limits)
    offer = offer_tools(request.tools, limits, ignored=ignored or IgnoredFields("error"))
    check_choice(request.tool_choice, offer, limits)
    return request


def _check_here(request: ResponseRequest) -> None:
    for name, reason in NOT_HERE.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise BadRequest(f"'{name}' is not supported: {reason}.", param=name, code="unsupported_field")
    if request.reasoning and request.reasoning.exclude:
        message = "'reasoning.exclude' is not supported: a response always includes its reasoning."
        raise BadRequest(message, param="reasoning.exclude", code="unsupported_field")
    if request.n not in (None, 1):
        raise BadRequest(
            "'n' is not supported: a response is one answer; leave it out.",
            param="n",
            code="unsupported_field",
        )


def _check_context(request: ResponseRequest, limits: Limits) -> None:
    if isinstance(request.input, list):
        check_count(len(request.input), limits.messages, "input", "items")
    if request.previous_response_id and request.conversation:
        message = "previous_response_id and conversation are mutually exclusive; send one of them."
        raise BadRequest(message, param="conversation", code="invalid_value")
    before = request.previous_response_id or request.conversation or request.instructions
    if request.input in (None, []) and not before:
        raise BadRequest("'input' is required.", param="input", code="missing_field")


def _check_answer(request: ResponseRequest, limits: Limits) -> None:
    # Checked here too, because the response returns the value even without log probabilities.
    check_count(request.top_logprobs or 0, limits.logprobs, "top_logprobs", "alternatives")
    check_include(request.include or ())
    if request.background and not request.stored:
        message = "background needs store: true, because clients get the response from the store."
        raise BadRequest(message, param="background", code="invalid_value")
    check_longest(request.max_output_tokens, "max_output_tokens")
    if request.max_output_tokens == -1:
        request.max_output_tokens = None
    _sampling(request)


def check_include(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name not in INCLUDABLE:
            message = f"Unknown value {name[:64]!r} in include; allowed are: {', '.join(INCLUDABLE)}."
            raise BadRequest(message, param=f"include[{number}]", code="invalid_value")


def spec(
    request: ResponseRequest,
    items: Sequence[dict[str, Any]],
    offer: ModelTools,
    *,
    first: bool,
    unseal: Callable[[str], str | None],
    modalities: Set[MediaKind] = frozenset(),
) -> TurnSpec:
    """Build the turn of one round of the tool loop, from all items up to there."""
    gallery = ConversationMedia()
    conversation = Conversation(
        messages=messages(items, request.instructions, unseal, offer.visible(), gallery, modalities),
        tools=for_template(offer.functions),
        template_kwargs=template_kwargs(request, request.text.verbosity if request.text else None),
        media=gallery.media,
        media_params=gallery.params,
    )
    calls = read_calling(request.tool_choice, offer, first=first)
    single = request.parallel_tool_calls is False or (calls is not None and calls.named)
    reading = ParseOptions(
        tools=conversation.tools,
        calls=bool(conversation.tools) and request.tool_choice != "none",
        most_calls=1 if single else None,
        verbatim=read_wanted(request) is not None,
        custom=offer.custom,
        params=tuple(f"{param}.parameters" for param in offer.params),
    )
    turn = turn_spec(request, (conversation,), _sampling(request), 1, reading, calls, thinking(request))
    hints = request.conversation_id or "", *turn.hints, request.previous_response_id or ""
    return replace(turn, between_thoughts=BETWEEN_THOUGHTS, hints=hints)


def for_summary(request: ResponseRequest) -> ResponseRequest:
    """Return the request without everything that would make the summary anything but text."""
    return ResponseRequest(
        model=request.model, instructions=request.instructions, reasoning=request.reasoning, input=""
    )


def _sampling(request: ResponseRequest) -> Sampling:
    return sampling(request, max_tokens=request.max_output_tokens, logprobs=request.logprobs)


# Tool choice: forms that Chat Completions lacks are converted to its own.


def read_calling(choice: Any, offer: ModelTools, *, first: bool) -> ToolCallPolicy | None:
    """Return the tool choice for one round of the tool loop; a required call is made in the first.

    `{"type": "mcp", "server_label": "files"}` requires a call of any tool of that server.
    """
    tool_calling = read_tool_policy(_in_chat_form(choice, offer), PARAM, offer)
    return tool_calling if first else relax_tool_policy(tool_calling, offer)


def check_choice(choice: Any, offer: ModelTools, limits: Limits) -> None:
    """Reject a choice that cannot be satisfied; the tools of MCP servers are not listed yet."""
    if isinstance(choice, Mapping):
        check_count(len(_list_tools(choice)), limits.tools, f"{PARAM}.tools", "tools")
    shown = _in_chat_form(choice, offer)
    waits = offer.mcp and (shown == "required" or (isinstance(choice, Mapping) and _speaks_of_mcp(choice)))
    if not waits:
        read_tool_policy(shown, PARAM, offer)


def _speaks_of_mcp(choice: Mapping[str, Any]) -> bool:
    return any(
        isinstance(tool, Mapping) and tool.get("type") == "mcp" for tool in [choice, *_list_tools(choice)]
    )


def _list_tools(choice: Mapping[str, Any]) -> list[Any]:
    tools = choice.get("tools")
    return tools if isinstance(tools, list) else []


def _in_chat_form(choice: Any, offer: ModelTools) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    visible = offer.visible()
    if choice.get("type") == "allowed_tools":
        tools = [
            shown
            for number, tool in enumerate(_list_tools(choice))
            for shown in _tools(tool, offer, visible, f"{PARAM}.tools[{number}]")
        ]
        return {**choice, "tools": tools}
    tools = _tools(choice, offer, visible, PARAM)
    of_server = choice.get("type") == "mcp" and choice.get("name") is None
    return {"type": "allowed_tools", "mode": "required", "tools": tools} if of_server else tools[0]


def _tools(tool: Any, offer: ModelTools, visible: Visible, param: str) -> list[Any]:
    """Return the tools that an entry means, by the names that the model sees."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind in HOSTED:
        message = f"'{param}' requires {kind}, which this server does not have; choose another tool."
        raise BadRequest(message, param=param, code="unsupported_tool")
    if kind == "mcp":
        return _of_server(tool, offer, param)
    if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
        return [tool]
    if not isinstance(tool.get("namespace"), str | None):
        raise bad_param(f"{param}.namespace", "must be a string")
    return [{"type": kind, "name": visible(tool.get("namespace"), tool["name"])}]


def _of_server(tool: Mapping[str, Any], offer: ModelTools, param: str) -> list[Any]:
    label, name = tool.get("server_label"), tool.get("name")
    if label not in [server.server_label for server in offer.mcp]:
        raise bad_param(f"{param}.server_label", "must be the label of one of the tools of type mcp")
    visible_names = [
        shown for shown, ref in offer.refs.items() if ref.server_label == label and name in (None, ref.name)
    ]
    if name is None:
        return [{"type": "function", "name": shown} for shown in visible_names]
    return [{"type": "function", "name": visible_names[0] if visible_names else name}]
