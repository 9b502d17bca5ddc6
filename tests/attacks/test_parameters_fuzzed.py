"""Bodies with something wrong in them, on every route; `tests.torture.fuzzed_bodies` has a million."""

from tests.torture.fuzzed_bodies import run


def test_no_body_fails_the_server_or_makes_it_tell_where_its_code_lies() -> None:
    fails, leaks, _ = run(0.002, seed=1)
    assert fails.passed, fails
    assert leaks.passed, leaks
