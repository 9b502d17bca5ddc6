"""The routes that look without generating: models, tokens, prompts, and what an answer reads as."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from dragoman.api import completions as completion_bodies
from dragoman.api import inspection
from dragoman.api.chat import request as chat_request
from dragoman.api.inspection import ParseAnswer
from dragoman.api.messages.reply import HEADER, describe_model, list_page
from dragoman.api.read import Ignored
from dragoman.api.reply import encode_json
from dragoman.dialects import registry
from dragoman.dialects.describe import AnswerPart, PartFinder, Told, describe_dialect
from dragoman.engines.protocol import check_has_ids
from dragoman.errors import BadRequest, ModelNotFound, Overloaded
from dragoman.http.documents import ask_process
from dragoman.http.exchange import Exchange, QueryString, unless_gone
from dragoman.http.host import Host
from dragoman.prompt import look
from dragoman.prompt.find import FoundDialect
from dragoman.prompt.look import Looked
from dragoman.turns.queue import MUCH
from dragoman.turns.reading import ChoiceReader, Detokenizer
from dragoman.turns.spec import Reading, ids_opened_reasoning
from dragoman.types import Answer, Event, FinishReason, Prompt, Step


async def list_models(host: Host, exchange: Exchange) -> None:
    names = [*host.model.planner.names, *host.card.adapters]
    if HEADER in exchange.headers:
        await exchange.json(_page_for_anthropic(host, exchange, names))
        return
    await exchange.json({"object": "list", "data": [_model(host, name) for name in names]})


async def get_model(host: Host, exchange: Exchange) -> None:
    name = exchange.path_params["model"].rstrip("/")
    if not name:
        await list_models(host, exchange)
        return
    try:
        host.model.planner.adapter(name)
    except ModelNotFound:
        raise ModelNotFound(f"The model '{name}' does not exist here.", param="model") from None
    describe = _model_for_anthropic if HEADER in exchange.headers else _model
    await exchange.json(describe(host, host.model.planner.name(name)))


def _page_for_anthropic(host: Host, exchange: Exchange, names: list[str]) -> dict[str, Any]:
    """The list as Anthropic's clients ask for it: in pieces, behind one name or before another."""
    query = QueryString(exchange)
    most = query.integer("limit", 20, 1, 1000)
    after, before = query.text("after_id"), query.text("before_id")
    if after in names:
        names = names[names.index(after) + 1 :]
    if before in names:
        names = names[: names.index(before)]
    told = [_model_for_anthropic(host, name) for name in names[:most]]
    return list_page(told, more=len(names) > most)


def _model_for_anthropic(host: Host, name: str) -> dict[str, Any]:
    return describe_model(name, host.card.created, host.card.max_model_len)


def _model(host: Host, name: str) -> dict[str, Any]:
    adapter = host.model.planner.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": host.card.created,
        "owned_by": "dragoman",
        "root": host.card.name,
        "parent": host.card.name if adapter else None,
        # The number by which `lora` may name it, as in llama-server.
        **({"lora_id": adapter.id} if adapter else {}),
        "max_model_len": host.card.max_model_len,
        "token_ids": _describe_ids(host),
        "dialect": host.model.found.dialect.name,
    }


def _describe_ids(host: Host) -> str:
    """What is known of the ids of answers: those that were sampled, counts by a tokenizer, or nothing."""
    if host.card.samples_ids:
        return "sampled"
    return "counted" if host.card.has_ids else "none"


def _answers(work: Callable[[Host, bytes, Ignored], Any]) -> Callable[[Host, Exchange], Awaitable[None]]:
    """A route whose reply is what `work` makes of the body."""

    async def handle(host: Host, exchange: Exchange) -> None:
        await exchange.answer(lambda body: work(host, body, exchange.ignored))

    return handle


@_answers
def tokenize(host: Host, body: bytes, ignored: Ignored) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    request = inspection.read_tokenize(body, host.limits, ignored)
    _, ids = host.model.planner.render(request.model, inspection.prompt(request))
    told = _describe_tokens(host, ids) if request.return_token_strs else {}
    return inspection.describe_tokens(ids, host.card.max_model_len) | told


async def check_schema(host: Host, exchange: Exchange) -> None:
    """Grammars are made of it, which may take long: always in a thread."""
    schema, size = await exchange.read(inspection.read_schema)
    look = partial(inspection.look_at_schema, schema, host.limits)
    await exchange.json(await host.workers.run(exchange.owner, size, look, slow=True, looks=True))


async def list_mcp_servers(host: Host, exchange: Exchange) -> None:
    """Those of the operator, by the labels with which requests name them."""
    found = [{"id": label, "object": "mcp_server"} for label in host.mcp.configured()]
    await exchange.json({"object": "list", "data": found})


async def tokenizer_info(host: Host, exchange: Exchange) -> None:
    """What a program needs that writes prompts by itself, as vLLM tells it."""
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


@_answers
def detokenize(host: Host, body: bytes, ignored: Ignored) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    request = inspection.read_detokenize(body, len(host.model.pieces), ignored)
    host.model.planner.adapter(request.model)
    told: dict[str, Any] = {"prompt": host.model.pieces.text(request.tokens)}
    return told | (_describe_tokens(host, request.tokens) if request.return_token_strs else {})


def _describe_tokens(host: Host, ids: Sequence[int]) -> dict[str, Any]:
    """What each of them says, and the places of those that are special tokens."""
    pieces = host.model.pieces
    return {
        "token_strs": [pieces.bytes[id_].decode("utf-8", "replace") for id_ in ids],
        "special": [place for place, id_ in enumerate(ids) if id_ in pieces.special],
    }


@_answers
def render_chat(host: Host, body: bytes, ignored: Ignored) -> dict[str, Any]:
    request = chat_request.read_to_render(body, host.limits, ignored)
    return _render(host, request.model, chat_request.prompt(request))


@_answers
def render_completions(host: Host, body: bytes, ignored: Ignored) -> list[dict[str, Any]]:
    request = completion_bodies.read(body, host.limits, ignored)
    return [_render(host, request.model, prompt) for prompt in completion_bodies.prompts(request)]


def _render(host: Host, model: str | None, prompt: Prompt) -> dict[str, Any]:
    text, ids = host.model.planner.render(model, prompt)
    return {"prompt": text, "prompt_token_ids": ids if host.card.has_ids else None}


@_answers
def count_chat(host: Host, body: bytes, ignored: Ignored) -> dict[str, Any]:
    check_has_ids(host.card, "this route")
    request = chat_request.read_to_render(body, host.limits, ignored)
    _, ids = host.model.planner.render(request.model, chat_request.prompt(request))
    return {"object": "chat.completion.input_tokens", "input_tokens": len(ids)}


@_answers
def function_call(host: Host, body: bytes, ignored: Ignored) -> Any:
    return inspection.calls_reply(_calls(host, body, ignored))


@_answers
def function_call_sglang(host: Host, body: bytes, ignored: Ignored) -> Any:
    return inspection.calls_reply_sglang(_calls(host, body, ignored))


@_answers
def reasoning(host: Host, body: bytes, ignored: Ignored) -> Any:
    return inspection.reasoning_reply(_reasoning(host, body, ignored))


@_answers
def reasoning_sglang(host: Host, body: bytes, ignored: Ignored) -> Any:
    return inspection.reasoning_reply_sglang(_reasoning(host, body, ignored))


def _calls(host: Host, body: bytes, ignored: Ignored) -> Answer:
    request = inspection.read_calls(body, host.limits, ignored)
    return inspection.parse_calls(request, host.model.found.dialect)


def _reasoning(host: Host, body: bytes, ignored: Ignored) -> Answer:
    request = inspection.read_reasoning(body, host.limits, ignored)
    return inspection.parse_reasoning(request, host.model.found.dialect)


# An answer read before one's eyes: as the dialect of the model does, as another, or as a template speaks for.


TEMPLATE_S = 20.0
PATIENCE_S = 5.0
"""For the templates of others to be done."""


async def list_dialects(host: Host, exchange: Exchange) -> None:
    known = registry.list_dialects().values()
    told = [describe_dialect(dialect, examples=True) for dialect in known]
    own = {"name": host.model.found.name, "how": host.model.found.how}
    await exchange.json({"object": "list", "model": own, "data": told})


async def parse_answer(host: Host, exchange: Exchange) -> None:
    request, _ = await exchange.read(lambda body: inspection.read_answer(body, host.limits, exchange.ignored))
    host.model.planner.adapter(request.model)
    if request.template is not None:
        made = await _look_with_template(host, exchange, inspection.looked_at(request))
    else:
        look = _look_at_ids if request.token_ids is not None else _look_at_text
        # However short it is: in pieces of a character it takes its time.
        made = await exchange.aside(MUCH + 1, lambda: encode_json(look(host, request)))
    await exchange.reply(made, b"application/json")


async def _look_with_template(host: Host, exchange: Exchange, looked: Looked) -> bytes:
    """In a process of its own: a template is a program, and this one is a stranger's."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await host.looking_at_template.acquire()
    except TimeoutError:
        raise Overloaded("Templates of others are being looked at; try again soon.") from None
    try:
        asking = ask_process(msgspec.json.encode(looked), TEMPLATE_S, "-m", look.__name__)
        with suppress(TimeoutError):
            if said := await unless_gone(exchange, asking):
                return said
    finally:
        host.looking_at_template.release()
    message = "The template takes too long, or too much memory, to be looked at."
    raise BadRequest(message, param="template", code="limit_exceeded")


def _look_at_text(host: Host, request: ParseAnswer) -> dict[str, Any]:
    found = host.model.found
    if request.dialect is not None:
        dialect = inspection.find_parser(request.dialect, "dialect", found.dialect)
        found = FoundDialect(dialect, "named in the request")
    return look.look_at(inspection.looked_at(request), found)


def _look_at_ids(host: Host, request: ParseAnswer) -> dict[str, Any]:
    """As the model's own answers are read: special tokens by their ids, and everything counted in tokens."""
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
    # What is left has closed the last part, and the last of all may have ended the turn.
    end = len(ids) - (1 if ids and ids[-1] in end_ids else 0)
    ending = [AnswerPart("end", end, len(ids))] if end < len(ids) else []
    return told, finder.done(end) + ending
