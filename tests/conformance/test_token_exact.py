"""Law 4 with a real model: the trained view of a conversation is what was sampled."""

from collections.abc import Iterator
from random import Random

import httpx
import pytest

from dragoman.engines.local import LocalEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import SharedEngine
from tests.support.talks import WAYS, by_responses


@pytest.fixture(scope="module")
def client(engine: LocalEngine) -> Iterator[httpx.Client]:
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(SharedEngine(engine), settings) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.mark.parametrize(("seed", "way"), [*enumerate(WAYS)])
def test_what_is_trained_on_was_sampled(client: httpx.Client, way: str, seed: int) -> None:
    talk = WAYS[way](client, Random(seed), 3)
    assert (talk.exact, talk.text_is_text) == (True, True)


def test_an_unchanged_history_is_one_sequence(client: httpx.Client, engine: LocalEngine) -> None:
    """Of control tokens only the template's own end is sampled. Where the model ends with another one, the
    template writes its own all the same, and the next turn begins a sequence of its own."""
    others = [id_ for text, id_ in engine.tokenizer.special_ids.items() if text != "<|im_end|>"]
    talk = by_responses(client, Random(7), 3, seed=7, logit_bias={str(id_): -100 for id_ in others})
    assert (talk.goes_on, len(talk.segments)) == (2, 1)
