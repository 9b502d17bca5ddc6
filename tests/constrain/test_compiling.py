"""Compiled constraints are kept, up to so many bytes, and may be asked for by several threads."""

from concurrent.futures import ThreadPoolExecutor

from dragoman.constrain.constraint import LEAST_BYTES, Constraint, MatcherCache, compile_cached
from dragoman.constrain.vocabulary import END, byte_vocabulary


def constraint(number: int) -> Constraint:
    return Constraint.from_choice([f"text {number}"])


SIZE = LEAST_BYTES + 16 * len(constraint(1).grammar)


def test_it_is_compiled_once() -> None:
    kept = MatcherCache(byte_vocabulary())
    one, two = kept.start(constraint(1)), kept.start(constraint(1))
    one.accept(ord("t"))
    assert two.allowed(ord("t")) and not one.allowed(ord("t"))
    assert kept.bytes == SIZE


def test_the_oldest_goes_when_there_are_too_many_bytes() -> None:
    kept = MatcherCache(byte_vocabulary(), SIZE * 3)
    for number in range(9):
        kept.start(constraint(number))
    assert kept.bytes == SIZE * 3
    kept.start(Constraint.from_choice(["x" * (SIZE // 4)]))
    assert kept.bytes == SIZE * 3


def test_threads_share_it() -> None:
    kept = MatcherCache(byte_vocabulary())
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(kept.start, [constraint(number % 3) for number in range(60)]))
    assert all(matcher.allowed(ord("t")) for matcher in matchers)


def test_one_cache_for_each_vocabulary() -> None:
    matcher = compile_cached(constraint(7), byte_vocabulary())
    for byte in b"text 7":
        matcher.accept(byte)
    assert matcher.is_complete and matcher.allowed(END)
    assert compile_cached(constraint(7), byte_vocabulary()).allowed(ord("t"))
