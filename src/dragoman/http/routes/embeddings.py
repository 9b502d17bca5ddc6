"""Routes of embeddings, rerank and score."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

from msgspec.structs import replace

from dragoman.api import embeddings as bodies
from dragoman.api.embeddings import EmbeddingRequest, Pair, RerankRequest, ScoreRequest
from dragoman.api.reply import new_head
from dragoman.api.request_decoder import IgnoredFields
from dragoman.engines.contract import raise_on_fault, wrong_scores, wrong_vectors
from dragoman.engines.lifecycle import call_engine
from dragoman.engines.protocol import (
    EmbeddingEngine,
    OwnerAwareEngine,
    ScoringEngine,
    require_tokenizer,
    weights_of,
)
from dragoman.errors import BadRequest, ContextOverflow, EngineFailed
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.limits import Limits
from dragoman.tracing import current
from dragoman.turns.spans import trace_vectors
from dragoman.types import Prompt, TextPrompt

PIECE_TOKENS = 1024
"""Maximum tokens of the texts in one call of the engine."""

FLOAT_BYTES = 16
"""Approximate size of a number as JSON, in bytes."""
LONGEST_TOKEN = 16
"""Average characters per token, as an upper bound: of texts to truncate, only this many per token are
encoded."""


async def embed(shared: AppState, exchange: Exchange) -> None:
    (request, items), size = await exchange.read(
        partial(_read_embed, limits=shared.limits, ignored=exchange.ignored)
    )
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange)
    vectors, tokens = await embed_all(host, exchange, request.model, items, request.dimensions, size)
    model, size = host.model.planner.name(request.model), FLOAT_BYTES * len(vectors) * len(vectors[0])
    make = partial(bodies.reply, request, model, vectors, tokens, weights_of(host.engine))
    await exchange.json(await exchange.offload(size, make), size=size)


async def embed_all(
    host: ModelServing,
    exchange: Exchange,
    model: str | None,
    items: Sequence[Prompt],
    dimensions: int | None,
    body_bytes: int,
    *,
    cuts: bool = False,
) -> tuple[list[list[float]], int]:
    """Return the vectors of the prompts, and their number of tokens; `cuts` truncates long prompts."""
    _check_model(host, model)
    if not isinstance(host.engine, EmbeddingEngine):
        raise BadRequest(
            "This model does not support embeddings; choose another.", param="model", code="unsupported_model"
        )
    if host.card.dimensions is not None:
        bodies.check_dimensions(dimensions, host.card.dimensions)
    prompts = await exchange.offload(body_bytes, partial(_encode, host, items, cuts=cuts))
    vectors = await _vectors(host, exchange, prompts)
    host.card.dimensions = len(vectors[0])
    bodies.check_dimensions(dimensions, host.card.dimensions)
    tokens = sum(map(len, prompts))
    exchange.log_fields.update(model=host.model.planner.name(model), prompt_tokens=tokens)
    return vectors, tokens


def _read_embed(body: bytes, limits: Limits, ignored: IgnoredFields) -> tuple[EmbeddingRequest, list[Prompt]]:
    request = bodies.read_embedding(body, limits, ignored)
    return request, bodies.prompts(request)


async def rerank(shared: AppState, exchange: Exchange) -> None:
    (request, pairs), size = await exchange.read(
        partial(_read_rerank, limits=shared.limits, ignored=exchange.ignored)
    )
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange)
    scores, tokens = await _scores(host, exchange, pairs, request.model, size)
    head = new_head("rerank-", host.model.planner.name(request.model), host.fingerprint)
    await exchange.json(
        bodies.describe_ranking(request, head, scores, tokens, weights_of(host.engine)), size=size
    )


def _read_rerank(body: bytes, limits: Limits, ignored: IgnoredFields) -> tuple[RerankRequest, list[Pair]]:
    request = bodies.read_rerank(body, ignored)
    return request, bodies.pairs(request, limits)


async def score(shared: AppState, exchange: Exchange) -> None:
    (request, pairs), size = await exchange.read(
        partial(_read_score, limits=shared.limits, ignored=exchange.ignored)
    )
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange)
    scores, tokens = await _scores(host, exchange, pairs, request.model, size)
    head = new_head("score-", host.model.planner.name(request.model), host.fingerprint)
    await exchange.json(bodies.describe_scores(head, scores, tokens, weights_of(host.engine)))


def _read_score(body: bytes, limits: Limits, ignored: IgnoredFields) -> tuple[ScoreRequest, list[Pair]]:
    request = bodies.read_score(body, ignored)
    return request, bodies.pairs(request, limits)


async def _scores(
    host: ModelServing, exchange: Exchange, pairs: Sequence[Pair], model: str | None, body_bytes: int
) -> tuple[list[float], int]:
    """Return a score for each pair, and the number of tokens computed."""
    _check_model(host, model)
    if isinstance(host.engine, ScoringEngine):
        scores, tokens = await _read_together(host, exchange, pairs, body_bytes)
    elif isinstance(host.engine, EmbeddingEngine):
        scores, tokens = await _compare(host, exchange, pairs, body_bytes)
    else:
        message = "This model supports neither scores nor embeddings; choose another."
        raise BadRequest(message, param="model", code="unsupported_model")
    if not all(map(math.isfinite, scores)):
        raise EngineFailed("The engine returned a score that is not a finite number.")
    exchange.log_fields.update(model=host.model.planner.name(model), prompt_tokens=tokens)
    return scores, tokens


async def _read_together(
    host: ModelServing, exchange: Exchange, pairs: Sequence[Pair], body_bytes: int
) -> tuple[list[float], int]:
    """Score with a cross-encoder, which reads both texts of a pair and adds its own special tokens."""
    ids = await _ids(host, exchange, pairs, body_bytes, add_special_tokens=False)
    both = [(ids[one.text], ids[other.text]) for one, other in pairs]
    for (one, other), (_, placed) in zip(both, pairs, strict=True):
        _check_length(host, len(one) + len(other), placed.param)
    scores = await _compute(host, exchange, "score", both, lambda pair: len(pair[0]) + len(pair[1]))
    return scores, sum(len(one) + len(other) for one, other in both)


async def _compare(
    host: ModelServing, exchange: Exchange, pairs: Sequence[Pair], body_bytes: int
) -> tuple[list[float], int]:
    """Score by the cosine similarity of embeddings."""
    ids = await _ids(host, exchange, pairs, body_bytes, add_special_tokens=True)
    embeddings = await _vectors(host, exchange, list(ids.values()))
    vectors = dict(zip(ids, embeddings, strict=True))
    size = FLOAT_BYTES * len(pairs) * len(embeddings[0])
    scores = await exchange.offload(size, partial(_cosines, vectors, pairs))
    return scores, sum(map(len, ids.values()))


def _cosines(vectors: Mapping[str, Sequence[float]], pairs: Sequence[Pair]) -> list[float]:
    return [sum(map(mul, vectors[one.text], vectors[other.text])) for one, other in pairs]


async def _vectors(
    host: ModelServing, exchange: Exchange, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    return await _compute(host, exchange, "embed", prompts, len)


async def _compute(
    host: ModelServing, exchange: Exchange, method: str, items: Sequence[Any], size: Callable[[Any], int]
) -> list[Any]:
    """Return the engine's results for all inputs, unless the client disconnects. Each batch waits for its
    turn."""
    for_owner = method == "embed" and isinstance(host.engine, OwnerAwareEngine)
    call = ("embed_for", exchange.owner) if for_owner else (method,)
    wrong = wrong_scores if method == "score" else wrong_vectors
    host.charge(exchange.owner, sum(map(size, items)))

    async def computed() -> list[Any]:
        result: list[Any] = []
        for piece in _pieces(items, size):
            batch = await host.run_on_engine(exchange.owner, partial(call_engine, host.engine, *call, piece))
            raise_on_fault(host.engine, wrong(batch, len(piece)))
            result += batch
        return result

    computing = computed()
    if (trace := current.get()) is not None:
        operation = "rerank" if method == "score" else "embeddings"
        computing = trace_vectors(trace, operation, host.card.name, sum(map(size, items)), computing)
    return await cancel_on_disconnect(exchange, computing)


def _pieces(items: Sequence[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Yield batches, small enough that other requests need not wait long, and large enough to compute
    efficiently."""
    piece: list[Any] = []
    tokens = 0
    for one in items:
        if piece and tokens + size(one) > PIECE_TOKENS:
            yield piece
            piece, tokens = [], 0
        piece.append(one)
        tokens += size(one)
    yield piece


async def _ids(
    host: ModelServing,
    exchange: Exchange,
    pairs: Sequence[Pair],
    body_bytes: int,
    *,
    add_special_tokens: bool,
) -> dict[str, tuple[int, ...]]:
    """Encode every text once."""
    positions: dict[str, str] = {}
    for pair in pairs:
        for side in pair:
            positions.setdefault(side.text, side.param)
    texts = [TextPrompt(text, None, add_special_tokens, param_path) for text, param_path in positions.items()]
    return dict(zip(positions, await _encode_all(host, exchange, texts, body_bytes), strict=True))


async def _encode_all(
    host: ModelServing, exchange: Exchange, prompts: Sequence[Prompt], body_bytes: int
) -> list[tuple[int, ...]]:
    return await exchange.offload(body_bytes, partial(_encode, host, prompts))


def _encode(host: ModelServing, prompts: Sequence[Prompt], *, cuts: bool = False) -> list[tuple[int, ...]]:
    items = []
    most = host.model.prompter.most_tokens
    for prompt in prompts:
        if cuts and isinstance(prompt, TextPrompt):
            cut = replace(prompt, text=prompt.text[: most * LONGEST_TOKEN])
            items.append(host.model.prompter.encode(cut)[:most])
            continue
        items.append(host.model.prompter.encode(prompt, most))
        _check_length(host, len(items[-1]), prompt.param)
    return items


def _check_length(host: ModelServing, tokens: int, param_path: str) -> None:
    most = host.model.prompter.most_tokens
    if tokens > most:
        raise ContextOverflow.of(tokens, most, param_path)


def _check_model(host: ModelServing, name: str | None) -> None:
    require_tokenizer(host.card, "this route")
    if host.model.planner.resolve_adapter(name) is not None:
        message = "Adapters do not support embeddings; use the base model."
        raise BadRequest(message, param="model", code="invalid_value")
