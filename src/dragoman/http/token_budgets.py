"""Token budgets of API keys, per minute and per day, for prompts and answers of all APIs.

The minute's budget is a token bucket: full at first, refilled by a sixtieth each second. The day's is a sum
that restarts at midnight UTC. Before a turn begins, its prompt and its answer are reserved; the answer by the
request's limit (`max_tokens`) or by a default. When the turn is over, however it ended, the tokens used are
charged instead. An answer longer than its reservation leaves a debt, which later requests wait for. A key
therefore never uses more in any period than its budgets for it, plus one answer.

Servers with the same keys may exchange what these used (`local_usage`, `merge_remote_usage`). Use elsewhere
is charged here once it is known: all servers together give a key no more than its budgets, plus what they
reserve between two messages.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct, field

from dragoman.errors import BadRequest, Overloaded
from dragoman.http.key_file import ApiKey

logger = logging.getLogger("dragoman.http")

DAY_S = 24 * 3600
MINUTE_S = 60
USUAL_ANSWER = 1024
"""Tokens reserved for an answer without a limit."""
SAVE_S = 5.0
"""Seconds between saves of the day's use, which limit what a crash can lose."""
FILE = "token-budgets.json"


Taken: TypeAlias = tuple[int, dict[str, int]]
"""A day, and what keys have used on it so far."""


class DailyUsage(Struct):
    """The use of one day by key hash, as it is stored."""

    day: int = 0
    taken: dict[str, int] = field(default_factory=dict)


class MinuteBucket:
    """The minute's budget of one key."""

    def __init__(self, now: float) -> None:
        self.level = math.inf
        """Remaining tokens; below 0 if more were used than reserved."""
        self.at = now

    def fill(self, key: ApiKey, now: float) -> None:
        most = key.tokens_per_minute
        grown = 0.0 if most is None else max(0.0, now - self.at) * most / MINUTE_S
        self.level = math.inf if most is None else min(most, self.level + grown)
        self.at = now


class TokenBudgets:
    """The budgets of all keys; `reserve` returns a function to report the tokens used.

    `key_of` is called each time, because the key file may change.
    """

    def __init__(
        self,
        key_of: Callable[[str], ApiKey | None],
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key_of = key_of
        self._clock = clock
        self._file = None if folder is None else folder / FILE
        self._accounts: dict[str, MinuteBucket] = {}
        self._book = DailyUsage()
        self._own = DailyUsage()
        """The day's use on this server alone."""
        self._heard: dict[str, Taken] = {}
        """The day's use on other servers."""
        self._dirty = False
        self._saving: asyncio.TimerHandle | None = None

    # Remaining tokens.

    def check(self, key: ApiKey) -> None:
        """Raise if a key has nothing left; called before anything of a request is read."""
        self._check(key, 1)

    def _check(self, key: ApiKey, tokens: int) -> None:
        now = self._clock()
        account = self._account(key, now)
        if key.tokens_per_minute is not None and account.level < tokens:
            wait = (tokens - account.level) * MINUTE_S / key.tokens_per_minute
            raise _refusal(key.tokens_per_minute, "minute", tokens, math.floor(account.level), wait)
        if key.tokens_per_day is not None:
            left = key.tokens_per_day - self._book.taken.get(key.sha256, 0)
            if left < tokens:
                raise _refusal(key.tokens_per_day, "day", tokens, left, DAY_S - now % DAY_S)

    def rates(self, key: ApiKey) -> dict[bytes, bytes]:
        """Return OpenAI's rate-limit headers for tokens, for the budget with less left."""
        now = self._clock()
        level = self._account(key, now).level
        items: list[tuple[float, int, float]] = []
        if (most := key.tokens_per_minute) is not None:
            items.append((level, most, (most - level) * MINUTE_S / most))
        if (most := key.tokens_per_day) is not None:
            items.append((most - self._book.taken.get(key.sha256, 0), most, DAY_S - now % DAY_S))
        left, most, reset = min(items)
        return {
            b"x-ratelimit-limit-tokens": b"%d" % most,
            b"x-ratelimit-remaining-tokens": b"%d" % max(0, math.floor(left)),
            b"x-ratelimit-reset-tokens": b"%ds" % math.ceil(reset),
        }

    def _account(self, key: ApiKey, now: float) -> MinuteBucket:
        if (day := int(now // DAY_S)) > self._book.day:
            self._book = DailyUsage(day)
        account = self._accounts.get(key.sha256)
        if account is None:
            account = self._accounts[key.sha256] = MinuteBucket(now)
        account.fill(key, now)
        return account

    # Use.

    def reserve(self, owner: str, prompt: int, answer: int | None) -> Callable[[int], None] | None:
        """Reserve tokens; raise if too few are left. Call the result with the tokens used; None means no
        budget.

        `answer` is the request's limit for the answer, if it has one.
        """
        key = self._key_of(owner)
        if key is None or not key.is_limited:
            return None
        least = min(each for each in (key.tokens_per_minute, key.tokens_per_day) if each is not None)
        if prompt > least:
            raise BadRequest(
                f"The prompt has {prompt} tokens, more than this API key's budget of {least}; shorten it.",
                code="token_budget_too_small",
            )
        tokens = min(prompt + (USUAL_ANSWER if answer is None else answer), least)
        self._check(key, tokens)
        self._take(key.sha256, tokens)
        day = self._book.day

        def settle(used: int) -> None:
            # A reservation of a past day is settled on that day only.
            self._take(owner, used - tokens, of_day=day == self._book.day)

        return settle

    def _take(self, owner: str, tokens: int, *, of_day: bool = True) -> None:
        if (account := self._accounts.get(owner)) is not None:
            account.level -= tokens
        if of_day:
            self._count(self._book, owner, tokens)
            if self._own.day != self._book.day:
                self._own = DailyUsage(self._book.day)
            self._count(self._own, owner, tokens)
            self._save_soon()

    def _count(self, book: DailyUsage, owner: str, tokens: int) -> None:
        book.taken[owner] = max(0, book.taken.get(owner, 0) + tokens)

    # Use on other servers.

    def local_usage(self) -> Taken:
        return self._own.day, dict(self._own.taken)

    def merge_remote_usage(self, others: Mapping[str, Taken]) -> None:
        """Charge what other servers report for today, by server name; only the difference to earlier reports
        counts."""
        now = self._clock()
        today = int(now // DAY_S)
        for server, (day, taken) in others.items():
            if day != today:
                self._heard.setdefault(server, (0, {}))
                continue
            known_day, known = self._heard.get(server, (0, {}))
            before = known if known_day == day else {}
            for owner, tokens in taken.items():
                key = self._key_of(owner)
                if key is None or (news := tokens - before.get(owner, 0)) == 0:
                    continue
                account = self._account(key, now)
                self._count(self._book, owner, news)
                if server in self._heard:
                    # The first report of a server does not say how much of it is of the last minute.
                    account.level -= news
            self._heard[server] = day, dict(taken)

    def forget(self, known: Callable[[str], object]) -> None:
        """Drop the minute budgets of keys that are gone; their use of the day stays."""
        self._accounts = {owner: each for owner, each in self._accounts.items() if known(owner)}

    # Storage.

    def load(self) -> None:
        if self._file is None:
            return
        try:
            self._book = msgspec.json.decode(self._file.read_bytes(), type=DailyUsage)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError):
            logger.warning("Cannot read %s; the day's token budgets restart", self._file)

    def _save_soon(self) -> None:
        self._dirty = True
        if self._file is not None and self._saving is None:
            with suppress(RuntimeError):
                self._saving = asyncio.get_running_loop().call_later(SAVE_S, self._save)

    def _save(self) -> None:
        self._saving = None
        asyncio.get_running_loop().run_in_executor(None, self.save)

    def save(self) -> None:
        """Write the file atomically."""
        if self._file is None or not self._dirty:
            return
        self._dirty = False
        other = self._file.with_suffix(".new")
        try:
            other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            other.write_bytes(msgspec.json.encode(self._book))
            os.replace(other, self._file)
        except OSError:
            logger.warning("Cannot write %s; a restart would lose today's token use", self._file)

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        await asyncio.to_thread(self.save)


def _refusal(most: int, period: str, tokens: int, left: float, wait: float) -> Overloaded:
    needs = f"; this request needs {tokens}" if tokens > 1 else ""
    return Overloaded(
        f"This API key has {max(0, int(left))} of {most} tokens per {period} left{needs}.",
        code="rate_limit_exceeded",
        retry_after=max(1, math.ceil(wait)),
    )
