"""Routes that only inspect: tokenize, detokenize, render, check a schema, parse text with a dialect."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from dragoman.api.chat.request import ChatRequest, check_conversation
from dragoman.api.chat.request import prompt as chat_prompt
from dragoman.api.compat_fields import CHAT
from dragoman.api.reply import OpenAIErrorSerializer, encode
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import IDLE
from dragoman.api.shared_fields import TokenId
from dragoman.api.tools import DeclaredTools, Tool, check_tools, for_template
from dragoman.constrain.schema.json_schema import prepare_schema
from dragoman.constrain.schema.keywords import SchemaProblems
from dragoman.dialects.declarations import Dialect, prompt_opened_reasoning
from dragoman.dialects.parser import PIECE, parse
from dragoman.dialects.registry import get_dialect
from dragoman.errors import CONVERSATION, BadRequest, SettingsError
from dragoman.limits import Limits, check_count
from dragoman.prompt.answer_inspection import InspectionRequest
from dragoman.types import Answer, Prompt, TextPrompt

ERRORS = OpenAIErrorSerializer({CONVERSATION: "messages"})
MOST_CHUNKS = 16 * 1024
"""Maximum number of chunks in which a text is parsed."""


# Tokenize and detokenize, without generating.


class TokenizeTextRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """A chat request, as it would be sent for generation."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None
    return_token_strs: bool | None = None


class CheckSchemaRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    schema: Any


class _Shape(Struct):
    messages: Any = None
    prompt_token_ids: Any = None
    input_ids: Any = None


_shape = RequestDecoder.for_type(_Shape)
_text = RequestDecoder.for_type(TokenizeTextRequest)
_chat = RequestDecoder.for_type(TokenizeChatRequest, CHAT, IDLE)
_ids = RequestDecoder.for_type(DetokenizeRequest)
_schema = RequestDecoder.for_type(CheckSchemaRequest)


def read_tokenize(
    body: bytes, limits: Limits, ignored: IgnoredFields | None = None
) -> TokenizeTextRequest | TokenizeChatRequest:
    if _shape.read(body) == _Shape():
        text: TokenizeTextRequest = _text.read(body, ignored)
        return text
    chat: TokenizeChatRequest = _chat.read(body, ignored)
    check_conversation(chat, limits)
    return chat


def prompt(request: TokenizeTextRequest | TokenizeChatRequest) -> Prompt:
    if isinstance(request, TokenizeTextRequest):
        return TextPrompt(request.prompt, None, request.add_special_tokens is not False)
    return chat_prompt(request)


def describe_tokens(ids: Sequence[int], max_model_len: int | None) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": None}


def read_detokenize(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> DetokenizeRequest:
    request: DetokenizeRequest = _ids.read(body, ignored)
    return request


def check_known(ids: Sequence[int], vocabulary: int, param: str) -> None:
    """Raise if an id is not in the vocabulary."""
    highest = max(ids, default=0)
    if highest >= vocabulary:
        message = f"Token id {highest} is not in the vocabulary (0 to {vocabulary - 1})."
        raise BadRequest(message, param=param, code="invalid_token_id")


def read_schema(body: bytes) -> Any:
    request: CheckSchemaRequest = _schema.read(body)
    return request.schema


def look_at_schema(schema: Any, limits: Limits) -> dict[str, Any]:
    """Report whether a constraint can enforce all of a schema, and which parts it cannot."""
    problems = SchemaProblems()
    try:
        prepare_schema(schema, problems, "schema", limits, watched=True)
    except BadRequest as error:
        problems.add("", error.message)
    described = [{"place": f"#{one.pointer}", "message": one.message} for one in problems.items]
    return {"object": "schema_check", "enforceable": not described, "problems": described}


# The parsers as a service: text in, tool calls or reasoning out.


class ParseCallsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    tool_call_parser: str | None = None
    tools: list[Tool] | None = None


class ParseReasoningRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    reasoning_parser: str | None = None


class ParseAnswerRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The output of a model, as text or token ids, and how to parse it."""

    text: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    model: str | None = None
    dialect: str | None = None
    template: str | None = None
    tools: list[Tool] | None = None
    starts_in_reasoning: bool | None = None
    chunk: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    return_grammar: bool | None = None


_answer = RequestDecoder.for_type(ParseAnswerRequest)
_calls = RequestDecoder.for_type(ParseCallsRequest)
_reasoning = RequestDecoder.for_type(ParseReasoningRequest)


def read_calls(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> ParseCallsRequest:
    request: ParseCallsRequest = _calls.read(body, ignored)
    check_count(len(request.text), limits.parsed_chars, "text", "characters")
    check_tools(DeclaredTools.of(request.tools), limits)
    return request


def read_reasoning(
    body: bytes, limits: Limits, ignored: IgnoredFields | None = None
) -> ParseReasoningRequest:
    request: ParseReasoningRequest = _reasoning.read(body, ignored)
    check_count(len(request.text), limits.parsed_chars, "text", "characters")
    return request


def read_answer(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> ParseAnswerRequest:
    request: ParseAnswerRequest = _answer.read(body, ignored)
    text, ids = request.text or "", request.token_ids
    check_count(len(text), limits.parsed_chars, "text", "characters")
    check_count(len(ids or ()), limits.parsed_chars, "token_ids", "ids")
    check_count(len(request.prompt_token_ids or ()), limits.parsed_chars, "prompt_token_ids", "ids")
    check_count(len(request.template or ""), limits.parsed_chars, "template", "characters")
    check_count(-(-len(text) // (request.chunk or PIECE)), MOST_CHUNKS, "chunk", "pieces of the text")
    check_tools(DeclaredTools.of(request.tools), limits)
    if request.dialect is not None and request.template is not None:
        raise _excludes("dialect", "template")
    for name in ("text", "dialect", "template", "chunk") if ids is not None else ():
        if getattr(request, name) is not None:
            raise _excludes("token_ids", name)
    return request


def _excludes(one: str, other: str) -> BadRequest:
    message = f"'{one}' and '{other}' exclude each other; send one of them."
    return BadRequest(message, param=other, code="invalid_value")


def looked_at(request: ParseAnswerRequest) -> InspectionRequest:
    return InspectionRequest(
        text=request.text or "",
        template=request.template,
        tools=tools_of(request),
        starts_in_reasoning=request.starts_in_reasoning,
        chunk=request.chunk,
        grammar=bool(request.return_grammar),
    )


def tools_of(request: ParseAnswerRequest | ParseCallsRequest) -> tuple[dict[str, Any], ...]:
    return for_template(DeclaredTools.of(request.tools).functions)


def find_parser(name: str | None, param: str, own: Dialect) -> Dialect:
    """Return the dialect with this name; None is the dialect of the server's model."""
    try:
        return own if name is None else get_dialect(name)
    except SettingsError as error:
        raise BadRequest(error.message, param=param, code="invalid_value") from None


def parse_calls(request: ParseCallsRequest, own: Dialect) -> Answer:
    """Parse tool calls; reasoning stays in the text, because the client asked for calls only."""
    dialect = find_parser(request.tool_call_parser, "tool_call_parser", own)
    return parse(request.text, dialect, tools_of(request), reasoning=False)


def parse_reasoning(request: ParseReasoningRequest, own: Dialect) -> Answer:
    dialect = find_parser(request.reasoning_parser, "reasoning_parser", own)
    return parse(request.text, dialect, (), prompt_opened_reasoning(dialect, request.text), calls=False)


def calls_reply(answer: Answer) -> dict[str, Any]:
    calls = [
        _write_call(
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        )
        for call in answer.calls
    ]
    return {"remaining_text": answer.text, "tool_calls": calls, "success": True}


def calls_reply_sglang(answer: Answer) -> dict[str, Any]:
    calls = [
        _write_call({"tool_index": number, "name": call.name, "parameters": call.arguments})
        for number, call in enumerate(answer.calls)
    ]
    return {"normal_text": answer.text, "calls": calls}


def _write_call(call: dict[str, Any]) -> Raw:
    """Encode a call at once: a text may have a hundred thousand, and freeing that many nested objects is
    slow."""
    return Raw(encode(call))


def reasoning_reply(answer: Answer) -> dict[str, Any]:
    return {"normal_text": answer.text, "reasoning_text": answer.reasoning, "success": True}


def reasoning_reply_sglang(answer: Answer) -> dict[str, Any]:
    return {"text": answer.text, "reasoning_text": answer.reasoning}
