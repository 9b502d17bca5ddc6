"""A guard against laws that hold because nothing is tried.

`assume` and filters throw examples away, and in an example that is left there may be nothing to test. A law
that tries too little passes and says nothing. So after each law its examples are counted: those that were not
thrown away, and if the law says of each whether it was worth trying, those of which it said so.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from os import environ
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis.statistics import collector

ENOUGH = 0.2
"""The part of all examples that must not be thrown away, and of those the part that must be worth trying."""
WORTH, WORTHLESS = "worth trying", "not worth trying"


def examples(count: int) -> settings:
    """For laws that hold of every dialect: few examples of each are many. `make torture` tries more."""
    more = int(environ.get("DRAGOMAN_EXAMPLES", "1"))
    return settings(max_examples=count * more, deadline=None, suppress_health_check=list(HealthCheck))


def tried(worth: bool) -> None:
    """Said inside of a law, once for each example: whether there is anything in it that the law is about."""
    event(WORTH if worth else WORTHLESS)


def too_few(statistics: dict[str, Any]) -> str:
    """What is wrong with the examples that Hypothesis counted, "" if nothing is."""
    cases = statistics.get("generate-phase", {}).get("test-cases", [])
    valid = [case for case in cases if case["status"] == "valid"]
    judged = any(name in (WORTH, WORTHLESS) for case in cases for name in case["events"])
    worth = [case for case in valid if WORTH in case["events"]] if judged else valid
    if len(valid) >= ENOUGH * len(cases) and len(worth) >= ENOUGH * len(valid):
        return ""
    return f"of {len(cases)} examples this law tried only {len(worth)}: that it holds says nothing"


@contextmanager
def counted() -> Iterator[list[str]]:
    """Inside of the block each law adds what is wrong with its examples."""
    texts: list[str] = []
    further: Callable[[Any], None] | None = collector.value

    def note(statistics: Any) -> None:
        texts.append(too_few(statistics))
        if further is not None:
            further(statistics)

    # Hypothesis declares it by its first value, which is None.
    variable: Any = collector
    with variable.with_value(note):
        yield texts


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with counted() as texts:
        result = yield
    if any(texts):
        pytest.fail("\n".join(filter(None, texts)))
    return result
