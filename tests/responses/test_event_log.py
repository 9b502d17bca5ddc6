"""The log of a stream: whoever comes, whenever and after whichever event, gets exactly what follows it."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.responses.event_encoder import DONE, HOLE, ResponseEventEncoder, one_by_one
from dragoman.responses.manager import FEW, MANY_BYTES, EventLog, from_number
from tests.support.responses import numbers, payloads

LONG = 60.0
parts = st.lists(st.integers(1, 3), min_size=1, max_size=6)
"""How many events each addition to the log has."""


def chunks(sizes: Sequence[int]) -> list[bytes]:
    wire = ResponseEventEncoder()
    items = [b"".join(wire.event("response.x", {"text": "a\n\nb"}) for _ in range(size)) for size in sizes]
    return [*items[:-1], items[-1] + DONE]


async def followed(log: EventLog, after: int) -> bytes:
    return b"".join([events async for events in log.follow(after, LONG)])


@given(parts, st.integers(0, 6), st.integers(-1, 25))
def test_a_follower_gets_exactly_what_follows(sizes: list[int], early: int, after: int) -> None:
    async def run() -> bytes:
        log, items = EventLog(), chunks(sizes)
        for each in items[:early]:
            log.add(each)
        following = asyncio.create_task(followed(log, after))
        for each in items[early:]:
            await asyncio.sleep(0)
            log.add(each)
        log.close()
        return await following

    seen = asyncio.run(run())
    assert numbers(payloads(seen)) == list(range(after + 1, sum(sizes)))
    assert seen.endswith(DONE)


@given(parts, st.integers(0, 25))
def test_a_stored_log_gives_the_same_as_a_live_one(sizes: list[int], after: int) -> None:
    async def run() -> bytes:
        log = EventLog()
        for each in chunks(sizes):
            log.add(each)
        log.close()
        return await followed(log, after)

    assert from_number(b"".join(chunks(sizes)), after + 1) == asyncio.run(run())


def test_a_silent_log_has_comments_between() -> None:
    async def run() -> bytes:
        log = EventLog()
        following = log.follow(-1, 0.01)
        first = await anext(following)
        log.add(DONE)
        log.close()
        return first + b"".join([events async for events in following if events.startswith(b"data")])

    assert asyncio.run(run()) == b": keep-alive\n\n" + DONE


def test_a_long_log_is_passed_on_in_pieces() -> None:
    """Others have their turn between them."""
    count = 4 * FEW

    async def run() -> tuple[list[bytes], int]:
        log, turns = EventLog(), 0
        for each in chunks([1] * count):
            log.add(each)
        log.close()

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        pieces = [events async for events in log.follow(2 * FEW, LONG)]
        beside.cancel()
        return pieces, turns

    pieces, turns = asyncio.run(run())
    assert numbers(payloads(b"".join(pieces))) == list(range(2 * FEW + 1, count))
    assert max(len(payloads(piece)) for piece in pieces) <= FEW
    assert turns >= 3


@given(st.integers(-1, 5))
def test_an_event_in_pieces_is_followed_as_one(after: int) -> None:
    wire, large = ResponseEventEncoder(), b"[" + b"1," * (MANY_BYTES // 2) + b"1]"
    wire.large = [large, large]
    moulds = [wire.event("response.x", {"text": HOLE if number in (1, 3) else "a"}) for number in range(5)]
    written = wire.filled(b"".join(moulds))

    async def run() -> bytes:
        log = EventLog()
        log.add(written)
        log.close()
        return await followed(log, after)

    assert isinstance(written, list)
    assert [piece is large for piece in written].count(True) == 2
    assert max(len(event) for event in one_by_one(written)) == 3
    assert asyncio.run(run()) == from_number(b"".join(written), after + 1)
