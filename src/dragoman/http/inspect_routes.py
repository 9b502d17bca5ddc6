"""The routes that look without generating: models, tokens, prompts."""

from typing import Any

from dragoman.api import chat_request, completions_request, tokens
from dragoman.errors import ModelNotFound
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host


async def list_models(host: Host, exchange: Exchange) -> None:
    names = [*host.planner.names, *host.card.adapters]
    await exchange.json({"object": "list", "data": [_model(host, name) for name in names]})


async def get_model(host: Host, exchange: Exchange) -> None:
    name = exchange.path_params["model"]
    try:
        host.planner.adapter(name)
    except ModelNotFound:
        raise ModelNotFound(f"The model '{name}' does not exist here.", param="model") from None
    await exchange.json(_model(host, name))


def _model(host: Host, name: str) -> dict[str, Any]:
    adapters = list(host.card.adapters)
    # The number by which `lora` may name it, as in llama-server.
    number = {"lora_id": adapters.index(name)} if name in adapters else {}
    return {
        "id": name,
        "object": "model",
        "created": host.card.created,
        "owned_by": "dragoman",
        "root": host.card.name,
        "parent": host.card.name if name in adapters else None,
        **number,
        "max_model_len": host.card.max_model_len,
        "dialect": host.found.dialect.name,
    }


async def tokenize(host: Host, exchange: Exchange) -> None:
    body = await exchange.body()
    request = tokens.read_tokenize(body, host.limits)
    host.planner.adapter(request.model)
    ids = await host.prepare(len(body), host.prompter.encode, tokens.prompt(request))
    names = None
    if request.return_token_strs:
        names = [host.pieces.bytes[id_].decode("utf-8", "replace") for id_ in ids]
    await exchange.json(tokens.tokenized(ids, host.card.max_model_len, names))


async def detokenize(host: Host, exchange: Exchange) -> None:
    body = await exchange.body()
    request = tokens.read_detokenize(body, len(host.pieces))
    host.planner.adapter(request.model)
    await exchange.json({"prompt": await host.prepare(len(body), host.pieces.text, request.tokens)})


async def render_chat(host: Host, exchange: Exchange) -> None:
    body = await exchange.body()
    request = chat_request.read_to_render(body, host.limits)
    host.planner.adapter(request.model)
    text, ids = await host.prepare(len(body), host.prompter.render, chat_request.prompt(request))
    await exchange.json({"prompt": text, "prompt_token_ids": ids})


async def render_completions(host: Host, exchange: Exchange) -> None:
    body = await exchange.body()
    request = completions_request.read(body, host.limits)
    host.planner.adapter(request.model)
    prompts = completions_request.prompts(request)
    rendered = [await host.prepare(len(body), host.prompter.render, prompt) for prompt in prompts]
    await exchange.json([{"prompt": text, "prompt_token_ids": ids} for text, ids in rendered])


async def count_chat(host: Host, exchange: Exchange) -> None:
    body = await exchange.body()
    request = chat_request.read_to_render(body, host.limits)
    host.planner.adapter(request.model)
    ids = await host.prepare(len(body), host.prompter.encode, chat_request.prompt(request))
    await exchange.json({"object": "chat.completion.input_tokens", "input_tokens": len(ids)})
