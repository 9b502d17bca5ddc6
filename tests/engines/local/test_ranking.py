"""Ranking by the vectors of a real model."""

from collections.abc import Sequence

import pytest

from dragoman.engines.local import LocalEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import SharedEngine
from tests.support.http import post

TEXTS = [
    "Cats purr when they are content.",
    "The train to Lyon leaves at noon.",
    "Interest rates fell again.",
]


class SharedVectors(SharedEngine):
    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine)
        self._vectors = engine

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._vectors.embed(prompts)


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("Cats purr when they feel content.", 0),
        ("The train to Lyon leaves in the evening.", 1),
        ("Interest rates rose again.", 2),
    ],
)
def test_what_says_nearly_the_same_comes_first(local_engine: LocalEngine, query: str, nearest: int) -> None:
    with background(SharedVectors(local_engine), Settings(port=0)) as url:
        results = post(url, "/v1/rerank", {"query": query, "documents": TEXTS}).json()["results"]
    assert results[0]["index"] == nearest


def test_a_text_is_nearest_to_itself(local_engine: LocalEngine) -> None:
    with background(SharedVectors(local_engine), Settings(port=0)) as url:
        data = post(url, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    first, *others = (entry["score"] for entry in data)
    assert first == pytest.approx(1, abs=1e-5)
    assert all(score < first for score in others)
