"""The routes that look without generating: models, tokens, prompts, and what an answer reads as."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from dragoman.api import completions as completion_bodies
from dragoman.api import inspection
from dragoman.api.chat import request as chat_request
from dragoman.api.messages.reply import HEADER, describe_model, list_page
from dragoman.api.read import Ignored
from dragoman.engines.protocol import check_has_ids
from dragoman.errors import ModelNotFound
from dragoman.http.exchange import Exchange, QueryString
from dragoman.http.host import Host
from dragoman.types import Answer, Prompt


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
    names = None
    if request.return_token_strs:
        names = [host.model.pieces.bytes[id_].decode("utf-8", "replace") for id_ in ids]
    return inspection.describe_tokens(ids, host.card.max_model_len, names)


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
    return {"prompt": host.model.pieces.text(request.tokens)}


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
