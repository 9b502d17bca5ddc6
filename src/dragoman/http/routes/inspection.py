"""Routes that inspect without generating: tokens, prompts, and parsed answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from dragoman.api import completions as completion_bodies
from dragoman.api import inspection
from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest
from dragoman.api.completions import CompletionRequest
from dragoman.api.inspection import (
    DetokenizeRequest,
    ParseAnswerRequest,
    ParseCallsRequest,
    ParseReasoningRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from dragoman.api.reply import encode_json
from dragoman.api.request_decoder import IgnoredFields
from dragoman.dialects import registry
from dragoman.dialects.describe import AnswerPart, AnswerPartBuilder, TimedEvents, describe_dialect
from dragoman.engines.protocol import require_tokenizer
from dragoman.errors import BadRequest, Overloaded
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.query_string import QueryString
from dragoman.limits import Limits
from dragoman.media.decode import run_once
from dragoman.prompt import answer_inspection
from dragoman.prompt.answer_inspection import InspectionRequest
from dragoman.prompt.find import FoundDialect
from dragoman.responses.run import counting_cost
from dragoman.turns.choice_reader import ChoiceReader, Detokenizer
from dragoman.turns.queue import OFFLOAD_BYTES
from dragoman.turns.spec import ParseOptions, ids_opened_reasoning
from dragoman.types import Event, FinishReason, Prompt, Step

Asked = TypeVar("Asked")


def _answers(
    read: Callable[[bytes, Limits, IgnoredFields], Asked],
) -> Callable[[Callable[[ModelServing, Asked], Any]], Callable[[AppState, Exchange], Awaitable[None]]]:
    """Create a route that replies with the result of a function of the model and the decoded body."""

    def decorate(
        work: Callable[[ModelServing, Asked], Any],
    ) -> Callable[[AppState, Exchange], Awaitable[None]]:
        async def handle(shared: AppState, exchange: Exchange) -> None:
            request, size = await exchange.read(lambda body: read(body, shared.limits, exchange.ignored))
            host = await shared.acquire_model(getattr(request, "model", None), exchange)
            await exchange.answer(counting_cost(host.model, size), lambda: work(host, request))

        return handle

    return decorate


@_answers(inspection.read_tokenize)
def tokenize(host: ModelServing, request: TokenizeTextRequest | TokenizeChatRequest) -> dict[str, Any]:
    require_tokenizer(host.card, "this route")
    _, ids = host.model.planner.render(request.model, inspection.prompt(request))
    tokens = _describe_tokens(host, ids) if request.return_token_strs else {}
    return inspection.describe_tokens(ids, host.card.max_model_len) | tokens


async def check_schema(host: AppState, exchange: Exchange) -> None:
    """Check a schema by compiling it to grammars, which may take long: always in a thread."""
    schema, size = await exchange.read(inspection.read_schema)
    look = partial(inspection.look_at_schema, schema, host.limits)
    await exchange.json(
        await host.workers.run(exchange.owner, size, look, always_offload=True, low_priority=True)
    )


async def list_mcp_servers(host: AppState, exchange: Exchange) -> None:
    """List the operator's MCP servers by the labels that requests use."""
    servers = [{"id": label, "object": "mcp_server"} for label in host.mcp.configured()]
    await exchange.json({"object": "list", "data": servers})


async def tokenizer_info(shared: AppState, exchange: Exchange) -> None:
    """Reply with what a client needs to write prompts itself, in vLLM's format."""
    host = await shared.acquire_model(QueryString(exchange).text("model"), exchange)
    require_tokenizer(host.card, "this route")
    tokenizer, prompter = host.engine.tokenizer, host.model.prompter
    fields = {
        "tokenizer_class": type(tokenizer).__name__,
        **prompter.special,
        "add_bos_token": tokenizer.add_bos,
        "vocab_size": len(tokenizer.pieces),
        "model_max_length": host.card.max_model_len,
        "chat_template": prompter.source,
    }
    await exchange.json(fields)


@_answers(inspection.read_detokenize)
def detokenize(host: ModelServing, request: DetokenizeRequest) -> dict[str, Any]:
    require_tokenizer(host.card, "this route")
    inspection.check_known(request.tokens, len(host.model.pieces), "tokens")
    host.model.planner.resolve_adapter(request.model)
    fields: dict[str, Any] = {"prompt": host.model.pieces.text(request.tokens)}
    return fields | (_describe_tokens(host, request.tokens) if request.return_token_strs else {})


def _describe_tokens(host: ModelServing, ids: Sequence[int]) -> dict[str, Any]:
    """Return the text of each id, and the positions of special tokens."""
    pieces = host.model.pieces
    return {
        "token_strs": [pieces.bytes[id_].decode("utf-8", "replace") for id_ in ids],
        "special": [offset for offset, id_ in enumerate(ids) if id_ in pieces.special],
    }


@_answers(chat_request.read_to_render)
def render_chat(host: ModelServing, request: ChatRequest) -> dict[str, Any]:
    return _render(host, request.model, chat_request.prompt(request))


@_answers(completion_bodies.read)
def render_completions(host: ModelServing, request: CompletionRequest) -> list[dict[str, Any]]:
    return [_render(host, request.model, prompt) for prompt in completion_bodies.prompts(request)]


def _render(host: ModelServing, model: str | None, prompt: Prompt) -> dict[str, Any]:
    text, ids = host.model.planner.render(model, prompt)
    return {"prompt": text, "prompt_token_ids": ids if host.card.has_tokenizer else None}


@_answers(chat_request.read_to_render)
def count_chat(host: ModelServing, request: ChatRequest) -> dict[str, Any]:
    require_tokenizer(host.card, "this route")
    _, ids = host.model.planner.render(request.model, chat_request.prompt(request))
    return {"object": "chat.completion.input_tokens", "input_tokens": len(ids)}


@_answers(inspection.read_calls)
def function_call(host: ModelServing, request: ParseCallsRequest) -> Any:
    return inspection.calls_reply(inspection.parse_calls(request, host.model.detected_dialect.dialect))


@_answers(inspection.read_calls)
def function_call_sglang(host: ModelServing, request: ParseCallsRequest) -> Any:
    return inspection.calls_reply_sglang(inspection.parse_calls(request, host.model.detected_dialect.dialect))


@_answers(inspection.read_reasoning)
def reasoning(host: ModelServing, request: ParseReasoningRequest) -> Any:
    return inspection.reasoning_reply(
        inspection.parse_reasoning(request, host.model.detected_dialect.dialect)
    )


@_answers(inspection.read_reasoning)
def reasoning_sglang(host: ModelServing, request: ParseReasoningRequest) -> Any:
    return inspection.reasoning_reply_sglang(
        inspection.parse_reasoning(request, host.model.detected_dialect.dialect)
    )


# Parse an answer with the model's dialect, another one, or the one detected from a chat template.


TEMPLATE_S = 20.0
MOST_LOOKED = 256 * 1024 * 1024
"""Maximum output of the process that inspects a template, in bytes."""
PATIENCE_S = 5.0
"""Seconds to wait while another template is inspected."""


async def list_dialects(host: AppState, exchange: Exchange) -> None:
    known = registry.list_dialects().values()
    rows = [describe_dialect(dialect, examples=True) for dialect in known]
    served = host.pool.default.loaded
    own = (
        {"name": served.model.detected_dialect.name, "how": served.model.detected_dialect.how}
        if served
        else None
    )
    await exchange.json({"object": "list", "model": own, "data": rows})


async def parse_answer(shared: AppState, exchange: Exchange) -> None:
    request, _ = await exchange.read(
        lambda body: inspection.read_answer(body, shared.limits, exchange.ignored)
    )
    if request.template is not None:
        reply = await _look_with_template(shared, exchange, inspection.looked_at(request))
    else:
        # A dialect given by name needs no model, which might have to be loaded.
        host = None if request.dialect is not None else await shared.acquire_model(request.model, exchange)
        if host is not None:
            host.model.planner.resolve_adapter(request.model)
        look_at = _look_at_text if host is None or request.token_ids is None else _look_at_ids
        # Always in a thread: even a short text takes time in chunks of one character.
        reply = await exchange.offload(OFFLOAD_BYTES + 1, lambda: encode_json(look_at(host, request)))
    await exchange.reply(reply, b"application/json")


async def _look_with_template(host: AppState, exchange: Exchange, looked: InspectionRequest) -> bytes:
    """Inspect a template in its own process: a template is a program, and this one is not trusted."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await host.looking_at_template.acquire()
    except TimeoutError:
        raise Overloaded("Other templates are being inspected; retry soon.") from None
    try:
        asking = run_once(
            msgspec.json.encode(looked), TEMPLATE_S, MOST_LOOKED, "-m", answer_inspection.__name__
        )
        with suppress(OSError):
            if data := await cancel_on_disconnect(exchange, asking):
                return data
    finally:
        host.looking_at_template.release()
    message = "Inspecting the template takes too much time or memory; send a simpler one."
    raise BadRequest(message, param="template", code="limit_exceeded")


def _look_at_text(host: ModelServing | None, request: ParseAnswerRequest) -> dict[str, Any]:
    dialect = _find_named(request) if host is None else host.model.detected_dialect
    return answer_inspection.inspect_answer(inspection.looked_at(request), dialect)


def _find_named(request: ParseAnswerRequest) -> FoundDialect:
    dialect = inspection.find_parser(request.dialect, "dialect", registry.get_dialect("plain"))
    return FoundDialect(dialect, "named in the request")


def _look_at_ids(host: ModelServing | None, request: ParseAnswerRequest) -> dict[str, Any]:
    """Parse ids as the model's own answers: special tokens by id, with offsets in tokens."""
    assert host is not None
    require_tokenizer(host.card, "this route")
    model, ids, prompt = host.model, request.token_ids or [], request.prompt_token_ids or []
    inspection.check_known(ids, len(model.pieces), "token_ids")
    inspection.check_known(prompt, len(model.pieces), "prompt_token_ids")
    reading = ParseOptions(tools=inspection.tools_of(request))
    dialect, tokenizer = model.detected_dialect.dialect, host.engine.tokenizer
    inside = request.starts_in_reasoning
    if inside is None:
        inside = ids_opened_reasoning(dialect, prompt, tokenizer)
    reader = ChoiceReader(
        0,
        Detokenizer(model.language.pieces(reading), skip_special=True),
        None,
        model.language.readers(reading)(inside, prompt),
        hidden_ids=tokenizer.end_ids,
    )
    items, parts = _read_ids(reader, ids, tokenizer.end_ids)
    told_of = answer_inspection.tell_reading(model.detected_dialect, items, parts, inside=inside)
    return {**told_of, "text": model.pieces.text(ids), **_describe_tokens(host, ids)}


def _read_ids(
    reader: ChoiceReader, ids: Sequence[int], end_ids: frozenset[int]
) -> tuple[TimedEvents, list[AnswerPart]]:
    items: TimedEvents = []
    finder, begin = AnswerPartBuilder(), 0
    for offset, id_ in enumerate(ids, 1):
        events: list[Event] = []
        ends: FinishReason = "stop" if id_ in end_ids else "length"
        reader.read(Step([id_], finish=ends if offset == len(ids) else None), events)
        items += [(offset, event) for event in events]
    for _, event in items[:-1]:
        end = begin + len(event.ids)
        finder.add(event, None if event.part_chars is None else begin, end)
        begin = end
    # The last events closed the last part; the last id may be the end of the turn.
    end = len(ids) - (1 if ids and ids[-1] in end_ids else 0)
    ending = [AnswerPart("end", end, len(ids))] if end < len(ids) else []
    return items, finder.done(end) + ending
