"""Tokens that a key may take in a minute and in a day."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.errors import BadRequest, Overloaded
from dragoman.http import token_budgets
from dragoman.http.key_file import ApiKey, add_key, describe_key, hash_key
from dragoman.http.token_budgets import DAY_S, USUAL_ANSWER, TokenBudgets
from tests.http.conftest import Serve
from tests.support.http import HELLO, chunks, post
from tests.support.laws import examples
from tests.support.wait import becomes

KEY, FREE = "sk-limited-0123456789-0123", "sk-free-0123456789-0123456"
CHAT = "/v1/chat/completions"
OWNER = "a" * 64
NOON = 1000 * DAY_S + DAY_S / 2


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


def budgets(
    minute: int | None = None, day: int | None = None, folder: Path | None = None
) -> tuple[TokenBudgets, Clock]:
    key, clock = ApiKey(name="x", sha256=OWNER, tokens_per_minute=minute, tokens_per_day=day), Clock()
    return TokenBudgets(lambda owner: key if owner == OWNER else None, folder, clock), clock


def left(result: TokenBudgets) -> int:
    key = result._key_of(OWNER)
    assert key is not None
    return int(result.rates(key)[b"x-ratelimit-remaining-tokens"])


def take(result: TokenBudgets, tokens: int, used: int | None = None) -> None:
    settle = result.reserve(OWNER, tokens, 0)
    assert settle is not None
    settle(tokens if used is None else used)


def test_a_minute_fills_up_again() -> None:
    result, clock = budgets(minute=60)
    take(result, 60)
    with pytest.raises(Overloaded, match="0 of 60 tokens per minute") as refused:
        take(result, 10)
    assert refused.value.retry_after == 10
    clock.now += 10
    take(result, 10)


def test_a_day_begins_anew_at_midnight() -> None:
    result, clock = budgets(day=100)
    take(result, 100)
    with pytest.raises(Overloaded, match="100 tokens per day") as refused:
        take(result, 1)
    assert refused.value.retry_after == DAY_S // 2
    clock.now += DAY_S / 2
    take(result, 100)


def test_what_was_set_aside_and_not_used_is_given_back() -> None:
    result, _ = budgets(day=USUAL_ANSWER + 10)
    settle = result.reserve(OWNER, 10, None)
    assert settle is not None and left(result) == 0
    settle(12)
    assert left(result) == USUAL_ANSWER - 2


def test_what_came_to_be_longer_is_a_debt() -> None:
    result, clock = budgets(minute=60)
    take(result, 10, used=120)
    clock.now += 59
    with pytest.raises(Overloaded):
        take(result, 1)
    clock.now += 2
    take(result, 1)


def test_a_prompt_that_can_never_fit_is_no_reason_to_try_again() -> None:
    result, _ = budgets(minute=60, day=1000)
    with pytest.raises(BadRequest, match="budget of 60"):
        result.reserve(OWNER, 61, 0)
    # An answer may be asked for that is longer than there is.
    assert result.reserve(OWNER, 60, 1000) is not None


def test_what_is_set_aside_on_one_day_is_not_the_next_one_s() -> None:
    result, clock = budgets(day=100)
    settle = result.reserve(OWNER, 50, 0)
    clock.now += DAY_S
    assert settle is not None and left(result) == 100
    settle(70)
    assert left(result) == 100


def test_a_day_survives_a_restart(tmp_path: Path) -> None:
    result, _ = budgets(day=100, folder=tmp_path / "new")
    take(result, 40)
    result.save()
    again, clock = budgets(day=100, folder=tmp_path / "new")
    again.load()
    assert left(again) == 60
    clock.now += DAY_S
    assert left(again) == 100


@pytest.mark.parametrize("text", [b"", b"{", b'{"day": "x"}', b"[]"])
def test_a_file_that_is_broken_is_no_reason_not_to_start(tmp_path: Path, text: bytes) -> None:
    (tmp_path / token_budgets.FILE).write_bytes(text)
    result, _ = budgets(day=100, folder=tmp_path)
    result.load()
    assert left(result) == 100


@examples(200)
@given(
    st.integers(10, 500),
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 120), st.integers(0, 60), st.integers(0, 90))),
)
def test_over_any_time_no_more_is_taken_than_the_budget_gives(
    minute: int, asked: list[tuple[float, int, int, int]]
) -> None:
    """And what one answer was longer than it was set aside for, which the next ones wait for."""
    result, clock = budgets(minute=minute)
    taken, longest = 0, 0
    for pause, prompt, answer, number in asked:
        clock.now += pause
        try:
            settle = result.reserve(OWNER, prompt, answer)
        except (Overloaded, BadRequest):
            continue
        assert settle is not None
        settle(prompt + number)
        taken += prompt + number
        longest = max(longest, prompt + number)
    assert taken <= minute * (1 + (clock.now - NOON) / 60) + longest + 1


# Over HTTP


@pytest.fixture
def limited(serve: Serve, tmp_path: Path) -> Callable[..., str]:
    """The address of a server with one key that has these budgets, and one that has none."""

    def started(engine: ScriptedEngine | None = None, **budget: int) -> str:
        file = str(tmp_path / "keys")
        add_key(file, describe_key(KEY, name="limited", **budget))
        add_key(file, describe_key(FREE, name="free"))
        engine = engine or ScriptedEngine(say("hello"))
        return serve(engine, store="memory", api_key_file=file)

    return started


def ask(url: str, body: dict[str, Any] | None = None, path: str = CHAT, key: str = KEY) -> httpx.Response:
    return post(url, path, {**(body or HELLO)}, authorization=f"Bearer {key}")


def used(reply: httpx.Response) -> int:
    return int(reply.json()["usage"]["total_tokens"])


def remaining(reply: httpx.Response) -> int:
    return int(reply.headers["x-ratelimit-remaining-tokens"])


def test_answers_are_counted_and_then_refused(limited: Callable[..., str]) -> None:
    url = limited(tokens_per_day=60)
    first = ask(url, HELLO | {"max_tokens": 5})
    assert first.status_code == 200 and remaining(first) == 60
    assert first.headers["x-ratelimit-limit-tokens"] == "60"
    second = ask(url, HELLO | {"max_tokens": 5})
    assert remaining(second) == 60 - used(first)
    while (reply := ask(url, HELLO | {"max_tokens": 5})).status_code == 200:
        pass
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert 1 <= int(reply.headers["retry-after"]) <= DAY_S
    # Others are none the poorer, and have no budget to tell of.
    free = ask(url, key=FREE)
    assert free.status_code == 200 and "x-ratelimit-limit-tokens" not in free.headers


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        ("/v1/messages", {**HELLO, "max_tokens": 5}, "anthropic-ratelimit-tokens-remaining"),
        ("/v1/responses", {"input": "hi"}, "x-ratelimit-remaining-tokens"),
        ("/v1/completions", {"prompt": "hi"}, "x-ratelimit-remaining-tokens"),
        ("/api/chat", {**HELLO, "stream": False}, "x-ratelimit-remaining-tokens"),
    ],
)
def test_every_api_counts_and_refuses_in_its_own_words(
    limited: Callable[..., str], path: str, body: dict[str, Any], header: str
) -> None:
    url = limited(tokens_per_day=40)
    named = {
        **body,
        "model": httpx.get(f"{url}/v1/models", headers={"x-api-key": FREE}).json()["data"][0]["id"],
    }
    replies = [ask(url, named, path) for _ in range(25)]
    statuses = [reply.status_code for reply in replies]
    assert statuses[0] == 200 and statuses[-1] == 429 and sorted(statuses) == statuses
    assert replies[0].headers[header] == "40"
    assert "tokens per day" in replies[-1].text


def test_a_stream_that_is_left_counts_what_it_took(limited: Callable[..., str]) -> None:
    engine = ScriptedEngine(say("x" * 1000), interval=0.005)
    url = limited(engine, tokens_per_day=100_000)
    with httpx.stream(
        "POST", url + CHAT, json={**HELLO, "stream": True, "max_tokens": 900}, headers={"x-api-key": KEY}
    ) as stream:
        items = stream.iter_raw()
        next(items)
        # All that it might take is set aside meanwhile.
        assert 99_000 < remaining(ask(url, HELLO | {"max_tokens": 1})) < 99_100
    assert becomes(lambda: engine.live == 0)
    assert remaining(ask(url, HELLO | {"max_tokens": 1})) > 99_500


def test_what_is_refused_is_refused_before_a_stream_begins(limited: Callable[..., str]) -> None:
    url = limited(tokens_per_minute=30)
    body = {**HELLO, "stream": True, "max_tokens": 10}
    first, second = ask(url, body), ask(url, body)
    assert len(chunks(first)) > 1
    assert second.status_code == 429 and 1 <= int(second.headers["retry-after"]) <= 60


class EmbeddingEngine(ScriptedEngine):
    async def embed(self, prompts: Any) -> list[list[float]]:
        return [[1.0, 2.0] for _ in prompts]


def test_vectors_are_counted(limited: Callable[..., str]) -> None:
    card = ModelCard(name="m", max_model_len=4096, templates={"default": CHATML})
    url = limited(EmbeddingEngine(say("hi"), card=card), tokens_per_day=25)
    asked = [ask(url, {"input": "0123456789"}, "/v1/embeddings").status_code for _ in range(3)]
    assert asked == [200, 200, 429]


def test_a_response_in_the_background_is_its_keys(limited: Callable[..., str]) -> None:
    url = limited(tokens_per_day=10_000)
    reply = ask(url, {"input": "hi", "background": True}, "/v1/responses")
    assert reply.status_code == 200
    assert becomes(lambda: remaining(ask(url, HELLO | {"max_tokens": 1})) < 10_000)


def test_a_budget_that_is_changed_holds_at_once(limited: Callable[..., str], tmp_path: Path) -> None:
    url = limited(tokens_per_day=10_000)
    assert ask(url).status_code == 200
    file = tmp_path / "keys"
    file.write_text(file.read_text().replace('"tokens_per_day":10000', '"tokens_per_day":20'))
    time.sleep(0.06)
    assert ask(url).status_code == 429
    assert hash_key(KEY) in file.read_text()


# Several servers, which tell each other.


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), max_size=30), st.integers(1, 5), st.booleans()
)
@examples(100)
def test_servers_that_tell_each_other_give_no_more_than_the_budget_and_a_beat(
    asked: list[tuple[int, int]], every: int, day: bool
) -> None:
    """What is given beyond the budget is what was set aside since they last heard of each other."""
    minute, of_day = (None, 1000) if day else (1000, None)
    servers = [budgets(minute, of_day)[0] for _ in range(3)]
    for server in servers:
        server.merge_remote_usage({str(number): other.local_usage() for number, other in enumerate(servers)})
    value, since, most = 0, 0, 0
    for turn, (number, tokens) in enumerate(asked):
        if turn % every == 0:
            for own, server in enumerate(servers):
                fields = {str(at): other.local_usage() for at, other in enumerate(servers) if at != own}
                # Told twice is told once.
                server.merge_remote_usage(fields)
                server.merge_remote_usage(fields)
            since = 0
        try:
            settle = servers[number].reserve(OWNER, 0, tokens)
        except Overloaded:
            continue
        assert settle is not None
        settle(tokens)
        value, since = value + tokens, since + tokens
        most = max(most, since)
    assert value <= 1000 + most


def test_a_server_that_comes_later_hears_what_the_day_has_taken() -> None:
    first, _ = budgets(day=1000, minute=1000)
    settle = first.reserve(OWNER, 0, 900)
    assert settle is not None
    settle(900)
    second, _ = budgets(day=1000, minute=1000)
    second.merge_remote_usage({"first": first.local_usage()})
    with pytest.raises(Overloaded, match="day"):
        second.reserve(OWNER, 0, 200)
    assert second.reserve(OWNER, 0, 100) is not None
