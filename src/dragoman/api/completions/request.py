"""Completions: the request. The raw interface: text or ids in, a continuation out."""

from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from dragoman.api.fields.shared import SharedFields, check_shared, sampling, turn_spec
from dragoman.api.read import Reader
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec
from dragoman.types import IdsPrompt, Prompt, TextPrompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this API, which clients count on."""


class CompletionRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    """A string, a list of strings, a list of ids, or a list of lists of ids."""
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


READER = Reader.of(CompletionRequest)


def read(body: bytes, limits: Limits) -> CompletionRequest:
    request: CompletionRequest = READER.read(body)
    if _is_batch(request.prompt):
        check_count(len(request.prompt), limits.prompts, "prompt", "prompts")
    check_shared(request)
    _check_best_of(request)
    if request.stream and request.echo and request.logprobs is not None:
        message = "The log probabilities of an echoed prompt cannot be streamed; leave out echo or logprobs."
        raise BadRequest(message, param="echo", code="invalid_value")
    return request


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is None:
        return
    if request.best_of < (request.n or 1):
        raise BadRequest("best_of must not be smaller than n.", param="best_of", code="invalid_value")
    if request.stream and request.best_of > (request.n or 1):
        message = "best_of cannot be streamed: the best is known only at the end."
        raise BadRequest(message, param="best_of", code="invalid_value")


def spec(request: CompletionRequest) -> TurnSpec:
    logprobs = request.logprobs
    if logprobs is None and ranks(request):
        logprobs = 0
    asked = sampling(request, max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, logprobs=logprobs)
    if request.echo and request.logprobs is not None:
        asked = replace(asked, prompt_logprobs=request.logprobs)
    return turn_spec(request, prompts(request), asked, max(request.n or 1, request.best_of or 1))


def ranks(request: CompletionRequest) -> bool:
    """Whether more is computed than is answered."""
    return (request.best_of or 1) > (request.n or 1)


def prompts(request: CompletionRequest) -> tuple[Prompt, ...]:
    given = request.prompt
    if not _is_batch(given):
        return (_prompt(given, request, "prompt"),)
    return tuple(_prompt(one, request, f"prompt[{number}]") for number, one in enumerate(given))


def _is_batch(given: str | list[Any]) -> bool:
    return isinstance(given, list) and not all(isinstance(item, int) for item in given)


def _prompt(given: Any, request: CompletionRequest, param: str) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given, request.suffix, request.add_special_tokens is not False)
    if not isinstance(given, list) or not all(type(item) is int for item in given):
        message = f"'{param}' must be a string or a list of token ids."
        raise BadRequest(message, param=param, code="invalid_value")
    if request.suffix is not None:
        raise BadRequest("suffix needs a prompt as text.", param="suffix", code="invalid_value")
    if not given:
        raise BadRequest(f"'{param}' must not be an empty list.", param=param, code="invalid_value")
    return IdsPrompt(tuple(given), param)
