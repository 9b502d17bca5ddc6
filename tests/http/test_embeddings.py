"""Embeddings in every form, and ranking by vectors or by a model that reads both texts."""

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import post, refusal

LETTERS = 26
SIDES: dict[str, Any] = {"query": "abc", "documents": ["xyz", "abd", "abc", "cba"]}


class Embedder(ScriptedEngine):
    """The vector of a text is how often it has each letter: anagrams are the same to it."""

    def __init__(self, context: int = 64) -> None:
        templates = {"default": CHATML}
        card = ModelCard(name="letters", max_model_len=context, templates=templates, adapters=("poet",))
        super().__init__(say("hi"), card=card)
        self.prompts: list[Sequence[int]] = []

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.prompts += prompts
        return [_normal([list(ids).count(97 + letter) for letter in range(LETTERS)]) for ids in prompts]


class SharingEmbedder(Embedder):
    """It wants to know for whom it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []

    async def embed_for(self, owner: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.owners.append(owner)
        return await self.embed(prompts)


class Judge(Embedder):
    """A cross-encoder: it also knows how long a document is."""

    verdict: float | None = None

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        return [self.verdict or len(document) / len(query) for query, document in pairs]


def _normal(counts: list[int]) -> list[float]:
    length = sum(count * count for count in counts) ** 0.5 or 1.0
    return [count / length for count in counts]


@pytest.fixture(scope="module")
def letters() -> Iterator[str]:
    with background(Embedder(), Settings(port=0)) as url:
        yield url


def vectors(url: str, given: Any, **fields: Any) -> list[Any]:
    reply = post(url, "/v1/embeddings", {"input": given, **fields})
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([97], [b"a"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
        (["ab", [99]], [b"ab", b"c"]),
    ],
)
def test_input_in_every_form(serve: Serve, given: Any, texts: list[bytes]) -> None:
    engine = Embedder()
    assert len(vectors(serve(engine), given)) == len(texts)
    assert [bytes(ids) for ids in engine.prompts] == texts


def test_base64_is_the_same_vector(letters: str) -> None:
    [plain], [coded] = vectors(letters, "abca"), vectors(letters, "abca", encoding_format="base64")
    assert struct.unpack(f"<{LETTERS}f", base64.b64decode(coded)) == pytest.approx(plain)


def test_too_many_dimensions_are_refused_before_a_vector_is_made(serve: Serve) -> None:
    engine = Embedder()
    url = serve(engine)
    vectors(url, "abc")
    reply = post(url, "/v1/embeddings", {"input": "abc", "dimensions": LETTERS + 1})
    assert refusal(reply) == (400, "dimensions")
    assert len(engine.prompts) == 1


def test_fewer_dimensions_have_length_one_again(letters: str) -> None:
    [short] = vectors(letters, "abz", dimensions=2)
    assert short == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a", "dimensions": LETTERS + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**9}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": [["a"]]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [[97], [10**6]]}, "input[1]"),
        ({"input": ["a", "b" * 64]}, "input[1]"),
        ({"input": ["a", "b" * 10_000]}, "input[1]"),
        ({"input": "a", "model": "poet"}, "model"),
    ],
)
def test_what_is_wrong_with_an_embedding_is_named(letters: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(post(letters, "/v1/embeddings", fields)) == (400, param)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_the_nearest_comes_first_and_equals_in_their_order(serve: Serve, path: str) -> None:
    engine = Embedder()
    reply = post(serve(engine), path, SIDES).json()
    assert [result["index"] for result in reply["results"]] == [2, 3, 1, 0]
    scores = [result["relevance_score"] for result in reply["results"]]
    assert scores == pytest.approx([1, 1, 2 / 3, 0])
    assert reply["results"][0]["document"] == {"text": "abc"}
    assert (reply["model"], set(reply)) == ("letters", {"id", "model", "usage", "results"})
    # The query, which is also one of the documents, is read once.
    assert len(engine.prompts) == 4
    assert reply["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


def test_only_so_many_and_without_their_texts(letters: str) -> None:
    documents = [{"text": text} for text in SIDES["documents"]]
    body = {**SIDES, "documents": documents, "top_n": 2, "return_documents": False}
    results = post(letters, "/v1/rerank", body).json()["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({"text_1": "abc", "text_2": "cab"}, [1]),
        ({"text_1": "abc", "text_2": ["cab", "xyz"]}, [1, 0]),
        ({"text_1": ["a", "b"], "text_2": ["b", "b"]}, [0, 1]),
        ({"queries": ["a"], "documents": ["b", "a"]}, [0, 1]),
    ],
)
def test_scores_are_in_the_order_of_the_texts(
    letters: str, path: str, body: dict[str, Any], scores: list[float]
) -> None:
    reply = post(letters, path, body).json()
    assert reply["object"] == "list"
    assert [(entry["index"], entry["object"]) for entry in reply["data"]] == [
        (number, "score") for number in range(len(scores))
    ]
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(scores)


def test_a_cross_encoder_is_asked_where_there_is_one(serve: Serve) -> None:
    engine = Judge()
    url = serve(engine)
    reply = post(url, "/v1/rerank", {"query": "ab", "documents": ["a", "abcd"]}).json()
    assert [(r["index"], r["relevance_score"]) for r in reply["results"]] == [(1, 2.0), (0, 0.5)]
    assert reply["usage"]["prompt_tokens"] == 3 + 6
    assert engine.prompts == []


def test_both_texts_together_must_fit_into_a_cross_encoder(serve: Serve, letters: str) -> None:
    body = {"text_1": "a" * 40, "text_2": ["b", "b" * 40]}
    assert refusal(post(serve(Judge()), "/v1/score", body)) == (400, "text_2[1]")
    assert post(letters, "/v1/score", body).status_code == 200


def test_a_score_that_is_no_number_is_an_error(serve: Serve) -> None:
    engine = Judge()
    engine.verdict = float("nan")
    reply = post(serve(engine), "/v1/score", {"text_1": "a", "text_2": "b"})
    assert reply.json()["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 257}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "a" * 64]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "poet"}, "model"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", 1]}, "text_2[1]"),
    ],
)
def test_what_is_wrong_with_a_ranking_is_named(
    letters: str, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(post(letters, path, body)) == (400, param)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_an_engine_with_neither_is_a_400(greeter: str, path: str) -> None:
    body = SIDES if path == "/v1/rerank" else {"text_1": "a", "text_2": "b"}
    assert post(greeter, path, body).json()["error"]["code"] == "unsupported_model"


def test_an_engine_that_shares_its_time_is_told_whose_they_are(serve: Serve) -> None:
    engine = SharingEmbedder()
    url = serve(engine, api_key=["mine", "yours"])
    for path, body in (("/v1/embeddings", {"input": "ab"}), ("/v1/rerank", SIDES)):
        for key in ("mine", "yours"):
            assert post(url, path, body, authorization=f"Bearer {key}").status_code == 200
    mine, yours = engine.owners[:2]
    assert mine != yours
    assert engine.owners == [mine, yours, mine, yours]


def test_they_say_which_weights_they_were(serve: Serve) -> None:
    engine = Embedder()
    engine.weight_version = "v7"
    url = serve(engine)
    score = {"text_1": "a", "text_2": "b"}
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", SIDES), ("/v1/score", score)):
        assert post(url, path, body).json()["weight_version"] == "v7"
