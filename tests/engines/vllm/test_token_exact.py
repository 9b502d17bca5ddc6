"""Laws 4 and 5 with real vLLM: what is trained on was sampled, and what users write is text."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.engines.vllm.conftest import served
from tests.support.talks import WAYS

# Calls as those of Hermes, and no reasoning, which random weights would begin as often as not.
KEEPING = ("--store", "memory", "--trajectories", "--dialect", "granite4")


@pytest.fixture(scope="module")
def client(vllm_python: str, models: Path, logs: Path) -> Iterator[httpx.Client]:
    flags = ("--model", str(models / "tiny"), "--context", "4096", *KEEPING)
    with (
        served(vllm_python, logs / "exact.log", *flags) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_what_is_trained_on_was_sampled(client: httpx.Client, way: str, seed: int) -> None:
    talk = WAYS[way](client, Random(seed), 3)
    assert (talk.exact, talk.text_is_text) == (True, True)


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_their_results_are_one_sequence(client: httpx.Client, way: str) -> None:
    talk = WAYS[way](client, RequiredCalls(1), 3)
    assert (talk.goes_on, len(talk.segments)) == (2, 1)


class RequiredCalls(Random):
    """Has one call be required each time."""

    def choice(self, among: Any) -> Any:
        return "required" if "required" in among else among[0]
