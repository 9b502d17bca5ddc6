"""The engine: each job is a request to one of the upstreams, and cancelling it hangs up there."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from dragoman.client import CannotConnect, ClientError
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.engines.remote.asking import request_of
from dragoman.engines.remote.failures import error_of
from dragoman.engines.remote.hearing import Hearing
from dragoman.engines.remote.options import RemoteOptions
from dragoman.engines.remote.pool import Pool, Upstream
from dragoman.engines.remote.traits import BadUpstream, Traits
from dragoman.errors import BadRequest, EngineFailed
from dragoman.types import Job, Step

logger = logging.getLogger("dragoman.engine")

_PAUSE_S = 0.25
"""Before an upstream that has just failed is asked again."""


class RemoteEngine:
    """`RemoteEngine.open(["http://10.0.0.1:8000"], tokenizer)` is the usual way to make one.

    Where the upstreams do not return ids, ids are made from their text: the card says so, and nobody is
    given them for what a model has sampled.
    """

    def __init__(self, pool: Pool, tokenizer: Tokenizer, card: ModelCard, options: RemoteOptions) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self._pool = pool
        self._options = options
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls, urls: Sequence[str], tokenizer: Tokenizer, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """Look at the upstreams; call it outside of an event loop. Raises BadUpstream where none will do."""
        return asyncio.run(cls.connect(urls, tokenizer, options))

    @classmethod
    async def connect(
        cls, urls: Sequence[str], tokenizer: Tokenizer, options: RemoteOptions | None = None
    ) -> "RemoteEngine":
        """`open`, for code in an event loop."""
        options = options or RemoteOptions()
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
        stream = upstream.client.stream(request_of(job, upstream.traits, self.tokenizer))
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
    length = options.context or traits.max_model_len or getattr(tokenizer, "longest", None)
    if length is None:
        raise BadUpstream("The upstreams do not say how long their context is; give --context.")
    return ModelCard(
        name=options.name or traits.model,
        max_model_len=length,
        templates=getattr(tokenizer, "templates", {}),
        special_tokens=getattr(tokenizer, "special_tokens", {}),
        adapters=traits.adapters,
        sources=traits.sources,
        unsupported=traits.unsupported,
        samples_ids=traits.gives_ids,
        details={"runner": "upstream", "ids": "sampled" if traits.gives_ids else "made from text"},
    )
