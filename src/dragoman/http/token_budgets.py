"""Tokens that a key may take, in a minute and in a day: of prompts and of answers, whatever API they come by.

A minute's budget is a bucket: it is full at first, and a sixtieth of it comes back each second. A day's
is a sum that begins anew at midnight, UTC. Before a turn begins, its prompt is set aside and so is its
answer, as long as the client lets it be (`max_tokens`), or else as long as answers usually are; when it is
over, however it ended, what it took is what counts. An answer that grew longer than was set aside for it is
a debt, which the next ones wait for. So what a key takes over some time is never more than its budgets give
for that time, and one answer.

Servers that have the same keys may tell each other what those have taken here (`own_taken`, `hear`). What is
taken elsewhere counts as if it had been taken here, once it is heard of: all servers together give a key no
more than its budgets, and what they set aside between two such messages.
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
"""Tokens that are set aside for an answer of which nobody says how long it may be."""
SAVE_S = 5.0
"""What a day has taken is written down this often: a crash forgets no more of it."""
FILE = "token-budgets.json"


Taken: TypeAlias = tuple[int, dict[str, int]]
"""A day, and what keys have taken on it so far."""


class DayBook(Struct):
    """What was taken on one day, by the hashes of keys; as it is kept."""

    day: int = 0
    taken: dict[str, int] = field(default_factory=dict)


class TokenAccount:
    """What one key has left of its minute."""

    def __init__(self, now: float) -> None:
        self.level = math.inf
        """Below nothing where more was taken than set aside."""
        self.at = now

    def fill(self, key: ApiKey, now: float) -> None:
        most = key.tokens_per_minute
        grown = 0.0 if most is None else max(0.0, now - self.at) * most / MINUTE_S
        self.level = math.inf if most is None else min(most, self.level + grown)
        self.at = now


class TokenBudgets:
    """`reserve` sets tokens of a key aside, and gives what is to be told how many it took.

    `key_of` is asked each time: what the file says of a key may change, and a key may go.
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
        self._accounts: dict[str, TokenAccount] = {}
        self._book = DayBook()
        self._own = DayBook()
        """What was taken here, and not elsewhere."""
        self._heard: dict[str, Taken] = {}
        """Of other servers."""
        self._dirty = False
        self._saving: asyncio.TimerHandle | None = None

    # What is left

    def check(self, key: ApiKey) -> None:
        """At the door, before anything of a request is read: raises where nothing is left."""
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
        """What OpenAI's headers say of tokens: of the budget of which less is left."""
        now = self._clock()
        level = self._account(key, now).level
        told: list[tuple[float, int, float]] = []
        if (most := key.tokens_per_minute) is not None:
            told.append((level, most, (most - level) * MINUTE_S / most))
        if (most := key.tokens_per_day) is not None:
            told.append((most - self._book.taken.get(key.sha256, 0), most, DAY_S - now % DAY_S))
        left, most, reset = min(told)
        return {
            b"x-ratelimit-limit-tokens": b"%d" % most,
            b"x-ratelimit-remaining-tokens": b"%d" % max(0, math.floor(left)),
            b"x-ratelimit-reset-tokens": b"%ds" % math.ceil(reset),
        }

    def _account(self, key: ApiKey, now: float) -> TokenAccount:
        if (day := int(now // DAY_S)) > self._book.day:
            self._book = DayBook(day)
        account = self._accounts.get(key.sha256)
        if account is None:
            account = self._accounts[key.sha256] = TokenAccount(now)
        account.fill(key, now)
        return account

    # What is taken

    def reserve(self, owner: str, prompt: int, answer: int | None) -> Callable[[int], None] | None:
        """Raises where there is not so much left. What is given back is told what was taken; None: no matter.

        `answer`: how long it may be at most, if somebody says so.
        """
        key = self._key_of(owner)
        if key is None or not key.is_limited:
            return None
        least = min(each for each in (key.tokens_per_minute, key.tokens_per_day) if each is not None)
        if prompt > least:
            raise BadRequest(
                f"This prompt has {prompt} tokens, and the key may never take more than {least}; shorten it.",
                code="token_budget_too_small",
            )
        tokens = min(prompt + (USUAL_ANSWER if answer is None else answer), least)
        self._check(key, tokens)
        self._take(key.sha256, tokens)
        day = self._book.day

        def settle(used: int) -> None:
            # What was set aside on a day that is over is that day's.
            self._take(owner, used - tokens, of_day=day == self._book.day)

        return settle

    def _take(self, owner: str, tokens: int, *, of_day: bool = True) -> None:
        if (account := self._accounts.get(owner)) is not None:
            account.level -= tokens
        if of_day:
            self._count(self._book, owner, tokens)
            if self._own.day != self._book.day:
                self._own = DayBook(self._book.day)
            self._count(self._own, owner, tokens)
            self._save_soon()

    def _count(self, book: DayBook, owner: str, tokens: int) -> None:
        book.taken[owner] = max(0, book.taken.get(owner, 0) + tokens)

    # What is taken elsewhere

    def own_taken(self) -> Taken:
        return self._own.day, dict(self._own.taken)

    def hear(self, others: Mapping[str, Taken]) -> None:
        """By the names of servers: all that each has given today, of which the news count."""
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
                    # Of one that was not heard of before, nobody knows how much is of the last minute.
                    account.level -= news
            self._heard[server] = day, dict(taken)

    def forget(self, known: Callable[[str], object]) -> None:
        """Of keys that are gone: they have no minute any more, but what they took of the day stays."""
        self._accounts = {owner: each for owner, each in self._accounts.items() if known(owner)}

    # What is kept

    def load(self) -> None:
        if self._file is None:
            return
        try:
            self._book = msgspec.json.decode(self._file.read_bytes(), type=DayBook)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError):
            logger.warning("%s cannot be read; the day's budgets of tokens begin anew", self._file)

    def _save_soon(self) -> None:
        self._dirty = True
        if self._file is not None and self._saving is None:
            with suppress(RuntimeError):
                self._saving = asyncio.get_running_loop().call_later(SAVE_S, self._save)

    def _save(self) -> None:
        self._saving = None
        asyncio.get_running_loop().run_in_executor(None, self.save)

    def save(self) -> None:
        """In whole or not at all."""
        if self._file is None or not self._dirty:
            return
        self._dirty = False
        other = self._file.with_suffix(".new")
        try:
            other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            other.write_bytes(msgspec.json.encode(self._book))
            os.replace(other, self._file)
        except OSError:
            logger.warning("%s cannot be written: a restart would forget what keys took today", self._file)

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        await asyncio.to_thread(self.save)


def _refusal(most: int, period: str, tokens: int, left: float, wait: float) -> Overloaded:
    needs = f", and this request needs {tokens}" if tokens > 1 else ""
    return Overloaded(
        f"This key may take {most} tokens a {period}: {max(0, int(left))} of them are left{needs}.",
        code="rate_limit_exceeded",
        retry_after=max(1, math.ceil(wait)),
    )
