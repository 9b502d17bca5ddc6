"""Embeddings: request and reply."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from dragoman.api.error_spelling import OpenAIErrors
from dragoman.api.fields.shared import Seconds
from dragoman.api.read import Reader
from dragoman.api.weights import weight_field
from dragoman.errors import PROMPT, BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import IdsPrompt, Prompt, TextPrompt


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]
    """A string, a list of strings, a list of ids, or a list of lists of ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    timeout: Seconds | None = None
    user: str | None = None


ERRORS = OpenAIErrors({PROMPT: "input"})
READER = Reader.of(EmbeddingRequest)


def read(body: bytes, limits: Limits) -> EmbeddingRequest:
    request: EmbeddingRequest = READER.read(body)
    if isinstance(request.input, list):
        check_count(_count(request.input), limits.prompts, "input", "inputs")
    return request


def _count(given: list[Any]) -> int:
    return 1 if given and all(type(item) is int for item in given) else len(given)


def prompts(request: EmbeddingRequest) -> list[Prompt]:
    given = request.input
    single = isinstance(given, str) or (_count(given) == 1 and not isinstance(given[0], str | list))
    inputs = [given] if single else given
    if not inputs:
        raise BadRequest("'input' must not be empty.", param="input", code="invalid_value")
    return [_prompt(one, number) for number, one in enumerate(inputs)]


def _prompt(given: Any, number: int) -> Prompt:
    if isinstance(given, str) and given:
        return TextPrompt(given, param=f"input[{number}]")
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return IdsPrompt(tuple(given), f"input[{number}]")
    message = f"'input[{number}]' must be a text or a list of token ids, and not empty."
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
    vector = _shortened(vector, request.dimensions)
    if request.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector


def check_dimensions(request: EmbeddingRequest, most: int) -> None:
    """Raises where more are asked for than the model's vectors have."""
    if request.dimensions is not None and request.dimensions > most:
        message = f"This model's embeddings have {most} dimensions, {request.dimensions} were asked for."
        raise BadRequest(message, param="dimensions", code="invalid_value")


def _shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    if dimensions is None:
        return vector
    cut = vector[:dimensions]
    norm = sum(value * value for value in cut) ** 0.5 or 1.0
    return [value / norm for value in cut]
