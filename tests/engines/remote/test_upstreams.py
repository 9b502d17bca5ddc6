"""Several upstreams: who gets what, who is left out, and who comes back."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from dragoman.client.errors import BrokenStreamError, ErrorContext, Reply, StatusError
from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.remote.upstreams import FAILURES, Upstream, UpstreamPool
from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.errors import EngineFailed, Overloaded, Unavailable
from dragoman.http.server import background
from dragoman.routing import key_of_ids
from dragoman.settings import Settings
from dragoman.types import Job
from tests.engines.remote.support import QUICK, becomes, ids_of, job_of, run, serving, steps_of

LONG = [7] * 1024


def pool(count: int) -> UpstreamPool:
    """Upstreams that nobody has to answer for."""
    upstream_pool = UpstreamPool(
        [f"http://h{number}" for number in range(count)], ByteTokenizer(), RemoteOptions()
    )
    for upstream in upstream_pool.upstreams:
        upstream.mark_up()
    return upstream_pool


def pick(many: UpstreamPool, ids: Sequence[int] = (1, 2, 3), tried: Collection[Upstream] = ()) -> Upstream:
    key = key_of_ids(ids)
    chosen = many.pick(key, tried)
    many.router.begin(key, chosen.url)
    return chosen


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    many = pool(3)
    first = pick(many, [*LONG, 1])
    many.router.end(first.url)
    for number in range(3):
        assert pick(many, [*LONG, *range(number, number + 40)]) is first
    assert first.running == 3


def test_the_least_busy_is_asked() -> None:
    many = pool(3)
    many.router.set_load(many.upstreams[0].url, 2)
    many.router.set_load(many.upstreams[2].url, 1)
    assert pick(many) is many.upstreams[1]


def test_the_dead_are_left_out() -> None:
    many = pool(2)
    many.upstreams[0].mark_down("gone")
    assert pick(many) is many.upstreams[1]
    many.upstreams[1].mark_down("gone")
    with pytest.raises(Unavailable):
        pick(many)


def test_one_that_was_lost_has_forgotten() -> None:
    many = pool(2)
    first = pick(many, LONG)
    many.router.end(first.url)
    first.mark_down("gone")
    other = pick(many, LONG)
    first.mark_up()
    assert pick(many, LONG) is other


def test_one_that_has_failed_is_asked_again_only_if_there_is_no_other() -> None:
    many = pool(2)
    first, second = many.upstreams
    assert pick(many, tried=[first]) is second
    second.mark_down("gone")
    assert pick(many, tried=[first]) is first


def test_one_that_is_not_ready_gets_nothing_new_if_there_is_another() -> None:
    many = pool(2)
    first, second = many.upstreams
    first.mark_up(ready=False)
    assert {pick(many, [number]) for number in range(6)} == {second}
    second.mark_down("gone")
    assert pick(many) is first
    assert [one["status"] for one in (first.describe(), second.describe())] == ["draining", "out"]


def test_one_that_fails_again_and_again_is_left_out_for_longer_each_time() -> None:
    [upstream] = pool(1).upstreams
    broken = BrokenStreamError("It broke.", ErrorContext("POST"))
    pauses = []
    for _ in range(8):
        for _ in range(FAILURES):
            assert upstream.alive
            upstream.record_failure(broken)
        assert not upstream.alive
        pauses.append(upstream.pause_s)
        upstream.mark_up()
    assert pauses == [10, 20, 40, 60, 60, 60, 60, 60]
    upstream.record_success()
    assert upstream.pause_s == 5


def test_one_that_is_busy_has_not_failed() -> None:
    [upstream] = pool(1).upstreams
    for _ in range(2 * FAILURES):
        upstream.record_failure(StatusError(ErrorContext("POST", 429), None, Reply(status=429)))
    assert upstream.alive


def test_a_password_in_an_address_is_not_told() -> None:
    upstream_pool = UpstreamPool(["http://me:secret@h:1"], ByteTokenizer(), RemoteOptions())
    assert upstream_pool.upstreams[0].describe()["url"] == "http://h:1"


def served(engine: ScriptedEngine, stack: ExitStack, url: str = "") -> str:
    port = int(url.rpartition(":")[2]) if url else 0
    settings = Settings(port=port, store="none", shutdown_grace=0)
    return stack.enter_context(background(engine, settings))


def test_a_dead_upstream_is_left_out_and_comes_back() -> None:
    one, two = ScriptedEngine(say("one")), ScriptedEngine(say("two"))

    async def work(engine: RemoteEngine) -> None:
        await asyncio.to_thread(first.close)
        for _ in range(4):
            assert ids_of(await steps_of(engine, job_of())) == [*b"two", END_ID]
        assert await becomes(lambda: not engine.upstreams[0].alive)
        await asyncio.to_thread(served, one, again, urls[0])
        assert await becomes(lambda: engine.upstreams[0].alive)
        answers = {bytes(ids_of(await steps_of(engine, job_of([number])))[:3]) for number in range(40)}
        assert answers == {b"one", b"two"}

    with ExitStack() as first, ExitStack() as rest, ExitStack() as again:
        urls = [served(one, first), served(two, rest)]
        run(urls, work)


def test_an_upstream_that_dies_in_the_middle_ends_its_answers_and_no_others() -> None:
    def stuck(job: Job) -> Script:
        return say("xy") if bytes(job.prompt) == b"Hello" else say("xyz", fault="hang", fault_at=1)

    one, two = ScriptedEngine(stuck), ScriptedEngine(stuck)

    async def work(engine: RemoteEngine) -> None:
        begun: set[int] = set()

        async def listen(number: int) -> None:
            async for _ in engine.generate(job_of([number])):
                begun.add(number)

        jobs = [asyncio.create_task(listen(number)) for number in range(6)]
        # One that has not begun would be asked for elsewhere.
        await becomes(lambda: len(begun) == 6)
        broken, left = one.live, two.live
        assert broken
        await asyncio.to_thread(first.close)
        await becomes(lambda: sum(job.done() for job in jobs) == broken)
        assert {type(job.exception()) for job in jobs if job.done()} == {Unavailable}
        assert two.live == left
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    with ExitStack() as first, ExitStack() as rest:
        run([served(one, first), served(two, rest)], work, replace(QUICK, resume=False))


def test_one_that_comes_late_is_taken_in() -> None:
    one, two = ScriptedEngine(say("one")), ScriptedEngine(say("two"))

    async def work(engine: RemoteEngine) -> None:
        assert [upstream.alive for upstream in engine.upstreams] == [True, False]
        await asyncio.to_thread(served, two, late, url)
        assert await becomes(lambda: engine.upstreams[1].alive)

    with ExitStack() as early, ExitStack() as late:
        with ExitStack() as before:
            url = served(two, before)
        run([served(one, early), url], work)


def test_one_that_is_not_like_the_others_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    other = ScriptedEngine(say("x"))
    other.card.name = "another"
    with serving(ScriptedEngine(say("x")), other) as urls:
        alive = run(urls, lambda engine: _alive(engine))
    assert sum(alive) == 1
    assert "differs from the other upstreams" in caplog.text


def test_one_that_comes_back_as_another_is_left_out() -> None:
    one, other = ScriptedEngine(say("one")), ScriptedEngine(say("other"))
    other.card.name = "other"

    async def work(engine: RemoteEngine) -> None:
        await asyncio.to_thread(first.close)
        assert await becomes(lambda: not engine.upstreams[0].alive)
        await asyncio.to_thread(served, other, again, url)
        assert await becomes(lambda: "differs from" in engine.upstreams[0].down_reason)
        assert not engine.upstreams[0].alive

    with ExitStack() as first, ExitStack() as again:
        url = served(one, first)
        run([url], work)


def test_one_late_answer_is_forgiven() -> None:
    [upstream] = pool(1).upstreams
    upstream.mark_unanswered()
    assert upstream.alive
    upstream.mark_up()
    upstream.mark_unanswered()
    assert upstream.alive
    upstream.mark_unanswered()
    assert not upstream.alive


async def _alive(engine: RemoteEngine) -> list[bool]:
    return [upstream.alive for upstream in engine.upstreams]


def test_no_upstream_is_not_ready() -> None:
    with ExitStack() as stack:
        url = served(ScriptedEngine(say("x")), stack)

        async def work(engine: RemoteEngine) -> None:
            await engine.check()
            await asyncio.to_thread(stack.close)
            assert await becomes(lambda: not engine.upstreams[0].alive)
            with pytest.raises(EngineFailed):
                await engine.check()

        run([url], work, QUICK)


# Pauses that they ask for.


def busy(status: int, seconds: float) -> StatusError:
    return StatusError(ErrorContext("POST", status), None, Reply(status=status, retry_after=seconds))


@pytest.mark.parametrize("status", [429, 503])
def test_one_that_asks_for_a_pause_has_it(status: int) -> None:
    async def main() -> None:
        many = pool(2)
        [first, second] = many.upstreams
        for _ in range(2 * FAILURES):
            first.record_failure(busy(status, 30))
        assert first.alive
        assert first.describe()["status"] == "resting"
        assert {pick(many, [number] * 64).url for number in range(8)} == {second.url}

    asyncio.run(main())


def test_a_pause_ends() -> None:
    async def main() -> None:
        many = pool(2)
        [first, second] = many.upstreams
        first.record_failure(busy(429, 0.05))
        assert pick(many) is second
        assert await becomes(lambda: first.describe()["status"] == "ready")
        assert await becomes(lambda: pick(many) is first)

    asyncio.run(main())


def test_where_all_want_a_pause_clients_are_told_how_long() -> None:
    async def main() -> None:
        many = pool(2)
        for upstream, seconds in zip(many.upstreams, (30, 600), strict=True):
            upstream.record_failure(busy(429, seconds))
        with pytest.raises(Overloaded) as caught:
            pick(many)
        assert caught.value.retry_after == 30

    asyncio.run(main())
