"""Law 4 with a real model: the trained view of a conversation is what was sampled."""

from collections.abc import Callable, Iterator
from random import Random

import httpx
import pytest

from dragoman.engines.local import LocalEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import Shared
from tests.support.talks import Talk, by_history, by_responses


@pytest.fixture(scope="module")
def client(engine: LocalEngine) -> Iterator[httpx.Client]:
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(Shared(engine), settings) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hold", [by_responses, by_history])
def test_what_is_trained_on_was_sampled(
    client: httpx.Client, hold: Callable[[httpx.Client, Random, int], Talk], seed: int
) -> None:
    talk = hold(client, Random(seed), 3)
    assert talk.exact


def test_an_unchanged_history_is_one_sequence(client: httpx.Client) -> None:
    talk = by_responses(client, Random(7), 3)
    assert (talk.goes_on, len(talk.segments)) == (2, 1)
