"""Servers as an engine: each job is a completions request to one of them; cancelling it disconnects."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.client import ClientError, ClientTimeout, ConnectionFailed, StatusError, StreamError
from dragoman.client.request import Request, completions
from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer
from dragoman.engines.protocol import FallbackTokenizer, ModelCard, Tokenizer, placeholder_id
from dragoman.engines.remote.chat import chat_request
from dragoman.engines.remote.connection import UpstreamCall
from dragoman.engines.remote.stream_reader import StreamStepReader
from dragoman.engines.remote.upstreams import (
    BadUpstream,
    RemoteOptions,
    Upstream,
    UpstreamPool,
    UpstreamTraits,
)
from dragoman.engines.steps import iterate, seed_of, single
from dragoman.errors import (
    BadRequest,
    ContextOverflow,
    DragomanError,
    EngineFailed,
    Overloaded,
    ParamKey,
    Unavailable,
)
from dragoman.media import Media
from dragoman.routing import key_of_ids
from dragoman.types import (
    LARK_LINE,
    ConstraintSource,
    FinishReason,
    Job,
    Sampling,
    Sink,
    Step,
    TextStep,
)

# The tokenizer of the upstreams' model, from files on this machine.


class GgufTokenizer(LlamaTokenizer):
    """The vocabulary of a GGUF file, and its templates. The weights in it are mapped, and never read."""

    def __init__(self, path: Path) -> None:
        model = LlamaModel(path)
        super().__init__(model)
        self.templates = model.templates
        self.special_tokens = self.texts(model.named_ids)
        self.longest = model.trained_context


def tokenizer_of(name: str) -> Tokenizer:
    """Open a GGUF file, or what HfTokenizer takes: a folder with tokenizer.json, or a name."""
    path = Path(name).expanduser()
    return (
        GgufTokenizer(path) if path.suffix == ".gguf" else HfTokenizer(str(path) if path.exists() else name)
    )


# Errors of an upstream, as reported to our clients.


_CLIENTS_FAULT = frozenset({400, 413, 415, 422})
_CLIENTS_KINDS = frozenset({BadRequest.type, "BadRequestError"})
"""Error types of OpenAI and vLLM inside of a stream, where there is no status."""
_BUSY = frozenset({502, 503, 504})


def error_of(error: ClientError) -> DragomanError:
    """Convert an error. Messages about the request go to the client; internal ones stay in the log."""
    text = error.server_message or "The upstream refused the request and gave no reason."
    status = error.context.status if isinstance(error, StatusError) else None
    if error.code == ContextOverflow.code:
        return ContextOverflow(text, param=_part(error))
    if status in _CLIENTS_FAULT or (isinstance(error, StreamError) and error.kind in _CLIENTS_KINDS):
        # vLLM repeats the status as the code.
        code = None if error.code is None or error.code.isdigit() else error.code
        return BadRequest(text, param=_part(error), code=code)
    after = error.reply.retry_after if isinstance(error, StatusError) else None
    wait = None if after is None else max(ceil(min(after, 3600.0)), 1)
    if status == 429 or error.kind == Overloaded.type:
        return Overloaded(error.server_message or "The upstream is busy; retry soon.", retry_after=wait)
    if (
        isinstance(error, ConnectionFailed | ClientTimeout)
        or status in _BUSY
        or error.code == Unavailable.code
    ):
        return Unavailable("The upstream does not answer; retry soon.", retry_after=wait)
    if status in (401, 403):
        return EngineFailed("The upstream rejected this server's API key.")
    return EngineFailed("The upstream failed; see the server log.")


def _part(error: ClientError) -> ParamKey | None:
    """Return the field of an upstream's error; the fields of completions have the same names here."""
    return None if error.param is None else ParamKey(error.param)


# From a job to a completions request.


DEFAULT_MAX_TOKENS = 2048
"""Maximum tokens of an answer, if the limit is unknown here."""


def request_of(job: Job, traits: UpstreamTraits, tokenizer: Tokenizer) -> Request:
    asked = job.sampling
    fields: dict[str, Any] = {
        "model": job.adapter or traits.model,
        # Without a number some servers use 16.
        "max_tokens": asked.max_tokens_or_none or DEFAULT_MAX_TOKENS,
        # Sent even if it is the default: some servers have other defaults.
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "logit_bias": {str(id_): bias for id_, bias in asked.logit_bias.items()} or None,
        "seed": asked.seed,
    }
    if traits.gives_ids:
        fields |= {
            "return_token_ids": True,
            "logprobs": asked.logprobs,
            "return_tokens_as_token_ids": None if asked.logprobs is None else True,
        }
    if traits.server != "other":
        fields |= _add_extensions(job, asked)
    if traits.server == "dragoman":
        fields |= {"typical_p": asked.typical_p, "cache_prompt": job.reuse_prefix}
    if traits.server == "vllm" and not asked.ignore_eos:
        # vLLM knows one end id; the model may have several.
        fields["stop_token_ids"] = sorted(asked.stop_token_ids | tokenizer.end_ids)
    if job.media:
        return chat_request(job, fields, gives_ids=traits.gives_ids)
    return completions(job.prompt if traits.takes_ids else _text(job, tokenizer), fields)


def _add_extensions(job: Job, asked: Sampling) -> dict[str, Any]:
    source = job.constraint.source if job.constraint is not None else None
    return {
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "min_tokens": asked.min_tokens,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": sorted(asked.stop_token_ids) or None,
        "allowed_token_ids": None if asked.allowed_token_ids is None else list(asked.allowed_token_ids),
        # Servers without priorities refuse any but the default.
        "priority": job.priority or None,
        "cache_salt": job.cache_salt or None,
        "structured_outputs": None if source is None else _write_structured(source),
    }


def _write_structured(source: ConstraintSource) -> dict[str, Any]:
    match source.format:
        case "json_schema":
            return {"json": source.text}
        case "choice":
            return {"choice": msgspec.json.decode(source.text, type=list[str])}
        case "gbnf":
            return {"grammar": source.text}
        case "lark":
            # Without the first line, a grammar with `::=` would be taken for GBNF.
            return {"grammar": LARK_LINE + source.text if "::=" in source.text else source.text}
        case "regex" | "structural_tag":
            return {source.format: source.text}


def _text(job: Job, tokenizer: Tokenizer) -> str:
    """Return the prompt for servers that take only text. They add the first token themselves."""
    if not tokenizer.add_bos or tokenizer.bos_id is None:
        return job.text
    return job.text.removeprefix(tokenizer.pieces[tokenizer.bos_id].decode("utf-8", "replace"))


# The engine.


logger = logging.getLogger("dragoman.engine")

_PAUSE_S = 0.25
"""Seconds before a request is sent again to an upstream that has just failed."""


class RemoteEngine:
    """Engine over upstream servers; usually created with `RemoteEngine.open(["http://10.0.0.1:8000"],
    tokenizer)`.

    If the upstreams do not return ids, their text is the answer, and the card states so. Without a tokenizer
    they are sent text, too.
    """

    def __init__(
        self, pool: UpstreamPool, tokenizer: Tokenizer, card: ModelCard, options: RemoteOptions
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.pool = pool
        self.options = options
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls, urls: Sequence[str], tokenizer: Tokenizer | None, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """Probe the upstreams and create the engine, outside of an event loop. Raises BadUpstream if none
        can be used.
        """
        return asyncio.run(cls.connect(urls, tokenizer, options))

    @classmethod
    async def connect(
        cls, urls: Sequence[str], tokenizer: Tokenizer | None, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """Do the same as `open` in an event loop."""
        options = options or RemoteOptions()
        tokenizer = tokenizer or FallbackTokenizer()
        pool = UpstreamPool(urls, tokenizer, options)
        await pool.look_at_all()
        for upstream in pool.upstreams:
            await upstream.restart()
        traits = next((upstream.traits for upstream in pool.upstreams if upstream.alive), None)
        if traits is None:
            why = "; ".join(f"{upstream.url}: {upstream.down_reason}" for upstream in pool.upstreams)
            raise BadUpstream(f"No upstream can be used. {why}")
        return cls(pool, tokenizer, _card(traits, tokenizer, options), options)

    @property
    def upstreams(self) -> Sequence[Upstream]:
        return self.pool.upstreams

    async def start(self) -> None:
        self._watch = asyncio.create_task(self.pool.watch())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for upstream in self.upstreams:
            await upstream.restart()

    async def check(self) -> None:
        if not any(upstream.alive for upstream in self.upstreams):
            raise EngineFailed("No upstream answers.")

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return one placeholder id; only the upstream knows how many positions a medium takes."""
        return [placeholder_id(self.tokenizer, media.kind)]

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        return iterate(self, job)

    def submit(self, job: Job, sink: Sink) -> "RemoteJobHandle":
        return RemoteJobHandle(
            [RemoteContinuation(self, single(job, index), index, sink) for index in range(job.n)]
        )

    def describe_upstreams(self) -> list[dict[str, Any]]:
        """Return the state of the upstreams, for operators and monitoring."""
        return [upstream.describe() for upstream in self.upstreams]


class RemoteJobHandle:
    """The handle of a job: each continuation is a request of its own."""

    def __init__(self, runs: Sequence["RemoteContinuation"]) -> None:
        self._runs = runs
        for run in runs:
            run.begin()

    def cancel(self, index: int | None = None) -> None:
        for run in self._runs if index is None else self._runs[index : index + 1]:
            run.cancel()


class RemoteContinuation:
    """One continuation: a request to an upstream, and to another one if that fails.

    Until something was generated it starts again. After that it continues from the ids so far, if the rest of
    the answer depends on nothing else: they become a part of the prompt. Nothing is repeated or left out,
    since exactly what has been passed on is sent to the next upstream.
    """

    def __init__(self, engine: RemoteEngine, job: Job, index: int, sink: Sink) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._options = engine.options
        self._job = job
        self._index = index
        self._sink = sink
        salt, (source, *hints) = f"{job.adapters}{job.cache_salt}", job.routing_hints or ("",)
        self._key = key_of_ids(job.prompt, salt, job.media, hints, job.owner, source)
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._tried: list[Upstream] = []
        self._resumed = False
        self._upstream: Upstream | None = None
        self._call: UpstreamCall | None = None
        self._pause: asyncio.TimerHandle | None = None

    def begin(self, before: DragomanError | None = None) -> None:
        """Start the request. `before` is the error of the last attempt, which the client gets if no
        upstream is left.
        """
        try:
            upstream = self._pool.pick(self._key, self._tried)
        except (Unavailable, Overloaded) as error:
            self._fail(before or error)
            return
        pause = _PAUSE_S * len(self._tried) if upstream in self._tried else 0.0
        self._tried.append(upstream)
        if pause:
            self._pause = asyncio.get_running_loop().call_later(pause, self._ask, upstream)
        else:
            self._ask(upstream)

    def cancel(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._call is not None:
            self._call.cancel()
            self._leave()

    def _ask(self, upstream: Upstream) -> None:
        assert upstream.traits is not None
        tokenizer, job = self._engine.tokenizer, self._rest()
        hearing = StreamStepReader(job, tokenizer, sampled=upstream.traits.gives_ids)
        try:
            asked = replace(request_of(job, upstream.traits, tokenizer), headers=job.trace_headers or {})
            self._call = UpstreamCall(upstream.lines.setup, asked, hearing, self._take, self._ended)
        except DragomanError as error:
            self._fail(error)
            return
        self._upstream = upstream
        self._pool.router.begin(self._key, upstream.url)
        upstream.lines.ask(self._call)

    def _rest(self) -> Job:
        """Return the job for the rest of the answer."""
        job, text = self._job, "".join(self._texts)
        if not self._ids and not text:
            return job
        ids = self._ids or self._engine.tokenizer.encode(text)
        asked = job.sampling
        return replace(
            job,
            prompt=(*job.prompt, *ids),
            text=job.text + text,
            sampling=replace(
                asked,
                max_tokens=asked.max_tokens
                if asked.max_tokens_or_none is None
                else max(asked.max_tokens - len(ids), 1),
                min_tokens=max(asked.min_tokens - len(ids), 0),
                # The random numbers of its first ids must not be repeated.
                seed=None if asked.seed is None else seed_of(asked.seed, len(ids)),
            ),
        )

    def _take(self, step: Step) -> None:
        step.index = self._index
        if step.ids:
            self._ids += step.ids
        elif isinstance(step, TextStep) and step.text:
            self._texts.append(step.text)
        if self._resumed:
            # The second upstream's prefix cache says nothing about the first one's.
            step.cached_tokens = None
        self._sink(step)

    def _ended(self, problem: DragomanError | None) -> None:
        upstream, call = self._upstream, self._call
        self._leave()
        if upstream is None or call is None:
            return
        if problem is None:
            upstream.record_success()
            return
        error = error_of(problem) if isinstance(problem, ClientError) else problem
        if isinstance(error, BadRequest) or not isinstance(problem, ClientError):
            self._fail(error)
            return
        upstream.record_failure(problem)
        begun = bool(self._ids or self._texts or call.hearing.held)
        if begun and self._finish_from(call.hearing.held):
            return
        if len(self._tried) >= self._options.tries or (begun and not self._can_go_on()):
            self._fail(error)
        else:
            self._resumed = begun
            self.begin(error)

    def _finish_from(self, held: list[int]) -> bool:
        """Whether the received ids are the whole answer, though its finish was not received."""
        asked, ends = self._job.sampling, self._engine.tokenizer.end_ids
        number = len(self._ids) + len(held)
        finish: FinishReason = "length"
        stop_id = None
        if held and number > asked.min_tokens and not asked.ignore_eos and self._job.constraint is None:
            finish, stop_id = "stop", None if held[-1] in ends else held[-1]
        elif not held or number < asked.max_tokens:
            if held:
                self._take(Step(held))
            return False
        self._take(Step(held, finish=finish, stop_id=stop_id))
        return True

    def _can_go_on(self) -> bool:
        """Whether the rest depends only on the ids so far, and another upstream is up."""
        asked = self._job.sampling
        alone = self._job.constraint is None and asked.samplers is None and not self._job.media
        plain = not (asked.presence_penalty or asked.frequency_penalty)
        others = any(each.alive and each not in self._tried for each in self._pool.upstreams)
        return self._options.resume and alone and plain and others

    def _leave(self) -> None:
        if self._upstream is not None:
            self._pool.router.end(self._upstream.url)
        self._upstream = self._call = None

    def _fail(self, error: DragomanError) -> None:
        self._sink(Step([], self._index, finish="error", error=error))


def _card(traits: UpstreamTraits, tokenizer: Tokenizer, options: RemoteOptions) -> ModelCard:
    has_ids = not isinstance(tokenizer, FallbackTokenizer)
    known = "sampled" if traits.gives_ids else "counted" if has_ids else "none"
    modalities = traits.modalities if options.modalities is None else frozenset(options.modalities)
    return ModelCard(
        name=options.name or traits.model,
        max_model_len=options.context or traits.max_model_len or getattr(tokenizer, "longest", None),
        templates=getattr(tokenizer, "templates", {}),
        special_tokens=getattr(tokenizer, "special_tokens", {}),
        adapters=traits.adapters,
        constraint_formats=traits.sources,
        unsupported=traits.unsupported,
        returns_ids=traits.gives_ids,
        has_tokenizer=has_ids,
        wants_prompt_text=not traits.takes_ids,
        wants_conversation=bool(modalities),
        modalities=modalities,
        details={"runner": "upstream", "ids": known},
    )
