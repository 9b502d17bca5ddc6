"""Completions, the raw interface: text or token ids in, a continuation out."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from dragoman.api.compat_fields import COMPLETIONS
from dragoman.api.reply import (
    FIELDS,
    KEEP_ALIVE,
    LogprobSerializer,
    OpenAIErrorSerializer,
    ReplyEnvelope,
    StreamWriter,
    usage,
    weight_field,
)
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import IDLE
from dragoman.api.shared_fields import (
    SharedFields,
    ShortText,
    TokenId,
    check_longest,
    check_shared,
    sampling,
    turn_spec,
)
from dragoman.errors import CHOICE_COUNT, OUTPUT, STOP, TOP_LOGPROBS, BadRequest, UnknownField
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec
from dragoman.types import Answer, Event, IdsPrompt, Prompt, Sampling, TextPrompt, TokenLogprob, Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this API, which clients rely on."""


class CompletionRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    """A string, a list of strings, a list of token ids, or a list of lists of token ids."""
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


READER = RequestDecoder.for_type(CompletionRequest, COMPLETIONS, IDLE)


def read(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> CompletionRequest:
    return check_request(READER.read(body, ignored), limits, ignored)


def check_request(
    request: CompletionRequest, limits: Limits, ignored: IgnoredFields | None = None
) -> CompletionRequest:
    if _is_batch(request.prompt):
        check_count(len(request.prompt), limits.prompts, "prompt", "prompts")
    check_shared(request, ignored)
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
    asked = sampling(request, max_tokens=_most_tokens(request), logprobs=logprobs)
    if request.echo and request.logprobs is not None:
        asked = replace(asked, prompt_logprobs=request.logprobs)
    return turn_spec(request, prompts(request), asked, max(request.n or 1, request.best_of or 1))


def _most_tokens(request: CompletionRequest) -> int:
    """Return the token limit; 0 becomes 1 because an engine reports on a prompt only if it generates. The
    caller drops that token."""
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens or 1


def wants_none(request: CompletionRequest) -> bool:
    """Return whether only the prompt is to be evaluated, such as with `echo` and `logprobs`."""
    return request.max_tokens == 0


def visible_usage(request: CompletionRequest, used: Usage) -> Usage:
    return replace(used, completion_tokens=0) if wants_none(request) else used


def without_text(answer: Answer) -> Answer:
    return Answer(choice=answer.choice, finish="length")


def ranks(request: CompletionRequest) -> bool:
    """Return whether more answers are generated than returned."""
    return (request.best_of or 1) > (request.n or 1)


def prompts(request: CompletionRequest) -> tuple[Prompt, ...]:
    value = request.prompt
    if not _is_batch(value):
        return (_prompt(value, request, "prompt"),)
    return tuple(_prompt(one, request, f"prompt[{number}]") for number, one in enumerate(value))


def _is_batch(value: str | list[Any]) -> bool:
    return isinstance(value, list) and not all(isinstance(item, int) for item in value)


def _prompt(result: Any, request: CompletionRequest, param: str) -> Prompt:
    if isinstance(result, str):
        return TextPrompt(result, request.suffix, request.add_special_tokens is not False)
    if not isinstance(result, list) or not all(type(item) is int for item in result):
        message = f"'{param}' must be a string or a list of token ids."
        raise BadRequest(message, param=param, code="invalid_value")
    if request.suffix is not None:
        raise BadRequest(
            "suffix needs a text prompt; send the prompt as a string.", param="suffix", code="invalid_value"
        )
    if not result:
        raise BadRequest(f"'{param}' must not be an empty list.", param=param, code="invalid_value")
    return IdsPrompt(tuple(result), param)


# The reply, full or streamed.


ERRORS = OpenAIErrorSerializer({**FIELDS, OUTPUT: "response_format", TOP_LOGPROBS: "logprobs"})


class Echo(Struct, frozen=True):
    """A prompt that is repeated in front of its answers."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprob | None] | None = None


class CompletionSerializer:
    object = "text_completion"
    errors = ERRORS

    def __init__(self, speller: LogprobSerializer, choices: int, *, logprobs: bool) -> None:
        self._speller = speller
        self._logprobs = logprobs
        self._offsets = [0] * choices

    def is_empty(self, event: Event) -> bool:
        return False

    def delta(self, event: Event) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and event.logprobs:
            entries = event.logprobs
            ids = [entry.id for entry in entries]
            logprobs = self._speller.completions(entries, ids, self._offsets[event.choice])
        self._offsets[event.choice] += len(event.text)
        return {"text": event.text, "logprobs": logprobs}

    def finish_reason(self, event: Event) -> str | None:
        return event.finish

    def whole(self, answer: Answer, echo: Echo) -> dict[str, Any] | None:
        """Return the log probabilities of a choice, after those of the echoed prompt."""
        if not self._logprobs:
            return None
        entries = [*(echo.logprobs or ()), *answer.logprobs]
        ids = [*(echo.ids if echo.logprobs else ()), *(entry.id for entry in answer.logprobs)]
        return self._speller.completions(entries, ids, 0)


class FinishOnlyWriter:
    """A stream writer for `max_tokens` 0: it writes the ends of answers, and no text."""

    idle = KEEP_ALIVE

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self.end = writer.end

    def write(self, events: Sequence[Event]) -> bytes:
        ends = [event for event in events if event.kind == "finish"]
        return self._writer.write(
            [event if event.error else Event("finish", event.choice, finish="length") for event in ends]
        )


def opening(
    writer: StreamWriter,
    choices: int,
    echoes: Sequence[Echo],
    prompt_ids: Sequence[Sequence[int]] | None,
) -> bytes:
    """Begin each choice with its prompt (`echo`) and with the prompt's ids, if these are returned."""
    chunks = []
    for choice in range(choices):
        if prompt_ids is not None:
            ids = prompt_ids[choice * len(prompt_ids) // choices]
            fields = {"text": "", "logprobs": None, "prompt_token_ids": ids}
            chunks.append(writer.chunk(Event("text", choice), fields))
        if echoes:
            echo = echoes[choice * len(echoes) // choices]
            chunks.append(writer.write([Event("text", choice, echo.text)]))
    return b"".join(chunks)


def whole(
    head: ReplyEnvelope,
    answers: Sequence[Answer],
    counted: Usage,
    spelling: CompletionSerializer,
    prompts: int,
    echoes: Sequence[Echo] = (),
    prompt_ids: Sequence[Sequence[int]] | None = None,
    weight_version: str | None = None,
) -> dict[str, Any]:
    """Build the full reply; `prompt_ids`, one list per prompt, are set if the request wants ids returned."""
    choices = []
    for number, answer in enumerate(answers):
        prompt = number * prompts // len(answers)
        echo = echoes[prompt] if echoes else Echo()
        choice: dict[str, Any] = {
            "index": number,
            "text": echo.text + answer.text,
            "logprobs": spelling.whole(answer, echo),
            "finish_reason": answer.finish,
            "stop_reason": answer.stop,
        }
        if prompt_ids is not None:
            choice["token_ids"] = answer.ids
            choice["prompt_token_ids"] = prompt_ids[prompt]
        choices.append(choice)
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage(counted),
        "system_fingerprint": head.fingerprint,
        **weight_field(weight_version),
    }


# Token ids in and out, for clients that tokenize themselves: vLLM's request and reply.


GENERATE_ERRORS = OpenAIErrorSerializer(
    {
        **{name: f"sampling_params.{name}" for name in Sampling.__struct_fields__},
        OUTPUT: "sampling_params.structured_outputs",
        TOP_LOGPROBS: "sampling_params.logprobs",
        CHOICE_COUNT: "sampling_params.n",
        STOP: "sampling_params.stop",
    }
)


class IdsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    token_ids: list[TokenId]
    sampling_params: dict[str, Any] | None = None
    """Sampling fields of a completion, and fields for what the reply includes."""
    model: Annotated[str, Meta(max_length=512)] | None = None
    request_id: ShortText | None = None
    cache_salt: ShortText | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: Any = None
    features: Any = None
    kv_transfer_params: Any = None


_GENERATE = RequestDecoder.for_type(IdsRequest)
_BESIDE = ("model", "cache_salt", "priority")
_NOT_SAMPLING = frozenset({*_BESIDE, "prompt", "stream", "stream_options", "suffix", "echo", "best_of"})


def read_generate(body: bytes, limits: Limits) -> tuple[CompletionRequest, str | None]:
    """Return the completion request, and the request id that the reply repeats."""
    asked: IdsRequest = _GENERATE.read(body)
    if asked.stream:
        message = "'stream' is not supported here; use /v1/completions, which takes token ids and streams."
        raise BadRequest(message, param="stream", code="unsupported_field")
    if not asked.token_ids:
        raise BadRequest("'token_ids' must not be empty.", param="token_ids", code="invalid_value")
    for name in ("features", "kv_transfer_params"):
        if getattr(asked, name) is not None:
            message = f"'{name}' is not supported by this server; leave it out."
            raise BadRequest(message, param=name, code="unsupported_field")
    params = asked.sampling_params or {}
    if wrong := sorted(params.keys() & _NOT_SAMPLING):
        raise UnknownField(
            f"Unknown field 'sampling_params.{wrong[0]}'.", param=f"sampling_params.{wrong[0]}"
        )
    mapping = {name: getattr(asked, name) for name in _BESIDE}
    fields = {"return_tokens_as_token_ids": True, **params, **mapping, "prompt": asked.token_ids}
    request: CompletionRequest = READER.convert(fields, "sampling_params")
    check_longest(request.max_tokens, "sampling_params.max_tokens")
    return check_request(request, limits), asked.request_id


def generate_spec(request: CompletionRequest) -> TurnSpec:
    ids: list[int] = [*request.prompt]
    return replace(spec(request), prompts=(IdsPrompt(tuple(ids), "token_ids"),), token_ids=True)


def generate_reply(
    id_: str, answers: Sequence[Answer], speller: LogprobSerializer, counted: Usage, *, logprobs: bool
) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "token_ids": answer.ids,
            "logprobs": {"content": speller.chat(answer.logprobs)} if logprobs else None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop,
        }
        for number, answer in enumerate(answers)
    ]
    return {"request_id": id_, "choices": choices, "usage": usage(counted)}


def best(answers: Sequence[Answer], computed: int, wanted: int) -> list[Answer]:
    """Return the `wanted` most likely of every `computed` answers to one prompt, most likely first."""
    chosen: list[Answer] = []
    for start in range(0, len(answers), computed):
        group = sorted(answers[start : start + computed], key=Answer.mean_logprob, reverse=True)
        chosen += group[:wanted]
    return chosen
