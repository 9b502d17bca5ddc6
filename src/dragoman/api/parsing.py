"""The parsers as a service: a text in, its tool calls or its reasoning out."""

from typing import Any

from msgspec import Raw, Struct

from dragoman.api.read import Reader
from dragoman.api.sse import encode
from dragoman.api.tools import Declared, Tool, check_tools, for_template
from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import begins_inside, parse
from dragoman.dialects.registry import get_dialect
from dragoman.errors import BadRequest, SettingsError
from dragoman.limits import Limits, check_count
from dragoman.types import Answer


class ParseCalls(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    tool_call_parser: str | None = None
    tools: list[Tool] | None = None


class ParseReasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    reasoning_parser: str | None = None


_calls = Reader.of(ParseCalls)
_reasoning = Reader.of(ParseReasoning)


def read_calls(body: bytes, limits: Limits) -> ParseCalls:
    request: ParseCalls = _calls.read(body)
    check_count(len(request.text), limits.parsed_chars, "text", "characters")
    check_tools(Declared.of(request.tools), limits)
    return request


def read_reasoning(body: bytes, limits: Limits) -> ParseReasoning:
    request: ParseReasoning = _reasoning.read(body)
    check_count(len(request.text), limits.parsed_chars, "text", "characters")
    return request


def named(name: str | None, param: str, own: Dialect) -> Dialect:
    """The dialect of a name; without one, that of the server's model."""
    try:
        return own if name is None else get_dialect(name)
    except SettingsError as error:
        raise BadRequest(error.message, param=param, code="invalid_value") from None


def parse_calls(request: ParseCalls, own: Dialect) -> Answer:
    """Reasoning is left in the text: who asks for calls is not asking for it to be taken away."""
    dialect = named(request.tool_call_parser, "tool_call_parser", own)
    tools = for_template(Declared.of(request.tools).functions)
    return parse(request.text, dialect, tools, reasoning=False)


def parse_reasoning(request: ParseReasoning, own: Dialect) -> Answer:
    dialect = named(request.reasoning_parser, "reasoning_parser", own)
    return parse(request.text, dialect, (), begins_inside(dialect, request.text), calls=False)


def calls_reply(answer: Answer) -> dict[str, Any]:
    calls = [
        _written(
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        )
        for call in answer.calls
    ]
    return {"remaining_text": answer.text, "tool_calls": calls, "success": True}


def calls_reply_sglang(answer: Answer) -> dict[str, Any]:
    calls = [
        _written({"tool_index": number, "name": call.name, "parameters": call.arguments})
        for number, call in enumerate(answer.calls)
    ]
    return {"normal_text": answer.text, "calls": calls}


def _written(call: dict[str, Any]) -> Raw:
    """A text may have a hundred thousand calls: as objects of objects, letting go of them would take long."""
    return Raw(encode(call))


def reasoning_reply(answer: Answer) -> dict[str, Any]:
    return {"normal_text": answer.text, "reasoning_text": answer.reasoning, "success": True}


def reasoning_reply_sglang(answer: Answer) -> dict[str, Any]:
    return {"text": answer.text, "reasoning_text": answer.reasoning}
