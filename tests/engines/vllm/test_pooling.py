"""vLLM as a model that embeds, and what happens when its process dies."""

import math
import os
import signal

import httpx
import pytest
from openai import OpenAI

from tests.engines.vllm.conftest import RunningServer
from tests.support.wait import becomes


def test_embeddings_have_length_one_and_do_not_depend_on_their_neighbours(pooling: RunningServer) -> None:
    client = OpenAI(base_url=pooling.url + "/v1", api_key="none", max_retries=0)
    both = client.embeddings.create(
        model="tiny", input=["a small boat", "the sea"], encoding_format="float"
    ).data
    alone = client.embeddings.create(model="tiny", input="the sea", encoding_format="float").data
    assert all(math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-3) for one in both)
    assert both[1].embedding == pytest.approx(alone[0].embedding, abs=0.02)
    assert both[0].embedding != pytest.approx(both[1].embedding, abs=0.02)


def test_it_does_not_write(pooling: RunningServer) -> None:
    answer = httpx.post(pooling.url + "/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")


def test_when_its_core_dies_it_is_not_ready_and_comes_back(pooling: RunningServer) -> None:
    os.kill(pooling.core(), signal.SIGKILL)
    assert becomes(lambda: httpx.get(pooling.url + "/ready").status_code == 503)
    answer = httpx.post(pooling.url + "/v1/embeddings", json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert httpx.get(pooling.url + "/health").status_code == 200
    assert becomes(lambda: httpx.get(pooling.url + "/ready", timeout=30).status_code == 200)
    assert httpx.post(pooling.url + "/v1/embeddings", json={"input": "x"}, timeout=120).status_code == 200
