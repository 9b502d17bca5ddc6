"""Routes of Ollama's API: answers as lines, embeddings, and models."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dragoman.api import ollama as bodies
from dragoman.api.embeddings import shorten_vector
from dragoman.api.model_admin import read_copy, read_keep_alive, tell_pull
from dragoman.api.ollama import (
    LATEST,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaLineWriter,
    OllamaModelRequest,
    OllamaSerializer,
    Timing,
)
from dragoman.api.reply import LogprobSerializer, estimate_bytes
from dragoman.api.request_decoder import IgnoredFields
from dragoman.engines.protocol import EmbeddingEngine
from dragoman.errors import BadRequest, Forbidden, ModelFileError, ModelNotFound
from dragoman.http import run_turn
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.routes import models
from dragoman.http.routes.embeddings import FLOAT_BYTES, embed_all
from dragoman.limits import Limits
from dragoman.models import PooledModel
from dragoman.responses.run import counting_cost
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn
from dragoman.types import IdsPrompt, TextPrompt

FOREVER = "0001-01-01T00:00:00Z"
"""The expiry of a model that stays loaded."""


# Answers.


async def chat(host: AppState, exchange: Exchange) -> None:
    await _answer(host, exchange, bodies.read_chat)


async def generate(host: AppState, exchange: Exchange) -> None:
    await _answer(host, exchange, bodies.read_prompt)


async def _answer(
    shared: AppState, exchange: Exchange, read: Callable[[bytes, Limits, IgnoredFields], OllamaChatRequest]
) -> None:
    began = asyncio.get_running_loop().time()
    request, size = await exchange.read(lambda body: read(body, shared.limits, exchange.ignored))
    exchange.active.set_timeout(request.timeout)
    request = replace(request, model=known_name(shared, request.model))
    if _keep(shared, exchange, request.model, request.keep_alive) == 0 and bodies.asks_nothing(request):
        text = request.model or shared.pool.default.name
        await _reply(exchange, bodies.loaded(request, text), streams=bodies.streams(request))
        return
    host = await shared.acquire_model(request.model, exchange)
    host.model.planner.resolve_adapter(request.model)
    text = request.model or host.card.name
    if bodies.asks_nothing(request):
        await _reply(exchange, bodies.loaded(request, text), streams=bodies.streams(request))
        return
    turn = await run_turn.plan_turn(host, exchange, await _spec(host, exchange, request, size), size)
    exchange.log_fields["model"] = host.model.planner.name(request.model)
    await _OllamaReply(host, exchange, request, turn, text, began).send()


async def _spec(host: ModelServing, exchange: Exchange, request: OllamaChatRequest, size: int) -> TurnSpec:
    spec = await exchange.offload(size, partial(bodies.spec, request))
    if not isinstance(request, OllamaGenerateRequest) or not request.context:
        return spec
    new = await exchange.offload(counting_cost(host.model, size), partial(_continue, host, request))
    return replace(spec, prompts=(IdsPrompt((*request.context, *new), "context"),))


def _continue(host: ModelServing, request: OllamaGenerateRequest) -> tuple[int, ...]:
    """Return the ids of the new prompt, without the token that begins a text."""
    asked = bodies.conversation(request)
    if asked.media:
        message = "Images cannot be combined with 'context', which has only ids; leave out one of them."
        raise BadRequest(message, param="images", code="unsupported_content")
    ids = host.model.planner.render(request.model, asked)[1]
    return ids[1:] if ids[0] == host.engine.tokenizer.bos_id else ids


class _OllamaReply(Struct, frozen=True):
    host: ModelServing
    exchange: Exchange
    request: OllamaChatRequest
    turn: Turn
    told: str
    """The model name that the client used."""
    began: float

    async def send(self) -> None:
        request, exchange, host = self.request, self.exchange, self.host
        spelling = OllamaSerializer(
            LogprobSerializer(host.model.pieces),
            chats=not isinstance(request, OllamaGenerateRequest),
            logprobs=bool(request.logprobs),
            reasoning=request.shows_reasoning,
        )
        if bodies.streams(request):
            writer = OllamaLineWriter(self.told, spelling, self._ends, plain=not request.logprobs)
            pump, keep_alive = host.pump, host.settings.keep_alive
            begin = partial(
                run_turn.stream_turn, exchange, self.turn, lambda: (writer, bytes), pump, keep_alive
            )
            await begin(media=bodies.MEDIA)
            return
        [answer] = await run_turn.collect_answers(exchange, self.turn)
        size = estimate_bytes([answer], len(self.turn.jobs[0].prompt))
        make = partial(bodies.whole, self.told, spelling, answer, self._ends())
        await exchange.json(await exchange.offload(size, make), size=size)

    def _ends(self) -> dict[str, Any]:
        """Return the fields that are known only at the end."""
        turn, now = self.turn, asyncio.get_running_loop().time()
        first = turn.first_token_at or now
        timing = Timing(now - self.began, first - turn.started_at, now - first)
        return {**self._context(), **timing.fields(turn.usage)}

    def _context(self) -> dict[str, Any]:
        """Return all ids so far, for a client that continues from them."""
        request, turn = self.request, self.turn
        if (
            not isinstance(request, OllamaGenerateRequest)
            or bodies.is_raw(request)
            or not self.host.card.returns_ids
        ):
            return {}
        if request.images:
            # Ids alone do not include the images.
            return {}
        sampled = turn.records[0].ids if turn.records else ()
        return {"context": (*turn.jobs[0].prompt, *sampled)}


async def _reply(exchange: Exchange, payload: dict[str, Any], *, streams: bool) -> None:
    if streams:
        await exchange.reply(bodies.line(payload), bodies.MEDIA)
    else:
        await exchange.json(payload)


# Embeddings.


async def embed(host: AppState, exchange: Exchange) -> None:
    await _embed(host, exchange, lambda vectors, reply: reply)


async def embeddings(host: AppState, exchange: Exchange) -> None:
    """Handle the older route: one text, one vector."""
    await _embed(host, exchange, lambda vectors, reply: {"embedding": vectors[0] if vectors else []})


async def _embed(
    shared: AppState, exchange: Exchange, shape: Callable[[list[list[float]], dict[str, Any]], dict[str, Any]]
) -> None:
    began = asyncio.get_running_loop().time()
    request, size = await exchange.read(
        partial(bodies.read_texts, limits=shared.limits, ignored=exchange.ignored)
    )
    model, texts = known_name(shared, request.model), bodies.texts(request)
    _keep(shared, exchange, model, request.keep_alive)
    host = await shared.acquire_model(model, exchange)
    host.model.planner.resolve_adapter(model)
    prompts = [TextPrompt(text, param=f"input[{number}]") for number, text in enumerate(texts)]
    vectors: list[list[float]] = []
    tokens = 0
    if prompts:
        cuts = request.truncate is not False
        vectors, tokens = await embed_all(host, exchange, model, prompts, request.dimensions, size, cuts=cuts)
    seconds = asyncio.get_running_loop().time() - began

    def make() -> dict[str, Any]:
        cut = [list(shorten_vector(vector, request.dimensions)) for vector in vectors]
        return shape(cut, bodies.vectors_reply(request.model, cut, tokens, seconds))

    value = FLOAT_BYTES * sum(map(len, vectors))
    await exchange.json(await exchange.offload(value, make), size=value)


# Models.


async def show_version(host: AppState, exchange: Exchange) -> None:
    await exchange.json({"version": bodies.API_LEVEL})


async def list_models(host: AppState, exchange: Exchange) -> None:
    models, may_use = host.pool.models.values(), exchange.key.may_use
    rows = [_describe(model, name) for model in models for name in model.names if may_use(name)]
    await exchange.json({"models": rows})


async def list_loaded(host: AppState, exchange: Exchange) -> None:
    rows = []
    for model in host.pool.served:
        until = FOREVER if model.keep_until is None else bodies.stamp(model.keep_until)
        context = model.loaded.card.max_model_len if model.loaded else 0
        more = {"expires_at": until, "size_vram": 0, "context_length": context or 0}
        rows += [{**_describe(model, name), **more} for name in model.names if exchange.key.may_use(name)]
    await exchange.json({"models": rows})


async def show(shared: AppState, exchange: Exchange) -> None:
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    name = known_name(shared, request.meant)
    host = await shared.acquire_model(name, exchange)
    host.model.planner.resolve_adapter(name)
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
            "parameters": "\n".join(f"{key} {value}" for key, value in card.recommended_sampling.items()),
            "template": host.model.prompter.source or "",
            "details": described["details"],
            "model_info": info,
            "capabilities": _capabilities(host),
            "modified_at": described["modified_at"],
        }
    )


def _capabilities(host: ModelServing) -> list[str]:
    dialect = host.model.detected_dialect.dialect
    fields = {
        "completion": True,
        "tools": dialect.has_calls,
        "thinking": dialect.reasoning is not None or dialect.channels is not None,
        "embedding": isinstance(host.engine, EmbeddingEngine),
        "vision": "image" in host.card.modalities,
        "audio": "audio" in host.card.modalities,
    }
    return [name for name, can in fields.items() if can]


async def pull(host: AppState, exchange: Exchange) -> None:
    """Reply at once for a model that exists here; download others only for an administrator."""
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    try:
        exchange.check_model(known_name(host, request.meant) or "")
    except ModelNotFound:
        if host.pool.describe is None:
            raise
        models.check_admin(host, exchange)
        await cancel_on_disconnect(exchange, _pull(host, exchange, request))
        return
    await _reply(exchange, {"status": "success"}, streams=bodies.streams(request))


async def _pull(host: AppState, exchange: Exchange, request: OllamaModelRequest) -> None:
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


async def create(host: AppState, exchange: Exchange) -> None:
    models.check_admin(host, exchange)
    await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    message = "Models cannot be created over HTTP; add a table [models.NAME] to the settings file."
    raise Forbidden(message, code="not_allowed")


async def copy(host: AppState, exchange: Exchange) -> None:
    """Add an alias for a model, until the server stops."""
    models.check_admin(host, exchange)
    request, _ = await exchange.read(partial(read_copy, ignored=exchange.ignored))
    models.copy_model(host, known_name(host, request.source) or "", request.destination.removesuffix(LATEST))
    await exchange.json({})


async def delete(host: AppState, exchange: Exchange) -> None:
    models.check_admin(host, exchange)
    request, _ = await exchange.read(partial(bodies.read_model, ignored=exchange.ignored))
    await models.delete_model(host, known_name(host, request.meant) or "")
    await exchange.json({})


def _keep(host: AppState, exchange: Exchange, name: str | None, result: Any) -> float | None:
    """Set how long a model stays loaded, if models are unloaded automatically; -1 if the request does not
    say."""
    if result is None or not host.pool.is_dynamic:
        return -1
    seconds = read_keep_alive(result)
    host.pool.set_keep_alive(host.pool.get(name), seconds)
    left = [name for name in exchange.ignored.summary.split(", ") if name != "keep_alive"]
    if left:
        exchange.log_fields["ignored"] = ", ".join(left)
    else:
        exchange.log_fields.pop("ignored", None)
    return seconds


def known_name(host: AppState, text: str | None) -> str | None:
    """Return the model's own name, with or without the tag that Ollama adds to names."""
    if text is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    known = any(text in model.names for model in host.pool.models.values())
    name = text if known else text.removesuffix(LATEST)
    host.pool.check(name)
    return name


def _describe(model: PooledModel, name: str) -> dict[str, Any]:
    status = {"status": model.status}
    if model.loaded is None:
        return bodies.describe_model(name, 0, model.size(), "", {}) | status
    card = model.loaded.card
    size = int(card.details.get("bytes") or 0)
    return bodies.describe_model(name, card.created, size, card.numerics, card.details) | status
