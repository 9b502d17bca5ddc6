"""What takes too much to compile dies in a process of its own."""

import pytest

from dragoman.constrain.compile_limits import CompileChecker
from dragoman.errors import BadRequest


def lengths(*numbers: int) -> str:
    """Texts whose length is a multiple of all these: as many states as their product."""
    return "start: T\nT: " + " & ".join(f"/(?:.{{{number}}})*/" for number in numbers)


@pytest.fixture(scope="module")
def examiner() -> CompileChecker:
    return CompileChecker()


@pytest.mark.parametrize("grammar", [lengths(2, 3), "start: nothing", "no grammar", "start: \0\ufffd"])
def test_what_is_soon_compiled_or_soon_refused_is_left_to_whoever_asked(
    examiner: CompileChecker, grammar: str
) -> None:
    examiner.check(grammar)


@pytest.mark.parametrize("numbers", [(97, 89, 83), (97, 89, 83, 79, 73)])
def test_what_takes_too_long_is_refused_every_time(
    examiner: CompileChecker, numbers: tuple[int, ...]
) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest) as caught:
            examiner.check(lengths(*numbers))
        assert caught.value.code == "limit_exceeded"
    examiner.check(lengths(2, 5))


def test_an_examiner_that_was_killed_is_replaced(examiner: CompileChecker) -> None:
    examiner.check(lengths(2, 7))
    assert examiner._process is not None
    examiner._process.kill()
    examiner._process.wait()
    examiner.check(lengths(2, 11))


def test_it_leaves_when_nobody_asks_any_more() -> None:
    lonely = CompileChecker()
    lonely.check(lengths(3, 5))
    process = lonely._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
