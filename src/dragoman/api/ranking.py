"""Rerank and score: how well texts fit each other. Requests and replies."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.api.fields.shared import Positive, Seconds
from dragoman.api.read import Reader
from dragoman.api.reply import Head
from dragoman.api.weights import weight_field
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count

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


class Placed(Struct, frozen=True):
    """A text, and where in the request it stands."""

    text: str
    place: str


Pair: TypeAlias = tuple[Placed, Placed]

_rerank = Reader.of(RerankRequest)
_score = Reader.of(ScoreRequest)


def read_rerank(body: bytes) -> RerankRequest:
    request: RerankRequest = _rerank.read(body)
    return request


def read_score(body: bytes) -> ScoreRequest:
    request: ScoreRequest = _score.read(body)
    return request


def pairs(request: RerankRequest | ScoreRequest, limits: Limits) -> list[Pair]:
    """What is to be compared: one text with each of several, or each with its counterpart."""
    if isinstance(request, RerankRequest):
        one, others = [Placed(request.query, "query")], _listed(request.texts, "documents")
    else:
        one, others = _side(request, "text_1", "queries"), _side(request, "text_2", "documents")
    _check(one, others, limits)
    return [(one[0] if len(one) == 1 else one[number], other) for number, other in enumerate(others)]


def _side(request: ScoreRequest, *names: str) -> list[Placed]:
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if len(given) != 1:
        first, second = names
        message = f"Send either '{first}' or '{second}'."
        code = "invalid_value" if given else "missing_field"
        raise BadRequest(message, param=first, code=code)
    ((name, texts),) = given.items()
    return [Placed(texts, name)] if isinstance(texts, str) else _listed(texts, name)


def _listed(texts: Sequence[str], name: str) -> list[Placed]:
    if not texts:
        raise BadRequest(f"'{name}' must not be empty.", param=name, code="invalid_value")
    return [Placed(text, f"{name}[{number}]") for number, text in enumerate(texts)]


def _check(one: Sequence[Placed], others: Sequence[Placed], limits: Limits) -> None:
    place = others[0].place.partition("[")[0]
    check_count(len(others), limits.prompts, place, "texts")
    check_count(sum(len(each.text) for each in (*one, *others)), limits.content_chars, place, "characters")
    if len(one) not in (1, len(others)):
        message = f"{len(one)} texts cannot be compared with {len(others)}: send one, or as many."
        raise BadRequest(message, param=one[0].place.partition("[")[0], code="invalid_value")
    for each in (*one, *others):
        if not each.text:
            raise BadRequest(f"'{each.place}' must not be empty.", param=each.place, code="invalid_value")


def ranked(
    request: RerankRequest, head: Head, scores: Sequence[float], tokens: int, version: str | None
) -> dict[str, Any]:
    """The best first; of equals, the one that came first."""
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


def scored(head: Head, scores: Sequence[float], tokens: int, version: str | None) -> dict[str, Any]:
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
