"""vLLM in the process itself, without a server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import ENGINE_ARGS, ROOT, environment


@pytest.fixture(scope="module")
def found(vllm_python: str, models: Path) -> dict[str, Any]:
    program = [vllm_python, "-m", "tests.engines.vllm.program", str(models / "tiny"), json.dumps(ENGINE_ARGS)]
    done = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_cancelled_request_is_not_computed_any_more(found: dict[str, Any]) -> None:
    # The step that was being computed, one that vLLM had scheduled behind it, and on a busy machine a few
    # that came before it heard of the end. The other request had fifty.
    assert found["late"] < 10


def test_nothing_stands_between_us_and_the_socket(found: dict[str, Any]) -> None:
    assert found["socket"]


def test_steps_are_as_large_as_those_of_vllms_own_server(found: dict[str, Any]) -> None:
    # On large GPUs it takes several times as much in a step for a server as for an engine in a program.
    assert found["used_for"] == "OPENAI_API_SERVER"


def test_a_paused_job_stands_still_and_goes_on_with_the_new_weights(found: dict[str, Any]) -> None:
    assert found["paused"] == {"moved": 0, "ids": 400, "versions": [None, "second", "second"]}


def test_the_core_says_what_the_public_interface_says(found: dict[str, Any]) -> None:
    direct, generated = found["direct"], found["generated"]
    assert direct["ids"] == generated["ids"] and len(direct["ids"]) == 5
    assert direct["finish"] == generated["finish"] == "length"
    assert direct["logprobs"] == pytest.approx(generated["logprobs"], abs=0.01)
    assert direct["prompt"][0] is None
    assert direct["prompt"][1:] == pytest.approx(generated["prompt"][1:], abs=0.01)
    assert [[id_ for id_, _ in row] for row in direct["top"]] == [
        [id_ for id_, _ in row] for row in generated["top"]
    ]
    assert all(len(row) == 2 for row in direct["top"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ["enforce_eagr", "did you mean `enforce_eager`"]),
        ("setting", ["max_num_queued_reqs", "--limit-queue"]),
        ("twice", ["max_model_len", "twice"]),
    ],
)
def test_arguments_that_vllm_does_not_get_are_named(
    found: dict[str, Any], case: str, words: list[str]
) -> None:
    assert all(word in found[case] for word in words)
