"""Routes of Messages: answers, token counts, and a liveness probe."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from msgspec.structs import replace

from dragoman.api.messages import request as requests
from dragoman.api.messages.batches import MESSAGE_BATCH_OPERATIONS
from dragoman.api.messages.context_edits import (
    ContextEditResult,
    apply_edits,
    ask_summary,
    with_summary,
    write_summary,
)
from dragoman.api.messages.reply import MessageOptions, MessageWriter
from dragoman.api.messages.request import ContextEdit, MessagesRequest, ParsedMessagesRequest
from dragoman.api.openapi import Operation
from dragoman.api.reply import ReplyEnvelope, new_head
from dragoman.api.tools import check_tools
from dragoman.engines.protocol import require_tokenizer
from dragoman.http import run_turn
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.routes.generate import ask_servers
from dragoman.http.run_turn import AnyTurn
from dragoman.responses.run import counting_cost
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import CallOutcome, MultiTurnAnswer, ToolLoop
from dragoman.turns.turn import Turn, log_terms
from dragoman.types import Usage

ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
OPERATIONS = (
    Operation("post", "/v1/messages", "Create a message", (MessagesRequest,), streams=True, error=ERROR),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        (MessagesRequest,),
        error=ERROR,
    ),
    Operation("get", "/api/hello", "Liveness probe for Anthropic clients", error=ERROR),
)


def batch_operations() -> list[Operation]:
    """Return the operations of message batches, with this API's errors."""
    return [replace(operation, error=ERROR) for operation in MESSAGE_BATCH_OPERATIONS]


async def create(shared: AppState, exchange: Exchange) -> None:
    asked, size = await exchange.read(partial(_read, shared, exchange))
    exchange.active.set_timeout(asked.request.timeout)
    host = await shared.acquire_model(asked.request.model, exchange, streams=bool(asked.request.stream))
    _check_thinking(host, exchange, asked)
    head = new_head("msg_", host.model.planner.name(asked.request.model), host.fingerprint)
    exchange.log_fields["model"] = head.model
    editing = partial(apply_edits, asked, partial(_count, host), host.card.context_tokens)
    weight = counting_cost(host.model, size) if asked.request.edits else size
    edited = await exchange.offload(weight, editing)
    options = MessageOptions(
        seal=partial(host.desk.sealer.seal, owner=exchange.owner),
        shows_thinking=asked.request.shows_thinking,
        stops=asked.request.stops,
        silent=asked.request.wants_none,
        edits=edited.applied,
    )
    asked = edited.asked
    if asked.request.compaction or edited.compacts:
        asked, options = await _summarise(host, exchange, edited, options, size)
    if options.pauses:
        await _reply_at_once(exchange, MessageWriter(head, options, Usage, keeps=True), asked)
    else:
        await _answer(host, exchange, asked, head, options, size)


async def _answer(
    host: ModelServing,
    exchange: Exchange,
    asked: ParsedMessagesRequest,
    head: ReplyEnvelope,
    options: MessageOptions,
    size: int,
) -> None:
    request = asked.request
    async with AsyncExitStack() as stack:
        if asked.servers:
            # Listing the tools of MCP servers may take time.
            planning = _plan_with_servers(host, exchange, asked, head, size, stack)
            turn: AnyTurn = await cancel_on_disconnect(exchange, planning)
        else:
            spec = await exchange.offload(size, partial(requests.spec, asked))
            turn = await run_turn.plan_turn(host, exchange, spec, size, head.id)
        job = turn.jobs[0]
        most, room = job.sampling.max_tokens, host.card.remaining_tokens(len(job.prompt))
        fits = request.wants_none or (request.max_tokens or 0) <= most or most < room
        served = turn.names if isinstance(turn, VisibleMultiTurnAnswer) else {}
        terms = replace(options, whole_length=fits, server_tools=served)
        writer = MessageWriter(head, terms, lambda: turn.usage, keeps=not request.stream)
        if isinstance(turn, VisibleMultiTurnAnswer):
            turn.writer = writer
        await _tell(host, exchange, turn, writer, head, stream=bool(request.stream))


async def _tell(
    host: ModelServing,
    exchange: Exchange,
    turn: AnyTurn,
    writer: MessageWriter,
    head: ReplyEnvelope,
    *,
    stream: bool,
) -> None:

    async def keep() -> None:
        await host.desk.store_token_ids(
            exchange.owner, head.id, turn.records, asked=False, model=head.model, created_at=head.created
        )

    if stream:
        pump, keep_alive = host.pump, host.settings.keep_alive
        kept = keep if host.desk.keeps_ids else None
        await run_turn.stream_turn(exchange, turn, lambda: (writer, writer.opening), pump, keep_alive, kept)
        return
    await run_turn.consume_events(exchange, turn, writer.write)
    await keep()
    await exchange.json(writer.whole(), size=writer.amount)


class VisibleMultiTurnAnswer(MultiTurnAnswer):
    """One message of several turns, in which the server's calls and their results are blocks."""

    shows_calls = True
    writer: MessageWriter

    @property
    def names(self) -> Mapping[str, tuple[str, str]]:
        return self._names

    async def add_results(self, outcomes: Sequence[CallOutcome]) -> None:
        await super().add_results(outcomes)
        await self._outlet.write(self.writer.write_results(self._asked, outcomes))


async def _plan_with_servers(
    host: ModelServing,
    exchange: Exchange,
    asked: ParsedMessagesRequest,
    head: ReplyEnvelope,
    size: int,
    stack: AsyncExitStack,
) -> VisibleMultiTurnAnswer:
    """Plan an answer for which the server runs tools; `stack` closes the MCP connections."""

    async def plan(spec: TurnSpec) -> Turn:
        return await host.model.create_turn(spec, exchange.owner, size, head.id)

    known = requests.without_servers(asked)
    toolbox, listed = await ask_servers(host, exchange, asked.servers, known, size, stack)
    asked, names = requests.with_tools(asked, listed)
    check_tools(asked.declared, host.limits)
    first = requests.spec(asked)
    turn = await plan(first)
    log_terms(exchange.log_fields, turn)
    most = host.model.planner.defaults(asked.request.model).max_total_tokens(first.sampling.max_tokens)
    loop = ToolLoop(toolbox, most, exchange.log_fields)
    return VisibleMultiTurnAnswer(loop, turn, requests.after_calls(asked), names, plan)


async def _summarise(
    host: ModelServing, exchange: Exchange, edited: ContextEditResult, options: MessageOptions, size: int
) -> tuple[ParsedMessagesRequest, MessageOptions]:
    """Let the model summarize the conversation; return the shortened request and the terms of the reply."""
    asked, wish = edited.asked, edited.asked.request.compaction or edited.compacts
    assert wish is not None
    most = host.card.summary_room(size)
    spec = await exchange.offload(size, partial(ask_summary, asked, wish.instructions, most))
    turn = await run_turn.plan_turn(host, exchange, spec, size)
    (answer,) = await run_turn.collect_answers(exchange, turn)
    summary = write_summary(asked, answer.text.strip() or answer.reasoning.strip())
    pauses = not isinstance(wish, ContextEdit) or bool(wish.pause_after_compaction)
    return with_summary(asked, summary), replace(options, summary=summary, summed=turn.usage, pauses=pauses)


async def _reply_at_once(exchange: Exchange, writer: MessageWriter, asked: ParsedMessagesRequest) -> None:
    if not asked.request.stream:
        await exchange.json(writer.whole())
        return
    await exchange.start_stream(writer.opening())
    await exchange.end_stream(writer.end())


def _count(host: ModelServing, asked: ParsedMessagesRequest) -> int:
    _, ids = host.model.planner.render(asked.request.model, requests.conversation(asked))
    return len(ids)


def _read(host: AppState, exchange: Exchange, body: bytes, *, counts: bool = False) -> ParsedMessagesRequest:
    unseal = partial(host.responses.sealer.open, owner=exchange.owner)
    return requests.read(body, host.limits, unseal, exchange.ignored, counts=counts)


def _check_thinking(host: ModelServing, exchange: Exchange, asked: ParsedMessagesRequest) -> None:
    thinking = asked.request.thinking
    if thinking is not None and thinking.budget_tokens is not None and not host.card.constrains:
        exchange.ignored.add("thinking.budget_tokens")
        exchange.log_fields["ignored"] = exchange.ignored.summary


async def count_tokens(shared: AppState, exchange: Exchange) -> None:
    """Count the tokens of the prompt of the same body."""
    asked, size = await exchange.read(partial(_read, shared, exchange, counts=True))
    host = await shared.acquire_model(asked.request.model, exchange)
    require_tokenizer(host.card, "this route")

    def count() -> dict[str, Any]:
        edited = apply_edits(asked, partial(_count, host), host.card.context_tokens)
        counted = {"input_tokens": _count(host, edited.asked)}
        if edited.applied is None:
            return counted
        return {**counted, "context_management": {"original_input_tokens": _count(host, asked)}}

    await exchange.answer(counting_cost(host.model, size), count)


async def hello(host: AppState, exchange: Exchange) -> None:
    """Reply to Claude Code's first request."""
    await exchange.json({"message": "hello"})
