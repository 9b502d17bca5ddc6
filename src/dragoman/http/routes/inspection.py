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
    Detokenize,
    ParseAnswer,
    ParseCalls,
    ParseReasoning,
    TokenizeChat,
    TokenizeText,
)
from dragoman.api.read import Ignored
from dragoman.api.reply import encode_json
from dragoman.dialects import registry
from dragoman.dialects.describe import AnswerPart, PartFinder, Told, describe_dialect
from dragoman.engines.protocol import check_has_ids
from dragoman.errors import BadRequest, Overloaded
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host, ModelHost
from dragoman.http.query_string import QueryString
from dragoman.limits import Limits
from dragoman.media.decode import ask_once
from dragoman.prompt import look
from dragoman.prompt.find import FoundDialect
from dragoman.prompt.look import Looked
from dragoman.responses.making import weigh_counting
from dragoman.turns.queue import MUCH
from dragoman.turns.reading import ChoiceReader, Detokenizer
from dragoman.turns.spec import Reading, ids_opened_reasoning
from dragoman.types import Event, FinishReason, Prompt, Step

Asked = TypeVar("Asked")


def _answers(
    read: Callable[[bytes, Limits, Ignored], Asked],
) -> Callable[[Callable[[ModelHost, Asked], Any]], Callable[[Host, Exchange], Awaitable[None]]]:
    """Create a route that replies with the result of a function of the model and the decoded body."""

    def decorate(work: Callable[[ModelHost, Asked], Any]) -> Callable[[Host, Exchange], Awaitable[None]]:
        async def handle(shared: Host, exchange: Exchange) -> None:
            request, size = await exchange.read(lambda body: read(body, shared.limits, exchange.ignored))
            host = await shared.serving(getattr(request, "model", None), exchange)
            await exchange.answer(weigh_counting(host.model, size), lambda: work(host, request))

        return handle

    return decorate


@_answers(inspection.read_tokenize)
def tokenize(host: ModelHost, request: TokenizeText | TokenizeChat) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    _, ids = host.model.planner.render(request.model, inspection.prompt(request))
    told = _describe_tokens(host, ids) if request.return_token_strs else {}
    return inspection.describe_tokens(ids, host.card.max_model_len) | told


async def check_schema(host: Host, exchange: Exchange) -> None:
    """Check a schema by compiling it to grammars, which may take long: always in a thread."""
    schema, size = await exchange.read(inspection.read_schema)
    look = partial(inspection.look_at_schema, schema, host.limits)
    await exchange.json(await host.workers.run(exchange.owner, size, look, slow=True, looks=True))


async def list_mcp_servers(host: Host, exchange: Exchange) -> None:
    """List the operator's MCP servers by the labels that requests use."""
    servers = [{"id": label, "object": "mcp_server"} for label in host.mcp.configured()]
    await exchange.json({"object": "list", "data": servers})


async def tokenizer_info(shared: Host, exchange: Exchange) -> None:
    """Reply with what a client needs to write prompts itself, in vLLM's format."""
    host = await shared.serving(QueryString(exchange).text("model"), exchange)
    check_has_ids(host.card, "this route")
    tokenizer, prompter = host.engine.tokenizer, host.model.prompter
    told = {
        "tokenizer_class": type(tokenizer).__name__,
        **prompter.special,
        "add_bos_token": tokenizer.add_bos,
        "vocab_size": len(tokenizer.pieces),
        "model_max_length": host.card.max_model_len,
        "chat_template": prompter.source,
    }
    await exchange.json(told)


@_answers(inspection.read_detokenize)
def detokenize(host: ModelHost, request: Detokenize) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    inspection.check_known(request.tokens, len(host.model.pieces), "tokens")
    host.model.planner.adapter(request.model)
    told: dict[str, Any] = {"prompt": host.model.pieces.text(request.tokens)}
    return told | (_describe_tokens(host, request.tokens) if request.return_token_strs else {})


def _describe_tokens(host: ModelHost, ids: Sequence[int]) -> dict[str, Any]:
    """Return the text of each id, and the positions of special tokens."""
    pieces = host.model.pieces
    return {
        "token_strs": [pieces.bytes[id_].decode("utf-8", "replace") for id_ in ids],
        "special": [place for place, id_ in enumerate(ids) if id_ in pieces.special],
    }


@_answers(chat_request.read_to_render)
def render_chat(host: ModelHost, request: ChatRequest) -> dict[str, Any]:
    return _render(host, request.model, chat_request.prompt(request))


@_answers(completion_bodies.read)
def render_completions(host: ModelHost, request: CompletionRequest) -> list[dict[str, Any]]:
    return [_render(host, request.model, prompt) for prompt in completion_bodies.prompts(request)]


def _render(host: ModelHost, model: str | None, prompt: Prompt) -> dict[str, Any]:
    text, ids = host.model.planner.render(model, prompt)
    return {"prompt": text, "prompt_token_ids": ids if host.card.has_ids else None}


@_answers(chat_request.read_to_render)
def count_chat(host: ModelHost, request: ChatRequest) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    _, ids = host.model.planner.render(request.model, chat_request.prompt(request))
    return {"object": "chat.completion.input_tokens", "input_tokens": len(ids)}


@_answers(inspection.read_calls)
def function_call(host: ModelHost, request: ParseCalls) -> Any:
    return inspection.calls_reply(inspection.parse_calls(request, host.model.found.dialect))


@_answers(inspection.read_calls)
def function_call_sglang(host: ModelHost, request: ParseCalls) -> Any:
    return inspection.calls_reply_sglang(inspection.parse_calls(request, host.model.found.dialect))


@_answers(inspection.read_reasoning)
def reasoning(host: ModelHost, request: ParseReasoning) -> Any:
    return inspection.reasoning_reply(inspection.parse_reasoning(request, host.model.found.dialect))


@_answers(inspection.read_reasoning)
def reasoning_sglang(host: ModelHost, request: ParseReasoning) -> Any:
    return inspection.reasoning_reply_sglang(inspection.parse_reasoning(request, host.model.found.dialect))


# Parse an answer with the model's dialect, another one, or the one detected from a chat template.


TEMPLATE_S = 20.0
MOST_LOOKED = 256 * 1024 * 1024
"""Maximum output of the process that inspects a template, in bytes."""
PATIENCE_S = 5.0
"""Seconds to wait while another template is inspected."""


async def list_dialects(host: Host, exchange: Exchange) -> None:
    known = registry.list_dialects().values()
    told = [describe_dialect(dialect, examples=True) for dialect in known]
    served = host.pool.default.loaded
    own = {"name": served.model.found.name, "how": served.model.found.how} if served else None
    await exchange.json({"object": "list", "model": own, "data": told})


async def parse_answer(shared: Host, exchange: Exchange) -> None:
    request, _ = await exchange.read(
        lambda body: inspection.read_answer(body, shared.limits, exchange.ignored)
    )
    if request.template is not None:
        reply = await _look_with_template(shared, exchange, inspection.looked_at(request))
    else:
        # A dialect given by name needs no model, which might have to be loaded.
        host = None if request.dialect is not None else await shared.serving(request.model, exchange)
        if host is not None:
            host.model.planner.adapter(request.model)
        look_at = _look_at_text if host is None or request.token_ids is None else _look_at_ids
        # Always in a thread: even a short text takes time in chunks of one character.
        reply = await exchange.aside(MUCH + 1, lambda: encode_json(look_at(host, request)))
    await exchange.reply(reply, b"application/json")


async def _look_with_template(host: Host, exchange: Exchange, looked: Looked) -> bytes:
    """Inspect a template in its own process: a template is a program, and this one is not trusted."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await host.looking_at_template.acquire()
    except TimeoutError:
        raise Overloaded("Other templates are being inspected; retry soon.") from None
    try:
        asking = ask_once(msgspec.json.encode(looked), TEMPLATE_S, MOST_LOOKED, "-m", look.__name__)
        with suppress(OSError):
            if said := await unless_gone(exchange, asking):
                return said
    finally:
        host.looking_at_template.release()
    message = "Inspecting the template takes too much time or memory; send a simpler one."
    raise BadRequest(message, param="template", code="limit_exceeded")


def _look_at_text(host: ModelHost | None, request: ParseAnswer) -> dict[str, Any]:
    found = _find_named(request) if host is None else host.model.found
    return look.look_at(inspection.looked_at(request), found)


def _find_named(request: ParseAnswer) -> FoundDialect:
    dialect = inspection.find_parser(request.dialect, "dialect", registry.get_dialect("plain"))
    return FoundDialect(dialect, "named in the request")


def _look_at_ids(host: ModelHost | None, request: ParseAnswer) -> dict[str, Any]:
    """Parse ids as the model's own answers: special tokens by id, with offsets in tokens."""
    assert host is not None
    check_has_ids(host.card, "this route")
    model, ids, prompt = host.model, request.token_ids or [], request.prompt_token_ids or []
    inspection.check_known(ids, len(model.pieces), "token_ids")
    inspection.check_known(prompt, len(model.pieces), "prompt_token_ids")
    reading = Reading(tools=inspection.tools_of(request))
    dialect, tokenizer = model.found.dialect, host.engine.tokenizer
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
    told, parts = _read_ids(reader, ids, tokenizer.end_ids)
    told_of = look.tell_reading(model.found, told, parts, inside=inside)
    return {**told_of, "text": model.pieces.text(ids), **_describe_tokens(host, ids)}


def _read_ids(
    reader: ChoiceReader, ids: Sequence[int], end_ids: frozenset[int]
) -> tuple[Told, list[AnswerPart]]:
    told: Told = []
    finder, begin = PartFinder(), 0
    for place, id_ in enumerate(ids, 1):
        events: list[Event] = []
        ends: FinishReason = "stop" if id_ in end_ids else "length"
        reader.read(Step([id_], finish=ends if place == len(ids) else None), events)
        told += [(place, event) for event in events]
    for _, event in told[:-1]:
        end = begin + len(event.ids)
        finder.add(event, None if event.begins is None else begin, end)
        begin = end
    # The last events closed the last part; the last id may be the end of the turn.
    end = len(ids) - (1 if ids and ids[-1] in end_ids else 0)
    ending = [AnswerPart("end", end, len(ids))] if end < len(ids) else []
    return told, finder.done(end) + ending
