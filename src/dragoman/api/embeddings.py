"""Embeddings, rerank and score: requests and replies."""

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from dragoman.api.compat_fields import VECTORS
from dragoman.api.reply import OpenAIErrorSerializer, ReplyEnvelope, weight_field
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.shared_fields import Positive, Seconds
from dragoman.errors import PROMPT, BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import IdsPrompt, Prompt, TextPrompt

# Embeddings.


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]
    """A string, a list of strings, a list of token ids, or a list of lists of token ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    timeout: Seconds | None = None
    user: str | None = None


ERRORS = OpenAIErrorSerializer({PROMPT: "input"})
IDLE = ("user",)
READER = RequestDecoder.for_type(EmbeddingRequest, VECTORS, IDLE)


def read_embedding(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> EmbeddingRequest:
    request: EmbeddingRequest = READER.read(body, ignored)
    if isinstance(request.input, list):
        check_count(_count(request.input), limits.prompts, "input", "inputs")
    return request


def _count(items: list[Any]) -> int:
    return 1 if items and all(type(item) is int for item in items) else len(items)


def prompts(request: EmbeddingRequest) -> list[Prompt]:
    value = request.input
    single = isinstance(value, str) or (_count(value) == 1 and not isinstance(value[0], str | list))
    inputs = [value] if single else value
    if not inputs:
        raise BadRequest("'input' must not be empty.", param="input", code="invalid_value")
    return [_prompt(one, number) for number, one in enumerate(inputs)]


def _prompt(result: Any, number: int) -> Prompt:
    if isinstance(result, str) and result:
        return TextPrompt(result, param=f"input[{number}]")
    if isinstance(result, list) and result and all(type(item) is int for item in result):
        return IdsPrompt(tuple(result), f"input[{number}]")
    message = f"'input[{number}]' must be a non-empty string or list of token ids."
    raise BadRequest(message, param=f"input[{number}]", code="invalid_value")


def reply(
    request: EmbeddingRequest,
    model: str,
    vectors: Sequence[Sequence[float]],
    tokens: int,
    weight_version: str | None = None,
) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(vector, request)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        **weight_field(weight_version),
    }


def _vector(vector: Sequence[float], request: EmbeddingRequest) -> Sequence[float] | str:
    vector = shorten_vector(vector, request.dimensions)
    if request.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector


def check_dimensions(asked: int | None, most: int) -> None:
    """Raise if a request wants more dimensions than the model's vectors have."""
    if asked is not None and asked > most:
        message = f"This model's embeddings have {most} dimensions; {asked} is too many."
        raise BadRequest(message, param="dimensions", code="invalid_value")


def shorten_vector(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    if dimensions is None:
        return vector
    cut = vector[:dimensions]
    norm = sum(value * value for value in cut) ** 0.5 or 1.0
    return [value / norm for value in cut]


# Rerank and score.


Texts: TypeAlias = str | list[str]


class Document(Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    timeout: Seconds | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    model: str | None = None
    timeout: Seconds | None = None
    user: str | None = None


class LocatedText(Struct, frozen=True):
    """A text and its field in the request."""

    text: str
    param: str


Pair: TypeAlias = tuple[LocatedText, LocatedText]

_rerank = RequestDecoder.for_type(RerankRequest, VECTORS, IDLE)
_score = RequestDecoder.for_type(ScoreRequest, VECTORS, IDLE)


def read_rerank(body: bytes, ignored: IgnoredFields | None = None) -> RerankRequest:
    request: RerankRequest = _rerank.read(body, ignored)
    return request


def read_score(body: bytes, ignored: IgnoredFields | None = None) -> ScoreRequest:
    request: ScoreRequest = _score.read(body, ignored)
    return request


def pairs(request: RerankRequest | ScoreRequest, limits: Limits) -> list[Pair]:
    """Return the pairs to compare: one text with each of several, or each with its counterpart."""
    if isinstance(request, RerankRequest):
        one, others = [LocatedText(request.query, "query")], _as_list(request.texts, "documents")
    else:
        one, others = _side(request, "text_1", "queries"), _side(request, "text_2", "documents")
    _check(one, others, limits)
    return [(one[0] if len(one) == 1 else one[number], other) for number, other in enumerate(others)]


def _side(request: ScoreRequest, *names: str) -> list[LocatedText]:
    fields = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if len(fields) != 1:
        first, second = names
        message = f"Send either '{first}' or '{second}'."
        code = "invalid_value" if fields else "missing_field"
        raise BadRequest(message, param=first, code=code)
    ((name, texts),) = fields.items()
    return [LocatedText(texts, name)] if isinstance(texts, str) else _as_list(texts, name)


def _as_list(texts: Sequence[str], name: str) -> list[LocatedText]:
    if not texts:
        raise BadRequest(f"'{name}' must not be empty.", param=name, code="invalid_value")
    return [LocatedText(text, f"{name}[{number}]") for number, text in enumerate(texts)]


def _check(one: Sequence[LocatedText], others: Sequence[LocatedText], limits: Limits) -> None:
    param_path = others[0].param.partition("[")[0]
    check_count(len(others), limits.prompts, param_path, "texts")
    check_count(
        sum(len(each.text) for each in (*one, *others)), limits.content_chars, param_path, "characters"
    )
    if len(one) not in (1, len(others)):
        message = f"{len(one)} texts cannot be compared with {len(others)}; send one text, or {len(others)}."
        raise BadRequest(message, param=one[0].param.partition("[")[0], code="invalid_value")
    for each in (*one, *others):
        if not each.text:
            raise BadRequest(f"'{each.param}' must not be empty.", param=each.param, code="invalid_value")


def describe_ranking(
    request: RerankRequest, head: ReplyEnvelope, scores: Sequence[float], tokens: int, version: str | None
) -> dict[str, Any]:
    """Describe a ranking, best first; equal scores keep the order of the request."""
    texts = request.texts
    order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[: request.top_n]
    shown = request.return_documents is not False

    def results() -> Iterator[dict[str, Any]]:
        for index in order:
            document = {"document": {"text": texts[index]}} if shown else {}
            yield {"index": index, "relevance_score": scores[index], **document}

    return {
        "id": head.id,
        "model": head.model,
        "usage": _usage(tokens),
        "results": list(results()),
        **weight_field(version),
    }


def describe_scores(
    head: ReplyEnvelope, scores: Sequence[float], tokens: int, version: str | None
) -> dict[str, Any]:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": data,
        "usage": _usage(tokens),
        **weight_field(version),
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
