"""The upstreams: what can be set about them, what they can do, which are there, which gets the next job."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from dragoman.client import AsyncClient, ClientError, Refused, TimedOut, Timeouts
from dragoman.engines.protocol import UNSUPPORTABLE, TextTokenizer, Tokenizer
from dragoman.errors import SettingsError, Unavailable
from dragoman.types import Job, SourceForm

# What can be set.


class RemoteOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    """The model's public name; by default its name at the upstreams."""
    model: str | None = None
    """Its name at the upstreams; by default the first that they have."""
    key: str | None = None
    """The key of the upstreams."""
    context: int | None = None
    """Tokens one sequence may hold; by default what the upstreams say."""
    connect_s: float = 5.0
    """Seconds for a connection."""
    silence_s: float = 600.0
    """Seconds after which an upstream that says nothing is given up."""
    check_s: float = 5.0
    """Seconds between looks at whether the upstreams are there."""
    tries: int = 3
    """How often a job is given to an upstream, as long as none has said a token."""


# What a server can do that is to be an upstream: seen once, by asking it for one token.


Server: TypeAlias = Literal["dragoman", "vllm", "other"]
_SAMPLE = "The quick brown fox, 12 + 30 = 42: naïve Grüße!\n"
_STANDARD = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs"}
)
"""What every server of this API takes."""
_UNSUPPORTED: Mapping[Server, frozenset[str]] = {
    # The first cannot be streamed; the second are ids here, and the API has only texts for them.
    "dragoman": frozenset({"prompt_logprobs", "bad_words"}),
    "vllm": frozenset({"prompt_logprobs", "bad_words", "typical_p", "reuse_prefix"}),
    "other": frozenset(UNSUPPORTABLE) - _STANDARD,
}
_SOURCES: Mapping[Server, tuple[SourceForm, ...]] = {
    "dragoman": ("json_schema", "regex", "choice", "gbnf", "lark"),
    # What its usual choice of a backend reads.
    "vllm": ("json_schema", "regex", "choice", "gbnf", "structural_tag"),
    "other": (),
}


class BadUpstream(SettingsError):
    """A server that cannot be used as one."""


class Traits(Struct, frozen=True, kw_only=True):
    server: Server
    model: str
    max_model_len: int | None
    adapters: tuple[str, ...] = ()
    takes_ids: bool
    gives_ids: bool

    @property
    def unsupported(self) -> frozenset[str]:
        return _UNSUPPORTED[self.server]

    @property
    def sources(self) -> tuple[SourceForm, ...]:
        return _SOURCES[self.server]

    def like(self, other: "Traits") -> bool:
        """Whether a job of the one can be given to the other."""
        mine, theirs = ((t.server, t.model, t.takes_ids, t.gives_ids) for t in (self, other))
        return mine == theirs


async def look(client: AsyncClient, tokenizer: Tokenizer, model: str | None) -> Traits:
    """Raises ClientError where nobody answers, and BadUpstream where the server will not do."""
    models = await client.models()
    chosen = _choose(models, model)
    takes = gives = False
    if isinstance(tokenizer, TextTokenizer):
        await _try_text(client, chosen["id"])
    else:
        await _check_tokenizer(client, tokenizer, chosen["id"])
        takes, gives = await _ids(client, tokenizer, chosen["id"])
    owner = chosen.get("owned_by") if takes else None
    return Traits(
        server="dragoman" if owner == "dragoman" else "vllm" if owner == "vllm" and gives else "other",
        model=chosen["id"],
        max_model_len=_length(chosen),
        adapters=tuple(one["id"] for one in models if one.get("parent") == chosen["id"]),
        takes_ids=takes,
        gives_ids=gives,
    )


def _choose(models: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    found = next((one for one in models if name is None or one["id"] == name), None)
    if found is None:
        known = ", ".join(one["id"] for one in models) or "none"
        raise BadUpstream(f"It has no model {name or ''}; there is: {known}.")
    return found


def _length(model: dict[str, Any]) -> int | None:
    """Under the name that most have for it, or under llama-server's."""
    meta = model.get("meta")
    told = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return told if isinstance(told, int) else None


async def _check_tokenizer(client: AsyncClient, tokenizer: Tokenizer, model: str) -> None:
    """Where the server can be asked: with another vocabulary, everything would be nonsense."""
    body = {"model": model, "prompt": _SAMPLE, "add_special_tokens": False}
    try:
        reply = await client.request("POST", "/tokenize", body)
    except ClientError:
        return
    theirs = reply.body.get("tokens") if isinstance(reply.body, dict) else None
    if theirs and theirs != tokenizer.encode(_SAMPLE):
        raise BadUpstream("It has another tokenizer; give its own with --tokenizer.")


async def _ids(client: AsyncClient, tokenizer: Tokenizer, model: str) -> tuple[bool, bool]:
    """Whether it takes prompts as ids, and whether it gives the ids of its answers."""
    try:
        answer = await client.completions(
            tokenizer.encode("Hello"), **_asked(model), return_token_ids=True
        ).answer()
        return True, bool(answer.ids)
    except Refused as refused:
        if refused.where.status not in (400, 422):
            raise
    await _try_text(client, model)
    return False, False


async def _try_text(client: AsyncClient, model: str) -> None:
    await client.completions("Hello", **_asked(model)).answer()


def _asked(model: str) -> dict[str, Any]:
    return {"model": model, "max_tokens": 1, "temperature": 0}


# Which prompts an upstream has seen lately, so that one that begins alike goes where that is known.


BLOCK = 32
"""Ids that are remembered as one. A beginning that is shorter is not worth going after."""
MOST_BLOCKS = 1024
"""Of one prompt."""
MOST_KEPT = 64 * 1024


def blocks_of(job: Job) -> list[int]:
    """A number for each beginning of the prompt; equal beginnings have equal numbers."""
    seen, blocks = hash((job.adapters, job.cache_salt)), []
    for start in range(0, min(len(job.prompt) - BLOCK + 1, BLOCK * MOST_BLOCKS), BLOCK):
        seen = hash((seen, job.prompt[start : start + BLOCK]))
        blocks.append(seen)
    return blocks


class Prefixes:
    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()

    def known(self, blocks: Sequence[int]) -> int:
        """How many blocks from the beginning on have been there."""
        return next((place for place, block in enumerate(blocks) if block not in self._kept), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        # The beginning last: it is shared most, and must not go before what follows it.
        for block in reversed(blocks):
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


# The pool.


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
