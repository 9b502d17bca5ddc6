"""Routes of Ollama's API: answers as lines, embeddings, and models."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dragoman.api import ollama as bodies
from dragoman.api.model_changes import read_copy, read_keep_alive, tell_pull
from dragoman.api.ollama import (
    LATEST,
    LineWriter,
    OllamaChat,
    OllamaModel,
    OllamaPrompt,
    OllamaSpelling,
    Timing,
)
from dragoman.api.read import Ignored
from dragoman.api.reply import Speller, about_bytes
from dragoman.api.vectors import shorten_vector
from dragoman.engines.protocol import EmbeddingEngine
from dragoman.errors import BadRequest, Forbidden, ModelFileError, ModelNotFound
from dragoman.http import run_turn
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host, ModelHost
from dragoman.http.routes import models
from dragoman.http.routes.vectors import FLOAT_BYTES, embed_all
from dragoman.limits import Limits
from dragoman.models import PooledModel
from dragoman.responses.making import weigh_counting
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn
from dragoman.types import IdsPrompt, TextPrompt

FOREVER = "0001-01-01T00:00:00Z"
"""The expiry of a model that stays loaded."""


# Answers.


async def chat(host: Host, exchange: Exchange) -> None:
    await _answer(host, exchange, bodies.read_chat)


async def generate(host: Host, exchange: Exchange) -> None:
    await _answer(host, exchange, bodies.read_prompt)


async def _answer(
    shared: Host, exchange: Exchange, read: Callable[[bytes, Limits, Ignored], OllamaChat]
) -> None:
    began = asyncio.get_running_loop().time()
    request, size = await exchange.read(lambda body: read(body, shared.limits, exchange.ignored))
    exchange.visit.within(request.timeout)
    request = replace(request, model=known_name(shared, request.model))
    if _keep(shared, exchange, request.model, request.keep_alive) == 0 and bodies.asks_nothing(request):
        told = request.model or shared.pool.default.name
        await _reply(exchange, bodies.loaded(request, told), streams=bodies.streams(request))
        return
    host = await shared.serving(request.model, exchange)
    host.model.planner.adapter(request.model)
    told = request.model or host.card.name
    if bodies.asks_nothing(request):
        await _reply(exchange, bodies.loaded(request, told), streams=bodies.streams(request))
        return
    turn = await run_turn.plan(host, exchange, await _spec(host, exchange, request, size), size)
    exchange.facts["model"] = host.model.planner.name(request.model)
    await _OllamaAnswer(host, exchange, request, turn, told, began).send()


async def _spec(host: ModelHost, exchange: Exchange, request: OllamaChat, size: int) -> TurnSpec:
    spec = await exchange.aside(size, partial(bodies.spec, request))
    if not isinstance(request, OllamaPrompt) or not request.context:
        return spec
    new = await exchange.aside(weigh_counting(host.model, size), partial(_continue, host, request))
    return replace(spec, prompts=(IdsPrompt((*request.context, *new), "context"),))


def _continue(host: ModelHost, request: OllamaPrompt) -> tuple[int, ...]:
    """Return the ids of the new prompt, without the token that begins a text."""
    asked = bodies.conversation(request)
    if asked.media:
        message = "Images cannot be combined with 'context', which has only ids; leave out one of them."
        raise BadRequest(message, param="images", code="unsupported_content")
    ids = host.model.planner.render(request.model, asked)[1]
    return ids[1:] if ids[0] == host.engine.tokenizer.bos_id else ids


class _OllamaAnswer(Struct, frozen=True):
    host: ModelHost
    exchange: Exchange
    request: OllamaChat
    turn: Turn
    told: str
    """The model name that the client used."""
    began: float

    async def send(self) -> None:
        request, exchange, host = self.request, self.exchange, self.host
        spelling = OllamaSpelling(
            Speller(host.model.pieces),
            chats=not isinstance(request, OllamaPrompt),
            logprobs=bool(request.logprobs),
            reasoning=request.shows_reasoning,
        )
        if bodies.streams(request):
            writer = LineWriter(self.told, spelling, self._ends, plain=not request.logprobs)
            pump, keep_alive = host.pump, host.settings.keep_alive
            begin = partial(run_turn.stream, exchange, self.turn, lambda: (writer, bytes), pump, keep_alive)
            await begin(media=bodies.MEDIA)
            return
        [answer] = await run_turn.whole(exchange, self.turn)
        size = about_bytes([answer], len(self.turn.jobs[0].prompt))
        make = partial(bodies.whole, self.told, spelling, answer, self._ends())
        await exchange.json(await exchange.aside(size, make), size=size)

    def _ends(self) -> dict[str, Any]:
        """Return the fields that are known only at the end."""
        turn, now = self.turn, asyncio.get_running_loop().time()
        first = turn.first_token_at or now
        timing = Timing(now - self.began, first - turn.started_at, now - first)
        return {**self._context(), **timing.fields(turn.usage)}

    def _context(self) -> dict[str, Any]:
        """Return all ids so far, for a client that continues from them."""
        request, turn = self.request, self.turn
        if not isinstance(request, OllamaPrompt) or bodies.is_raw(request) or not self.host.card.samples_ids:
            return {}
        if request.images:
            # Ids alone do not include the images.
            return {}
        sampled = turn.traced[0].ids if turn.traced else ()
        return {"context": (*turn.jobs[0].prompt, *sampled)}


async def _reply(exchange: Exchange, payload: dict[str, Any], *, streams: bool) -> None:
    if streams:
        await exchange.reply(bodies.line(payload), bodies.MEDIA)
    else:
        await exchange.json(payload)


# Embeddings.


async def embed(host: Host, exchange: Exchange) -> None:
    await _embed(host, exchange, lambda vectors, reply: reply)


async def embeddings(host: Host, exchange: Exchange) -> None:
    """Handle the older route: one text, one vector."""
    await _embed(host, exchange, lambda vectors, reply: {"embedding": vectors[0] if vectors else []})


async def _embed(
    shared: Host, exchange: Exchange, shape: Callable[[list[list[float]], dict[str, Any]], dict[str, Any]]
) -> None:
    began = asyncio.get_running_loop().time()
    request, size = await exchange.read(
        partial(bodies.read_texts, limits=shared.limits, ignored=exchange.ignored)
    )
    model, texts = known_name(shared, request.model), bodies.texts(request)
    _keep(shared, exchange, model, request.keep_alive)
    host = await shared.serving(model, exchange)
    host.model.planner.adapter(model)
    given = [TextPrompt(text, param=f"input[{number}]") for number, text in enumerate(texts)]
    vectors: list[list[float]] = []
    tokens = 0
    if given:
        cuts = request.truncate is not False
        vectors, tokens = await embed_all(host, exchange, model, given, request.dimensions, size, cuts=cuts)
    seconds = asyncio.get_running_loop().time() - began

    def make() -> dict[str, Any]:
        cut = [list(shorten_vector(vector, request.dimensions)) for vector in vectors]
        return shape(cut, bodies.vectors_reply(request.model, cut, tokens, seconds))

    told = FLOAT_BYTES * sum(map(len, vectors))
    await exchange.json(await exchange.aside(told, make), size=told)


# Models.


async def show_version(host: Host, exchange: Exchange) -> None:
    await exchange.json({"version": bodies.API_LEVEL})


async def list_models(host: Host, exchange: Exchange) -> None:
    models, may_use = host.pool.models.values(), exchange.key.may_use
    told = [_describe(model, name) for model in models for name in model.names if may_use(name)]
    await exchange.json({"models": told})


async def list_loaded(host: Host, exchange: Exchange) -> None:
    told = []
    for model in host.pool.served:
        until = FOREVER if model.keep_until is None else bodies.stamp(model.keep_until)
        context = model.loaded.card.max_model_len if model.loaded else 0
        more = {"expires_at": until, "size_vram": 0, "context_length": context or 0}
        told += [{**_describe(model, name), **more} for name in model.names if exchange.key.may_use(name)]
    await exchange.json({"models": told})


async def show(shared: Host, exchange: Exchange) -> None:
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    name = known_name(shared, request.meant)
    host = await shared.serving(name, exchange)
    host.model.planner.adapter(name)
    card = host.card
    family = card.details.get("architecture", "unknown")
    info = {
        "general.architecture": family,
        "general.basename": card.name,
        "general.parameter_count": int(card.details.get("parameters") or 0),
        f"{family}.context_length": card.max_model_len or 0,
        f"{family}.embedding_length": card.dimensions or 0,
    }
    described = _describe(shared.pool.get(name), name or card.name)
    await exchange.json(
        {
            "license": "",
            "modelfile": f"FROM {described['model']}\n",
            "parameters": "\n".join(f"{key} {value}" for key, value in card.sampling.items()),
            "template": host.model.prompter.source or "",
            "details": described["details"],
            "model_info": info,
            "capabilities": _capabilities(host),
            "modified_at": described["modified_at"],
        }
    )


def _capabilities(host: ModelHost) -> list[str]:
    dialect = host.model.found.dialect
    said = {
        "completion": True,
        "tools": dialect.has_calls,
        "thinking": dialect.reasoning is not None or dialect.channels is not None,
        "embedding": isinstance(host.engine, EmbeddingEngine),
        "vision": "image" in host.card.modalities,
        "audio": "audio" in host.card.modalities,
    }
    return [name for name, can in said.items() if can]


async def pull(host: Host, exchange: Exchange) -> None:
    """Reply at once for a model that exists here; download others only for an administrator."""
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    try:
        exchange.check_model(known_name(host, request.meant) or "")
    except ModelNotFound:
        if host.pool.describe is None:
            raise
        models.check_admin(host, exchange)
        await unless_gone(exchange, _pull(host, exchange, request))
        return
    await _reply(exchange, {"status": "success"}, streams=bodies.streams(request))


async def _pull(host: Host, exchange: Exchange, request: OllamaModel) -> None:
    """Download a model; a disconnect of the client stops it, and the next request resumes it."""
    done, gone = (0, 0), False

    def count(*counted: int) -> None:
        nonlocal done
        if gone:
            raise ModelFileError("The client disconnected during the download.")
        done = counted[0], counted[1]

    async def tell() -> None:
        if bodies.streams(request):
            await exchange.start_stream(bodies.line(tell_pull(request.meant, *done)), bodies.MEDIA)

    try:
        await models.tell_meanwhile(models.pull_model(host, request.meant, count), tell)
    finally:
        gone = True
    if bodies.streams(request):
        await exchange.start_stream(bodies.line({"status": "success"}), bodies.MEDIA)
        await exchange.end_stream()
    else:
        await exchange.json({"status": "success"})


async def create(host: Host, exchange: Exchange) -> None:
    models.check_admin(host, exchange)
    await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    message = "Models cannot be created over HTTP; add a table [models.NAME] to the settings file."
    raise Forbidden(message, code="not_allowed")


async def copy(host: Host, exchange: Exchange) -> None:
    """Add an alias for a model, until the server stops."""
    models.check_admin(host, exchange)
    request, _ = await exchange.read(partial(read_copy, ignored=exchange.ignored))
    models.copy_model(host, known_name(host, request.source) or "", request.destination.removesuffix(LATEST))
    await exchange.json({})


async def delete(host: Host, exchange: Exchange) -> None:
    models.check_admin(host, exchange)
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    await models.delete_model(host, known_name(host, request.meant) or "")
    await exchange.json({})


def _keep(host: Host, exchange: Exchange, name: str | None, given: Any) -> float | None:
    """Set how long a model stays loaded, if models are unloaded automatically; -1 if the request does not
    say."""
    if given is None or not host.pool.comes_and_goes:
        return -1
    seconds = read_keep_alive(given)
    host.pool.keep(host.pool.get(name), seconds)
    left = [name for name in exchange.ignored.told.split(", ") if name != "keep_alive"]
    if left:
        exchange.facts["ignored"] = ", ".join(left)
    else:
        exchange.facts.pop("ignored", None)
    return seconds


def known_name(host: Host, given: str | None) -> str | None:
    """Return the model's own name, with or without the tag that Ollama adds to names."""
    if given is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    known = any(given in model.names for model in host.pool.models.values())
    name = given if known else given.removesuffix(LATEST)
    host.pool.check(name)
    return name


def _describe(model: PooledModel, name: str) -> dict[str, Any]:
    status = {"status": model.status}
    if model.loaded is None:
        return bodies.describe_model(name, 0, model.size(), "", {}) | status
    card = model.loaded.card
    size = int(card.details.get("bytes") or 0)
    return bodies.describe_model(name, card.created, size, card.numerics, card.details) | status
