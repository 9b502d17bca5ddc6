"""Law 4 with a real model: the trained view of a conversation is what was sampled."""

from collections.abc import Iterator
from random import Random

import httpx
import pytest

from dragoman.engines.local import LocalEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import Shared
from tests.support.talks import WAYS, by_responses


@pytest.fixture(scope="module")
def client(engine: LocalEngine) -> Iterator[httpx.Client]:
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(Shared(engine), settings) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.mark.parametrize(("seed", "way"), [*enumerate(WAYS)])
def test_what_is_trained_on_was_sampled(client: httpx.Client, way: str, seed: int) -> None:
    talk = WAYS[way](client, Random(seed), 3)
    assert (talk.exact, talk.text_is_text) == (True, True)


def test_an_unchanged_history_is_one_sequence(client: httpx.Client) -> None:
    talk = by_responses(client, Random(7), 3)
    assert (talk.goes_on, len(talk.segments)) == (2, 1)
