"""Spans of turns and tool calls, after OpenTelemetry's conventions for generative models (`gen_ai.*`).

A turn is one span with child spans for its phases: `prompt` (template and ids), `queue` (waiting for the
engine), `prefill` (to the first token), `decode` (to the last). Only traced requests come here. Prompts and
answers are added only if the operator's environment says so, as the conventions require.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.mcp import CallResult, McpFailure, McpTool
from dragoman.tracing import (
    RequestTrace,
    SpanRole,
    current,
    headers_of,
    mark_error,
    mark_failed,
    propagate_span,
)
from dragoman.turns.plan import TurnPlan
from dragoman.turns.spec import TurnSpec
from dragoman.types import Answer, Conversation, Event, EventFold, Message, TextPrompt

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from dragoman.turns.turn import Turn

T = TypeVar("T")
PROVIDER = "dragoman"


def follow_turn(
    trace: RequestTrace, turn: "Turn", plan: TurnPlan, spec: TurnSpec, source: str, card: ModelCard
) -> None:
    """Give a turn a span, which ends when the turn is closed. `source` is the answer's id."""
    now = time.time_ns()
    planned = trace.plans.pop(id(plan), (now, now))
    operation = "chat" if isinstance(spec.prompts[0], Conversation) else "text_completion"
    asked = spec.model or card.name
    role: SpanRole = "CLIENT" if card.details.get("runner") == "upstream" else "INTERNAL"
    span = trace.begin(f"{operation} {asked}", role, planned[0])
    span.set_attributes(_asked(turn, spec, operation, asked, card.name))
    if source:
        span.set_attribute("gen_ai.response.id", source)
    if trace.conversation:
        span.set_attribute("gen_ai.conversation.id", trace.conversation)
    trace.add("prompt", *planned, parent=span)
    sent = headers_of(span)
    turn.jobs = [replace(job, trace_headers=sent) for job in turn.jobs]
    recorder = _MessageRecorder(turn) if trace.tracing.content else None
    if recorder is not None:
        span.set_attributes(_told(spec))
    turn.on_close.append(lambda: _end(trace, span, turn, recorder, planned[1]))


def _asked(turn: "Turn", spec: TurnSpec, operation: str, asked: str, answers: str) -> dict[str, Any]:
    sampling = turn.jobs[0].sampling
    wanted = spec.output_constraint is not None and spec.output_constraint.syntax in (
        "json_object",
        "json_schema",
    )
    fields: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": asked,
        "gen_ai.response.model": answers,
        "gen_ai.request.max_tokens": sampling.max_tokens_or_none,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.stop_sequences": spec.stop or None,
        "gen_ai.request.choice.count": turn.choices if turn.choices > 1 else None,
        "gen_ai.output.type": "json" if wanted else "text",
    }
    return {name: value for name, value in fields.items() if value is not None}


def _end(
    trace: RequestTrace, span: "Span", turn: "Turn", recorder: "_MessageRecorder | None", planned: int
) -> None:
    now, usage = time.time_ns(), turn.usage
    _add_parts(trace, span, turn, planned, now)
    span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    if usage.reasoning_tokens:
        span.set_attribute("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens)
    if recorder is not None:
        span.set_attribute("gen_ai.output.messages", recorder.messages())
    ends = [turn.finishes[choice] for choice in sorted(turn.finishes)]
    if len(ends) < turn.choices:
        # The end of the request gives the reason; with background work, the current trace may be another one.
        (current.get() or trace).cut_short(span, now)
        return
    span.set_attribute("gen_ai.response.finish_reasons", [_reason(event) for event in ends])
    for event in ends:
        if event.error is not None:
            mark_error(span, event.error)
    span.end(now)


def _reason(event: Event) -> str:
    return event.finish or "stop"


def _add_parts(trace: RequestTrace, span: "Span", turn: "Turn", planned: int, now: int) -> None:
    """Add the spans of the phases. Phases are measured on the loop's clock, which is monotonic, and converted
    to wall time. Work in one go has one loop time, so no span may begin before planning ended.
    """
    if not turn.started_at:
        return
    present = asyncio.get_running_loop().time()
    begun, first = turn.begun_at, turn.first_token_at

    def wall(at: float) -> int:
        return max(planned, now - int((present - at) * 1e9))

    trace.add("queue", wall(turn.started_at), now if begun is None else wall(begun), span)
    if begun is not None:
        trace.add("prefill", wall(begun), now if first is None else wall(first), span)
    if first is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", first - turn.started_at)
        trace.add("decode", wall(first), now, span)


# Prompts and answers, if the operator wants them in spans.


class _MessageRecorder:
    """Records the events that the client receives."""

    def __init__(self, turn: "Turn") -> None:
        self._fold = EventFold(turn.choices)
        take = turn.take

        def heard() -> list[Event]:
            events = take()
            self._fold.add(events)
            return events

        turn.take = heard  # type: ignore[method-assign]

    def messages(self) -> str:
        return _json([_answer(answer) for answer in self._fold.done()])


def _told(spec: TurnSpec) -> dict[str, str]:
    prompt = spec.prompts[0]
    if isinstance(prompt, TextPrompt):
        text = {"role": "user", "parts": [{"type": "text", "content": prompt.text}]}
        return {"gen_ai.input.messages": _json([text])}
    if not isinstance(prompt, Conversation):
        return {}
    fields = {"gen_ai.input.messages": _json([_message(each) for each in prompt.messages])}
    if prompt.tools:
        fields["gen_ai.tool.definitions"] = _json(prompt.tools)
    return fields


def _message(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.content})
    elif isinstance(message.content, str):
        parts.append({"type": "text", "content": message.content})
    elif message.content:
        parts += message.content
    parts += [_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    return {"role": message.role, "parts": parts}


def _answer(answer: Answer) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if answer.reasoning:
        parts.append({"type": "reasoning", "content": answer.reasoning})
    if answer.text:
        parts.append({"type": "text", "content": answer.text})
    parts += [_call(call.id, call.name, call.arguments) for call in answer.calls]
    return {"role": "assistant", "parts": parts, "finish_reason": answer.finish or "stop"}


def _call(id_: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "tool_call", "id": id_, "name": name, "arguments": arguments}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# Embeddings and scores.


async def trace_vectors(
    trace: RequestTrace, operation: str, model: str, tokens: int, computing: Awaitable[T]
) -> T:
    span = trace.begin(f"{operation} {model}")
    names = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    span.set_attributes({**names, "gen_ai.request.model": model, "gen_ai.usage.input_tokens": tokens})
    try:
        type_var_type = await computing
    except asyncio.CancelledError:
        trace.cut_short(span, time.time_ns())
        raise
    except Exception as error:
        mark_error(span, error)
        span.end()
        raise
    span.end()
    return type_var_type


# Tool calls.


async def trace_call(
    trace: RequestTrace, label: str, name: str, arguments: str, calling: Awaitable[CallResult]
) -> CallResult:
    """Trace a tool call of the server: `execute_tool`, and to MCP `tools/call`."""
    span = trace.begin(f"execute_tool {name}", "CLIENT")
    span.set_attributes(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "extension",
            "mcp.method.name": "tools/call",
            "dragoman.mcp.server": label,
        }
    )
    if trace.tracing.content:
        span.set_attribute("gen_ai.tool.call.arguments", arguments)
    try:
        with propagate_span(span):
            result = await calling
        if result.is_error:
            mark_failed(span, "tool_error", "")
        if trace.tracing.content:
            span.set_attribute("gen_ai.tool.call.result", result.text)
        return result
    except McpFailure as failure:
        # The server's message is for the model; the span gets the type of failure.
        mark_failed(span, failure.kind, "")
        raise
    finally:
        span.end()


async def trace_list(trace: RequestTrace, label: str, listing: Awaitable[list[McpTool]]) -> list[McpTool]:
    span = trace.begin("tools/list", "CLIENT")
    span.set_attributes({"mcp.method.name": "tools/list", "dragoman.mcp.server": label})
    try:
        with propagate_span(span):
            return await listing
    except McpFailure as failure:
        mark_failed(span, failure.kind, "")
        raise
    finally:
        span.end()
