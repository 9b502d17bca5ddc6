"""The upstreams: which of them are there, and which gets the next job."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from dragoman.client import AsyncClient, ClientError, TimedOut, Timeouts
from dragoman.engines.protocol import Tokenizer
from dragoman.engines.remote.options import RemoteOptions
from dragoman.engines.remote.prefixes import Prefixes, blocks_of
from dragoman.engines.remote.traits import BadUpstream, Traits, look
from dragoman.errors import Unavailable
from dragoman.types import Job

logger = logging.getLogger("dragoman.engine")

SLACK = 4
"""Jobs that an upstream may have more than the least busy one and still get those that begin as it knows."""
FIRST_LOOK_S = 60.0
"""The first look asks for a token, which a server that has just started may take long for."""
MISSES = 2
"""Looks in a row that may go unanswered: a server under load may be late once."""


class Upstream:
    """One server. It is `alive` as far as was seen last."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._options = options
        self.client = self._client(url)
        self.url = self.client.url
        self.alive = False
        self.traits: Traits | None = None
        self.running = 0
        self.prefixes = Prefixes()
        self.why = ""
        """Why it was left out last."""
        self._missed = 0

    def _client(self, url: str) -> AsyncClient:
        # No tries there: whether another upstream is better is decided here.
        timeouts = Timeouts(connect=self._options.connect_s, read=self._options.silence_s)
        return AsyncClient(url, self._options.key, timeouts=timeouts, retries=0)

    async def restart(self) -> None:
        """Connections belong to the event loop that made them."""
        await self.client.aclose()
        self.client = self._client(self.url)

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def found(self) -> None:
        if not self.alive:
            logger.info("The upstream %s is there", self.url)
        self.alive, self._missed = True, 0

    def missed(self) -> None:
        self._missed += 1
        if not self.alive or self._missed >= MISSES:
            self.lost("It does not answer in time.")

    def lost(self, why: object) -> None:
        if self.alive or str(why) != self.why:
            logger.warning("The upstream %s is left out: %s", self.url, why)
        self.alive, self.why = False, str(why)
        # Whoever comes back there has nothing of what was computed.
        self.prefixes.clear()


class Pool:
    def __init__(self, upstreams: Sequence[Upstream], tokenizer: Tokenizer, options: RemoteOptions) -> None:
        self.upstreams = list(upstreams)
        self._tokenizer = tokenizer
        self._options = options
        self._turn = 0
        self._kind: Traits | None = None
        """What the first that was found is like."""

    def pick(self, job: Job, tried: Collection[Upstream] = ()) -> Upstream:
        """The one that knows most of the prompt, of those that are not much busier than the least busy."""
        alive = [upstream for upstream in self.upstreams if upstream.alive]
        if not alive:
            raise Unavailable("None of the upstreams answers; try again soon.")
        fresh = [upstream for upstream in alive if upstream not in tried] or alive
        least = min(upstream.running for upstream in fresh)
        near = [upstream for upstream in fresh if upstream.running <= least + SLACK]
        # Who is asked first goes round, so that equals share what comes.
        self._turn += 1
        first = self._turn % len(near)
        blocks = blocks_of(job)
        chosen = max(near[first:] + near[:first], key=lambda one: (one.prefixes.known(blocks), -one.running))
        chosen.prefixes.add(blocks)
        return chosen

    async def look_at_all(self) -> None:
        await asyncio.gather(*(self._look(upstream) for upstream in self.upstreams))

    async def watch(self) -> None:
        """Never returns. One that is dead comes back when it answers."""
        await asyncio.gather(*(self._watch(upstream) for upstream in self.upstreams))

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._options.check_s)
            await self._look(upstream)

    async def _look(self, upstream: Upstream) -> None:
        """One that is new or comes back is looked at in full: it may have become another."""
        try:
            async with asyncio.timeout(self._options.connect_s if upstream.alive else FIRST_LOOK_S):
                if upstream.alive:
                    await upstream.client.models()
                else:
                    traits = await look(upstream.client, self._tokenizer, self._options.model)
                    upstream.traits = self._fitting(traits)
        except (TimedOut, TimeoutError):
            upstream.missed()
        except (ClientError, BadUpstream) as problem:
            upstream.lost(problem)
        else:
            upstream.found()

    def _fitting(self, traits: Traits) -> Traits:
        self._kind = self._kind or traits
        if not traits.like(self._kind):
            raise BadUpstream("It is not like the others; all must be of one kind, with the same model.")
        return traits
