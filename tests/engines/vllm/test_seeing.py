"""Real vLLM with models that see and hear, held against what transformers says with the same weights."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import ENGINE_ARGS, ROOT, START_S, environment
from tests.engines.vllm.models import BEFORE

BLOCK = 32
KINDS = {"seer": "image", "hearer": "audio"}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    return models / str(request.param)


@pytest.fixture(scope="module")
def golden(model: Path) -> Any:
    return json.loads((model / "golden.json").read_text())


@pytest.fixture(scope="module")
def found(vllm_python: str, model: Path) -> Any:
    args = json.dumps(ENGINE_ARGS | {"dtype": "float32"})
    command = [vllm_python, "-m", "tests.engines.vllm.seeing", str(model), args]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_what_stands_for_a_picture_is_what_its_processor_writes(found: Any, golden: Any, model: Path) -> None:
    assert found["modalities"] == [KINDS[model.name]]
    assert found["place"] == golden[0]["place"]


def test_answers_are_those_of_transformers(found: Any, golden: Any) -> None:
    assert found["alone"]["said"] == golden[0]["said"]
    assert found["other"]["said"] == golden[1]["said"]
    assert golden[0]["said"] != golden[1]["said"]


def test_beside_others_they_are_the_same(found: Any, golden: Any) -> None:
    items = [one["said"] for one in found["together"]]
    assert items == [golden[2]["said"], found["text"]["said"], golden[0]["said"], found["both"]["said"]]


def test_a_known_picture_is_a_known_prefix_and_another_is_not(found: Any) -> None:
    assert found["again"] == {"said": found["alone"]["said"], "cached": 2 * BLOCK}
    assert found["other"]["cached"] == BLOCK <= len(BEFORE)


def test_a_job_that_was_cancelled_while_its_picture_was_read_says_nothing(found: Any) -> None:
    assert found["cancelled"] == []


def test_ids_of_a_picture_without_one_are_ids_like_others(found: Any, golden: Any) -> None:
    assert len(found["bare"]["said"]) == len(golden[0]["said"])
    assert found["bare"]["cached"] == BLOCK


def test_it_keeps_what_doctor_asks_of_engines_that_take_media(found: Any) -> None:
    assert found["wrong"] == []
