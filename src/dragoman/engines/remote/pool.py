"""The upstreams: what can be set about them, what they can do, which are there, which gets the next job."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from time import monotonic
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from dragoman.client import AsyncClient, CannotConnect, ClientError, Refused, TimedOut, Timeouts
from dragoman.engines.protocol import UNSUPPORTABLE, TextTokenizer, Tokenizer
from dragoman.engines.remote.chat import find_modalities
from dragoman.engines.remote.line import Lines
from dragoman.errors import Overloaded, SettingsError, Unavailable
from dragoman.media import MediaKind
from dragoman.routing import Router, RoutingKey
from dragoman.types import SourceForm

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
    modalities: tuple[MediaKind, ...] | None = None
    """What the model takes beside text; by default what the upstreams say."""
    tries: int = 3
    """How often a job is given to an upstream."""
    resume: bool = True
    """Whether an answer goes on at another upstream, from what was said so far, when its own one fails."""


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
    modalities: frozenset[MediaKind] = frozenset()

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
        modalities=await find_modalities(client, chosen),
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


# The pool.


logger = logging.getLogger("dragoman.engine")

FIRST_LOOK_S = 60.0
"""The first look asks for a token, which a server that has just started may take long for."""
MISSES = 2
"""Looks in a row that may go unanswered: a server under load may be late once."""
FAILURES = 3
"""Answers in a row that it may fail to bring, before it is left out."""
LONGEST_PAUSE_S = 60.0
_TICK_S = 0.01
"""By which a timer comes later than it was set to, so that the clock agrees."""


class Upstream:
    """One server. It is `alive` as far as was seen last, and `ready` where it says that it takes new work."""

    def __init__(self, url: str, options: RemoteOptions, router: Router) -> None:
        self._options = options
        self._router = router
        self._connect(url)
        self.url = self.client.url
        self.alive = False
        self.ready = True
        self.traits: Traits | None = None
        self.why = ""
        """Why it was left out last."""
        self._missed = 0
        self._failures = 0
        """In a row."""
        self._out = 0
        """How often it was left out for its failures since it last brought an answer."""
        self._rests_until = 0.0
        """It has asked for a pause."""
        router.add(self.url)
        router.drain(self.url)

    def _connect(self, url: str) -> None:
        # No tries there: whether another upstream is better is decided here.
        timeouts = Timeouts(connect=self._options.connect_s, read=self._options.silence_s)
        self.client = AsyncClient(url, self._options.key, timeouts=timeouts, retries=0)
        self.lines = Lines(self.client.setup, self._options.silence_s)

    async def restart(self) -> None:
        """Connections belong to the event loop that made them."""
        self.lines.close()
        await self.client.aclose()
        self._connect(self.url)

    @property
    def pause_s(self) -> float:
        """Before it is looked at again: longer where it answers looks, and fails at work."""
        return min(self._options.check_s * 2.0**self._out, max(LONGEST_PAUSE_S, self._options.check_s))

    @property
    def running(self) -> int:
        return self._router.running(self.url)

    def found(self, *, ready: bool = True) -> None:
        if not self.alive:
            logger.info("The upstream %s is there", self.url)
        elif ready != self.ready:
            logger.info("The upstream %s %s", self.url, "is ready" if ready else "takes no new work")
        self.alive, self.ready, self._missed = True, ready, 0
        self._settle()

    def missed(self) -> None:
        self._missed += 1
        if not self.alive or self._missed >= MISSES:
            self.lost("It does not answer in time.")
            # It may hang, with all connections open: nobody waits for it but where it still speaks.
            self.lines.give_up(self._options.connect_s)

    @property
    def rests_s(self) -> float:
        """How long it still wants nothing new."""
        return max(self._rests_until - monotonic(), 0.0)

    def _rest(self, seconds: float) -> None:
        seconds = min(seconds, LONGEST_PAUSE_S)
        self._rests_until = max(self._rests_until, monotonic() + seconds)
        self._settle()
        asyncio.get_running_loop().call_later(seconds + _TICK_S, self._settle)

    def _settle(self) -> None:
        self._router.drain(self.url, not (self.alive and self.ready and not self.rests_s))

    def succeeded(self) -> None:
        self._failures = self._out = 0

    def failed(self, problem: ClientError) -> None:
        """It did not bring an answer that was asked for."""
        if isinstance(problem, CannotConnect):
            self.lost(problem)
            return
        logger.warning("The upstream %s failed: %s", self.url, problem)
        if isinstance(problem, Refused) and problem.where.status in (429, 503):
            if problem.reply.retry_after:
                self._rest(problem.reply.retry_after)
                return
            if problem.where.status == 429:
                return
        self._failures += 1
        if self._failures >= FAILURES:
            self._failures, self._out = 0, self._out + 1
            self.lost(f"It has failed {FAILURES} times in a row.")

    def lost(self, why: object) -> None:
        if self.alive or str(why) != self.why:
            logger.warning("The upstream %s is left out: %s", self.url, why)
        self.alive, self.why = False, str(why)
        # Whoever comes back there has nothing of what was computed.
        self._router.restart(self.url)
        self._settle()

    def describe(self) -> dict[str, Any]:
        state = "out" if not self.alive else "draining" if not self.ready else "ready"
        state = "resting" if state == "ready" and self.rests_s else state
        return {"url": hide_password(self.url), "status": state, "running": self.running}


def hide_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Pool:
    def __init__(self, urls: Sequence[str], tokenizer: Tokenizer, options: RemoteOptions) -> None:
        self.router = Router()
        self.upstreams = [Upstream(url, options, self.router) for url in dict.fromkeys(urls)]
        self._by_url = {upstream.url: upstream for upstream in self.upstreams}
        self._tokenizer = tokenizer
        self._options = options
        self._kind: Traits | None = None
        """What the first that was found is like."""

    def pick(self, key: RoutingKey, tried: Collection[Upstream] = ()) -> Upstream:
        """Those that were tried come last."""
        ranked = self.router.rank(key, [upstream.url for upstream in tried])
        living = [self._by_url[name] for name in (*ranked, *self._by_url) if self._by_url[name].alive]
        if not living:
            raise Unavailable("None of the upstreams answers; try again soon.")
        awake = next((upstream for upstream in living if not upstream.rests_s), None)
        if awake is None:
            soonest = ceil(min(upstream.rests_s for upstream in living))
            raise Overloaded("All upstreams are busy; try again soon.", retry_after=soonest)
        return awake

    async def look_at_all(self) -> None:
        await asyncio.gather(*(self._look(upstream) for upstream in self.upstreams))

    async def watch(self) -> None:
        """Never returns. One that is dead comes back when it answers."""
        await asyncio.gather(*(self._watch(upstream) for upstream in self.upstreams))

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(upstream.pause_s)
            await self._look(upstream)

    async def _look(self, upstream: Upstream) -> None:
        """One that is new or comes back is looked at in full: it may have become another."""
        try:
            async with asyncio.timeout(self._options.connect_s if upstream.alive else FIRST_LOOK_S):
                ready = True
                if upstream.alive:
                    await upstream.client.models()
                    ready = await _is_ready(upstream)
                else:
                    traits = await look(upstream.client, self._tokenizer, self._options.model)
                    upstream.traits = self._fitting(traits)
        except (TimedOut, TimeoutError):
            upstream.missed()
        except (ClientError, BadUpstream) as problem:
            upstream.lost(problem)
        else:
            upstream.found(ready=ready)

    def _fitting(self, traits: Traits) -> Traits:
        self._kind = self._kind or traits
        if not traits.like(self._kind):
            raise BadUpstream("It is not like the others; all must be of one kind, with the same model.")
        return traits


async def _is_ready(upstream: Upstream) -> bool:
    """One that is about to stop says so, and ends what it has begun."""
    if upstream.traits is None or upstream.traits.server != "dragoman":
        return True
    try:
        await upstream.client.request("GET", "/ready")
    except Refused as refused:
        return refused.where.status != 503
    return True
