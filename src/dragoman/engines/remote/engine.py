"""Servers as an engine: each job is a completions request to one of them; cancelling it hangs up there."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.client import (
    CannotConnect,
    ClientError,
    Finished,
    Refused,
    StreamEvent,
    StreamFailed,
    Text,
    TimedOut,
    Token,
    Unseen,
    Used,
)
from dragoman.client.request import Request, completions
from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.local.model import LlamaTokenizer, Model
from dragoman.engines.protocol import ModelCard, TextTokenizer, Tokenizer
from dragoman.engines.remote.pool import BadUpstream, Pool, RemoteOptions, Traits, Upstream
from dragoman.errors import (
    BadRequest,
    ContextOverflow,
    DragomanError,
    EngineFailed,
    Overloaded,
    Part,
    Unavailable,
)
from dragoman.types import (
    LARK_LINE,
    ConstraintSource,
    FinishReason,
    Job,
    Sampling,
    Step,
    TextStep,
    TokenLogprob,
)

# The tokenizer of the model that they run, from what lies on this machine.


class GgufTokenizer(LlamaTokenizer):
    """The vocabulary of a GGUF file, and its templates. The weights in it are mapped, and never read."""

    def __init__(self, path: Path) -> None:
        model = Model(path)
        super().__init__(model)
        self.templates = model.templates
        self.special_tokens = self.texts(model.named_ids)
        self.longest = model.trained_context


def tokenizer_of(name: str) -> Tokenizer:
    """A GGUF file, or what HfTokenizer takes: a folder with tokenizer.json, or a name."""
    path = Path(name).expanduser()
    return (
        GgufTokenizer(path) if path.suffix == ".gguf" else HfTokenizer(str(path) if path.exists() else name)
    )


# What goes wrong at an upstream, as our clients are told.


_CLIENTS_FAULT = frozenset({400, 413, 415, 422})
_CLIENTS_KINDS = frozenset({BadRequest.type, "BadRequestError"})
"""What OpenAI and vLLM call it inside of a stream, where there is no status."""
_BUSY = frozenset({502, 503, 504})


def error_of(error: ClientError) -> DragomanError:
    """The upstream's words where they are about the request; what is about its insides stays in the log."""
    said = error.said or "The upstream refused the request and gave no reason."
    status = error.where.status if isinstance(error, Refused) else None
    if error.code == ContextOverflow.code:
        return ContextOverflow(said, param=_part(error))
    if status in _CLIENTS_FAULT or (isinstance(error, StreamFailed) and error.kind in _CLIENTS_KINDS):
        # vLLM repeats the status as the code.
        code = None if error.code is None or error.code.isdigit() else error.code
        return BadRequest(said, param=_part(error), code=code)
    if status == 429 or error.kind == Overloaded.type:
        return Overloaded(error.said or "The upstream is busy; try again soon.")
    if isinstance(error, CannotConnect | TimedOut) or status in _BUSY or error.code == Unavailable.code:
        return Unavailable("The upstream does not answer; try again soon.")
    if status in (401, 403):
        return EngineFailed("The upstream does not take the key that this server has for it.")
    return EngineFailed("The upstream failed; the server's log says more.")


def _part(error: ClientError) -> Part | None:
    """An upstream is asked for completions, whose fields have the names that we use ourselves."""
    return None if error.param is None else Part(error.param)


# From the events of a completions stream to steps.


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Hearing:
    """`hear` gives what can be passed on at once, `last` the step that ends the answer.

    Where `sampled` is false the upstream gives text, and there are no ids.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, *, sampled: bool) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._sampled = sampled
        self._ends = tokenizer.end_ids | job.sampling.stop_token_ids
        self._held: Step | None = None
        """A step with what may be the end of the answer, which has to come with its finish."""
        self._finished: Finished | None = None
        self._cached: int | None = None

    def hear(self, event: StreamEvent) -> Step | None:
        match event:
            case Text() if not self._sampled:
                return TextStep([], text=event.text) if event.text else None
            case Text() | Unseen() if self._sampled:
                step = self._step(event.text, event.tokens)
                before, self._held = self._held, None
                if before is not None:
                    step = _join(before, step)
                if step.ids and step.ids[-1] not in self._ends:
                    return step
                self._held = step
            case Finished():
                self._finished = event
            case Used():
                self._cached = event.usage.cached_tokens
        return None

    def last(self) -> Step:
        if self._finished is None:
            raise EngineFailed("The upstream did not say how the answer ended.")
        finish = _FINISHES.get(self._finished.reason)
        if finish is None:
            raise EngineFailed(
                f"The upstream ended the answer for a reason of its own: {self._finished.reason}."
            )
        step = self._held or (Step([]) if self._sampled else TextStep([]))
        step.finish, step.cached_tokens = finish, self._cached
        stop = self._finished.stop
        step.stop_id = stop if isinstance(stop, int) and stop in self._job.sampling.stop_token_ids else None
        return step

    def _step(self, text: str, tokens: list[Token]) -> Step:
        ids = [token.id for token in tokens if token.id is not None]
        if len(ids) != len(tokens) or (text and not ids):
            raise EngineFailed("The upstream gave text without its ids.")
        if any(not 0 <= id_ < len(self._tokenizer.pieces) for id_ in ids):
            raise EngineFailed("The upstream gave an id that the vocabulary does not have.")
        wanted = self._job.sampling.logprobs
        return Step(ids, logprobs=None if wanted is None else [_logprob(token, wanted) for token in tokens])


def _join(first: Step, second: Step) -> Step:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return Step(first.ids + second.ids, logprobs=logprobs)


def _logprob(token: Token, wanted: int) -> TokenLogprob:
    if token.id is None or token.logprob is None:
        raise EngineFailed("The upstream left out log probabilities that it was asked for.")
    top = [(one.id, one.logprob) for one in token.top if one.id is not None and one.logprob is not None]
    top.sort(key=lambda entry: -entry[1])
    return TokenLogprob(token.id, token.logprob, tuple(top[:wanted]))


# From a job to a completions request.


UNSAID = 2048
"""Tokens of an answer, where neither the client nor anybody here knows how many there may be."""


def request_of(job: Job, traits: Traits, tokenizer: Tokenizer) -> Request:
    asked = job.sampling
    fields: dict[str, Any] = {
        "model": job.adapter or traits.model,
        # Without a number some servers have 16.
        "max_tokens": asked.most or UNSAID,
        # Said even where it is the usual: some servers have other defaults.
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
        # vLLM knows one end of its own; the model may have several.
        fields["stop_token_ids"] = sorted(asked.stop_token_ids | tokenizer.end_ids)
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
        # Servers without priorities refuse any but the usual.
        "priority": job.priority or None,
        "cache_salt": job.cache_salt or None,
        "structured_outputs": None if source is None else _write_structured(source),
    }


def _write_structured(source: ConstraintSource) -> dict[str, Any]:
    match source.form:
        case "json_schema":
            return {"json": source.text}
        case "choice":
            return {"choice": msgspec.json.decode(source.text, type=list[str])}
        case "gbnf":
            return {"grammar": source.text}
        case "lark":
            # Without the first line, what has a `::=` in it would be taken for GBNF.
            return {"grammar": LARK_LINE + source.text if "::=" in source.text else source.text}
        case "regex" | "structural_tag":
            return {source.form: source.text}


def _text(job: Job, tokenizer: Tokenizer) -> str:
    """The prompt for servers that take text only. They put the first token there themselves."""
    if not tokenizer.add_bos or tokenizer.bos_id is None:
        return job.text
    return job.text.removeprefix(tokenizer.pieces[tokenizer.bos_id].decode("utf-8", "replace"))


# The engine.


logger = logging.getLogger("dragoman.engine")

_PAUSE_S = 0.25
"""Before an upstream that has just failed is asked again."""


class RemoteEngine:
    """`RemoteEngine.open(["http://10.0.0.1:8000"], tokenizer)` is the usual way to make one.

    Where the upstreams do not return ids, their text is the answer, and the card says so. Without a tokenizer
    they are sent text, too.
    """

    def __init__(self, pool: Pool, tokenizer: Tokenizer, card: ModelCard, options: RemoteOptions) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self._pool = pool
        self._options = options
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls, urls: Sequence[str], tokenizer: Tokenizer | None, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """Look at the upstreams; call it outside of an event loop. Raises BadUpstream where none will do."""
        return asyncio.run(cls.connect(urls, tokenizer, options))

    @classmethod
    async def connect(
        cls, urls: Sequence[str], tokenizer: Tokenizer | None, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """`open`, for code in an event loop."""
        options = options or RemoteOptions()
        tokenizer = tokenizer or TextTokenizer()
        pool = Pool([Upstream(url, options) for url in dict.fromkeys(urls)], tokenizer, options)
        await pool.look_at_all()
        for upstream in pool.upstreams:
            await upstream.restart()
        traits = next((upstream.traits for upstream in pool.upstreams if upstream.alive), None)
        if traits is None:
            why = "; ".join(f"{upstream.url}: {upstream.why}" for upstream in pool.upstreams)
            raise BadUpstream(f"None of the upstreams can be used. {why}")
        return cls(pool, tokenizer, _card(traits, tokenizer, options), options)

    @property
    def upstreams(self) -> Sequence[Upstream]:
        return self._pool.upstreams

    async def start(self) -> None:
        self._watch = asyncio.create_task(self._pool.watch())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for upstream in self.upstreams:
            await upstream.restart()

    async def check(self) -> None:
        if not any(upstream.alive for upstream in self.upstreams):
            raise EngineFailed("None of the upstreams answers.")

    async def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        tried: list[Upstream] = []
        while True:
            upstream = self._pool.pick(job, tried)
            if upstream in tried:
                await asyncio.sleep(_PAUSE_S * len(tried))
            tried.append(upstream)
            begun = False
            try:
                async with aclosing(self._ask(upstream, job)) as steps:
                    async for step in steps:
                        begun = True
                        yield step
                return
            except ClientError as problem:
                error = error_of(problem)
                if isinstance(error, BadRequest):
                    raise error from problem
                self._note(upstream, problem)
                if begun or len(tried) >= self._options.tries:
                    raise error from problem

    async def _ask(self, upstream: Upstream, job: Job) -> AsyncGenerator[Step, None]:
        assert upstream.traits is not None
        hearing = Hearing(job, self.tokenizer, sampled=upstream.traits.gives_ids)
        asked = request_of(job, upstream.traits, self.tokenizer)
        stream = upstream.client.stream(replace(asked, headers=job.trace or {}))
        with upstream.busy():
            async with aclosing(aiter(stream)) as events:
                async for event in events:
                    step = hearing.hear(event)
                    if step is not None:
                        yield step
            yield hearing.last()

    def _note(self, upstream: Upstream, problem: ClientError) -> None:
        if isinstance(problem, CannotConnect):
            upstream.lost(problem)
        else:
            logger.warning("The upstream %s failed: %s", upstream.url, problem)


def _card(traits: Traits, tokenizer: Tokenizer, options: RemoteOptions) -> ModelCard:
    has_ids = not isinstance(tokenizer, TextTokenizer)
    known = "sampled" if traits.gives_ids else "counted" if has_ids else "none"
    return ModelCard(
        name=options.name or traits.model,
        max_model_len=options.context or traits.max_model_len or getattr(tokenizer, "longest", None),
        templates=getattr(tokenizer, "templates", {}),
        special_tokens=getattr(tokenizer, "special_tokens", {}),
        adapters=traits.adapters,
        sources=traits.sources,
        unsupported=traits.unsupported,
        samples_ids=traits.gives_ids,
        has_ids=has_ids,
        takes_text=not traits.takes_ids,
        details={"runner": "upstream", "ids": known},
    )
