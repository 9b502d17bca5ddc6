"""Several upstreams: who gets what, who is left out, and who comes back."""

import asyncio
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.remote.pool import BLOCK, SLACK, Pool, Prefixes, Upstream, blocks_of
from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.errors import EngineFailed, Unavailable
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.engines.remote.support import QUICK, becomes, ids_of, job_of, run, serving, steps_of

LONG = [7] * (4 * BLOCK)


def pool(count: int) -> Pool:
    """Upstreams that nobody has to answer for."""
    options = RemoteOptions()
    upstreams = [Upstream(f"http://h{number}", options) for number in range(count)]
    for upstream in upstreams:
        upstream.alive = True
    return Pool(upstreams, ByteTokenizer(), options)


def test_equals_share_what_comes() -> None:
    many = pool(3)
    picked = [many.pick(job_of([number])) for number in range(6)]
    assert {picked.count(upstream) for upstream in many.upstreams} == {2}


def test_the_least_busy_is_asked() -> None:
    many = pool(3)
    many.upstreams[0].running, many.upstreams[2].running = 2, 1
    assert many.pick(job_of()) is many.upstreams[1]


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    many = pool(3)
    first = many.pick(job_of([*LONG, 1]))
    for number in range(6):
        assert many.pick(job_of([*LONG, *range(number, number + 40)])) is first
    assert many.pick(job_of([8, *LONG])) is not first


def test_salts_keep_beginnings_apart() -> None:
    plain = job_of(LONG)
    assert blocks_of(plain) != blocks_of(replace(plain, cache_salt="mine"))
    assert blocks_of(plain) != blocks_of(replace(plain, adapters=(("poet", 1.0),)))


def test_one_that_is_too_busy_is_spared_though_it_knows() -> None:
    many = pool(2)
    first = many.pick(job_of(LONG))
    first.running = SLACK
    assert many.pick(job_of(LONG)) is first
    first.running = SLACK + 1
    assert many.pick(job_of(LONG)) is not first


def test_the_dead_are_left_out() -> None:
    many = pool(2)
    many.upstreams[0].lost("gone")
    assert many.pick(job_of()) is many.upstreams[1]
    many.upstreams[1].lost("gone")
    with pytest.raises(Unavailable):
        many.pick(job_of())


def test_one_that_has_failed_is_asked_again_only_if_there_is_no_other() -> None:
    many = pool(2)
    first, second = many.upstreams
    assert many.pick(job_of(), [first]) is second
    second.lost("gone")
    assert many.pick(job_of(), [first]) is first


def test_what_is_remembered_has_a_limit() -> None:
    prefixes = Prefixes(most=4)
    prefixes.add([1, 2, 3])
    prefixes.add([1, 4, 5])
    assert prefixes.known([1, 4, 5]) == 3
    assert prefixes.known([1, 2, 3]) == 1 + (2 in prefixes._kept)
    assert len(prefixes._kept) == 4


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
        answers = [bytes(ids_of(await steps_of(engine, job_of([number])))[:3]) for number in range(4)]
        assert sorted(answers) == [b"one", b"one", b"two", b"two"]

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
        assert (one.live, two.live) == (3, 3)
        await asyncio.to_thread(first.close)
        await becomes(lambda: sum(job.done() for job in jobs) == 3)
        assert {type(job.exception()) for job in jobs if job.done()} == {Unavailable}
        assert two.live == 3
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    with ExitStack() as first, ExitStack() as rest:
        run([served(one, first), served(two, rest)], work)


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
    assert "not like the others" in caplog.text


def test_one_that_comes_back_as_another_is_left_out() -> None:
    one, other = ScriptedEngine(say("one")), ScriptedEngine(say("other"))
    other.card.name = "other"

    async def work(engine: RemoteEngine) -> None:
        await asyncio.to_thread(first.close)
        assert await becomes(lambda: not engine.upstreams[0].alive)
        await asyncio.to_thread(served, other, again, url)
        assert await becomes(lambda: "is not like" in engine.upstreams[0].why)
        assert not engine.upstreams[0].alive

    with ExitStack() as first, ExitStack() as again:
        url = served(one, first)
        run([url], work)


def test_one_late_answer_is_forgiven() -> None:
    [upstream] = pool(1).upstreams
    upstream.missed()
    assert upstream.alive
    upstream.found()
    upstream.missed()
    assert upstream.alive
    upstream.missed()
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
