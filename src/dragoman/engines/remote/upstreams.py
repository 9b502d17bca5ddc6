"""The upstreams: options, capabilities, health, and the selection of one for each job."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from time import monotonic
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from dragoman.client import AsyncClient, ClientError, ClientTimeout, ConnectionFailed, StatusError, Timeouts
from dragoman.engines.protocol import OPTIONAL_FIELDS, FallbackTokenizer, Tokenizer
from dragoman.engines.remote.chat import find_modalities
from dragoman.engines.remote.connection import ConnectionPool
from dragoman.errors import Overloaded, SettingsError, Unavailable
from dragoman.media import MediaKind
from dragoman.routing import Router, RoutingKey
from dragoman.types import ConstraintFormat

# Options.


class RemoteOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    """Public name of the model; default its name at the upstreams."""
    model: str | None = None
    """Name of the model at the upstreams; default their first."""
    key: str | None = None
    """API key of the upstreams."""
    context: int | None = None
    """Maximum tokens of one sequence; default what the upstreams report."""
    connect_s: float = 5.0
    """Seconds to wait for a connection."""
    silence_s: float = 600.0
    """Seconds without data after which a request to an upstream fails."""
    check_s: float = 5.0
    """Seconds between health checks of the upstreams."""
    modalities: tuple[MediaKind, ...] | None = None
    """Media kinds that the model takes besides text; default what the upstreams report."""
    tries: int = 3
    """Attempts for each job, at different upstreams if possible."""
    resume: bool = True
    """Whether an answer continues at another upstream from its tokens so far, if its own upstream fails."""


# Capabilities of a server, probed once with a request for one token.


Server: TypeAlias = Literal["dragoman", "vllm", "other"]
_SAMPLE = "The quick brown fox, 12 + 30 = 42: naïve Grüße!\n"
_STANDARD = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs"}
)
"""Fields that every server of this API supports."""
_UNSUPPORTED: Mapping[Server, frozenset[str]] = {
    # The first cannot be streamed; the second are ids here, but texts in the API.
    "dragoman": frozenset({"prompt_logprobs", "bad_words"}),
    "vllm": frozenset({"prompt_logprobs", "bad_words", "typical_p", "reuse_prefix"}),
    "other": frozenset(OPTIONAL_FIELDS) - _STANDARD,
}
_SOURCES: Mapping[Server, tuple[ConstraintFormat, ...]] = {
    "dragoman": ("json_schema", "regex", "choice", "gbnf", "lark"),
    # The formats that its default backend reads.
    "vllm": ("json_schema", "regex", "choice", "gbnf", "structural_tag"),
    "other": (),
}


class BadUpstream(SettingsError):
    """A server that cannot be used as an upstream."""


class UpstreamTraits(Struct, frozen=True, kw_only=True):
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
    def sources(self) -> tuple[ConstraintFormat, ...]:
        return _SOURCES[self.server]

    def like(self, other: "UpstreamTraits") -> bool:
        """Whether a job for one can be sent to the other."""
        mine, theirs = ((t.server, t.model, t.takes_ids, t.gives_ids) for t in (self, other))
        return mine == theirs


async def probe_upstream(client: AsyncClient, tokenizer: Tokenizer, model: str | None) -> UpstreamTraits:
    """Probe a server. Raises ClientError if it does not answer, and BadUpstream if it cannot be used."""
    models = await client.models()
    chosen = _choose(models, model)
    takes = gives = False
    if isinstance(tokenizer, FallbackTokenizer):
        await _try_text(client, chosen["id"])
    else:
        await _check_tokenizer(client, tokenizer, chosen["id"])
        takes, gives = await _ids(client, tokenizer, chosen["id"])
    owner = chosen.get("owned_by") if takes else None
    return UpstreamTraits(
        server="dragoman" if owner == "dragoman" else "vllm" if owner == "vllm" and gives else "other",
        model=chosen["id"],
        max_model_len=_length(chosen),
        adapters=tuple(one["id"] for one in models if one.get("parent") == chosen["id"]),
        takes_ids=takes,
        gives_ids=gives,
        modalities=await find_modalities(client, chosen),
    )


def _choose(models: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    fields = next((one for one in models if name is None or one["id"] == name), None)
    if fields is None:
        known = ", ".join(one["id"] for one in models) or "none"
        raise BadUpstream(f"It has no model {name or ''}; available: {known}.")
    return fields


def _length(model: dict[str, Any]) -> int | None:
    """Return the context length, under its common name or llama-server's."""
    meta = model.get("meta")
    value = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return value if isinstance(value, int) else None


async def _check_tokenizer(client: AsyncClient, tokenizer: Tokenizer, model: str) -> None:
    """Compare the tokenizers, if the server can be asked: with different ones, answers would be nonsense."""
    body = {"model": model, "prompt": _SAMPLE, "add_special_tokens": False}
    try:
        reply = await client.request("POST", "/tokenize", body)
    except ClientError:
        return
    theirs = reply.body.get("tokens") if isinstance(reply.body, dict) else None
    if theirs and theirs != tokenizer.encode(_SAMPLE):
        raise BadUpstream("It has a different tokenizer; pass the matching one with --tokenizer.")


async def _ids(client: AsyncClient, tokenizer: Tokenizer, model: str) -> tuple[bool, bool]:
    """Probe whether it takes prompts as ids, and whether it returns the ids of its answers."""
    try:
        answer = await client.completions(
            tokenizer.encode("Hello"), **_asked(model), return_token_ids=True
        ).answer()
        return True, bool(answer.ids)
    except StatusError as refused:
        if refused.context.status not in (400, 422):
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
"""Seconds for the first probe, which generates a token: a server that has just started may be slow."""
MISSES = 2
"""Consecutive health checks that may time out: a server under load may be late once."""
FAILURES = 3
"""Consecutive failed answers after which an upstream counts as down."""
LONGEST_PAUSE_S = 60.0
_TICK_S = 0.01
"""Margin by which a timer is late, so that the clock has passed its time."""


class Upstream:
    """One server. `alive`: it was up at the last check; `ready`: it accepts new work."""

    def __init__(self, url: str, options: RemoteOptions, router: Router) -> None:
        self._options = options
        self._router = router
        self._connect(url)
        self.url = self.client.url
        self.alive = False
        self.ready = True
        self.traits: UpstreamTraits | None = None
        self.down_reason = ""
        """Why it was last marked down."""
        self._missed = 0
        self._failures = 0
        """Consecutive failures."""
        self._out = 0
        """How often it was marked down for failures since its last successful answer."""
        self._rests_until = 0.0
        """End of the pause that it has requested with Retry-After."""
        router.add(self.url)
        router.drain(self.url)

    def _connect(self, url: str) -> None:
        # No retries there: this pool decides whether another upstream is better.
        timeouts = Timeouts(connect=self._options.connect_s, read=self._options.silence_s)
        self.client = AsyncClient(url, self._options.key, timeouts=timeouts, retries=0)
        self.lines = ConnectionPool(self.client.setup, self._options.silence_s)

    async def restart(self) -> None:
        """Close the connections, which belong to the event loop that made them, and create new clients."""
        self.lines.close()
        await self.client.aclose()
        self._connect(self.url)

    @property
    def pause_s(self) -> float:
        """Seconds before the next check: longer for an upstream that passes checks but fails requests."""
        return min(self._options.check_s * 2.0**self._out, max(LONGEST_PAUSE_S, self._options.check_s))

    @property
    def running(self) -> int:
        return self._router.running(self.url)

    def mark_up(self, *, ready: bool = True) -> None:
        if not self.alive:
            logger.info("Upstream %s is up", self.url)
        elif ready != self.ready:
            logger.info("Upstream %s %s", self.url, "is ready" if ready else "accepts no new work")
        self.alive, self.ready, self._missed = True, ready, 0
        self._settle()

    def mark_unanswered(self) -> None:
        self._missed += 1
        if not self.alive or self._missed >= MISSES:
            self.mark_down("It does not answer in time.")
            # It may hang with all connections open: only requests that still receive data continue.
            self.lines.give_up(self._options.connect_s)

    @property
    def backoff_s(self) -> float:
        """Seconds left of the pause that it has requested."""
        return max(self._rests_until - monotonic(), 0.0)

    def _rest(self, seconds: float) -> None:
        seconds = min(seconds, LONGEST_PAUSE_S)
        self._rests_until = max(self._rests_until, monotonic() + seconds)
        self._settle()
        asyncio.get_running_loop().call_later(seconds + _TICK_S, self._settle)

    def _settle(self) -> None:
        self._router.drain(self.url, not (self.alive and self.ready and not self.backoff_s))

    def record_success(self) -> None:
        self._failures = self._out = 0

    def record_failure(self, problem: ClientError) -> None:
        """Note that it failed a request."""
        if isinstance(problem, ConnectionFailed):
            self.mark_down(problem)
            return
        logger.warning("Upstream %s failed a request: %s", self.url, problem)
        if isinstance(problem, StatusError) and problem.context.status in (429, 503):
            if problem.reply.retry_after:
                self._rest(problem.reply.retry_after)
                return
            if problem.context.status == 429:
                return
        self._failures += 1
        if self._failures >= FAILURES:
            self._failures, self._out = 0, self._out + 1
            self.mark_down(f"It has failed {FAILURES} times in a row.")

    def mark_down(self, why: object) -> None:
        if self.alive or str(why) != self.down_reason:
            logger.warning("Upstream %s is down: %s", self.url, why)
        self.alive, self.down_reason = False, str(why)
        # When it is up again, its prefix cache may be empty.
        self._router.restart(self.url)
        self._settle()

    def describe(self) -> dict[str, Any]:
        state = "out" if not self.alive else "draining" if not self.ready else "ready"
        state = "resting" if state == "ready" and self.backoff_s else state
        return {"url": hide_password(self.url), "status": state, "running": self.running}


def hide_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class UpstreamPool:
    def __init__(self, urls: Sequence[str], tokenizer: Tokenizer, options: RemoteOptions) -> None:
        self.router = Router()
        self.upstreams = [Upstream(url, options, self.router) for url in dict.fromkeys(urls)]
        self._by_url = {upstream.url: upstream for upstream in self.upstreams}
        self._tokenizer = tokenizer
        self._options = options
        self._kind: UpstreamTraits | None = None
        """Traits of the first upstream that was found."""

    def pick(self, key: RoutingKey, tried: Collection[Upstream] = ()) -> Upstream:
        """Select an upstream for a request; those in `tried` come last."""
        ranked = self.router.rank(key, [upstream.url for upstream in tried])
        living = [self._by_url[name] for name in (*ranked, *self._by_url) if self._by_url[name].alive]
        if not living:
            raise Unavailable("No upstream answers; retry soon.")
        awake = next((upstream for upstream in living if not upstream.backoff_s), None)
        if awake is None:
            soonest = ceil(min(upstream.backoff_s for upstream in living))
            raise Overloaded("All upstreams are busy; retry soon.", retry_after=soonest)
        return awake

    async def look_at_all(self) -> None:
        await asyncio.gather(*(self._look(upstream) for upstream in self.upstreams))

    async def watch(self) -> None:
        """Check all upstreams for ever. One that is down comes back when it answers."""
        await asyncio.gather(*(self._watch(upstream) for upstream in self.upstreams))

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(upstream.pause_s)
            await self._look(upstream)

    async def _look(self, upstream: Upstream) -> None:
        """Check an upstream; one that was not up is probed in full, as it may run another model now."""
        try:
            async with asyncio.timeout(self._options.connect_s if upstream.alive else FIRST_LOOK_S):
                ready = True
                if upstream.alive:
                    await upstream.client.models()
                    ready = await _is_ready(upstream)
                else:
                    traits = await probe_upstream(upstream.client, self._tokenizer, self._options.model)
                    upstream.traits = self._fitting(traits)
        except (ClientTimeout, TimeoutError):
            upstream.mark_unanswered()
        except (ClientError, BadUpstream) as problem:
            upstream.mark_down(problem)
        else:
            upstream.mark_up(ready=ready)

    def _fitting(self, traits: UpstreamTraits) -> UpstreamTraits:
        self._kind = self._kind or traits
        if not traits.like(self._kind):
            raise BadUpstream(
                "It differs from the other upstreams: all must run the same kind of server and model."
            )
        return traits


async def _is_ready(upstream: Upstream) -> bool:
    """Whether it accepts new work: a server that is about to stop reports that it does not."""
    if upstream.traits is None or upstream.traits.server != "dragoman":
        return True
    try:
        await upstream.client.request("GET", "/ready")
    except StatusError as refused:
        return refused.context.status != 503
    return True
