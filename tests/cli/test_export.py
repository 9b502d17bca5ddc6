"""A run becomes training data with one command."""

import json
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import post

SAID = [*b"Hello.", END_ID]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a server that has answered three times: twice in one conversation, and two choices once."""
    settings = Settings(port=0, data_dir=str(tmp_path), trajectories=True)
    with background(ScriptedEngine(say("Hello.")), settings) as url:
        first = post(url, "/v1/responses", {"input": "hi"}).json()["id"]
        second = post(url, "/v1/responses", {"input": "hi", "previous_response_id": first}).json()["id"]
        post(url, f"/v1/trajectories/{second}", {"reward": 0.5})
        post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "yo"}], "n": 2})
    return tmp_path


def exported(folder: Path, name: str) -> Path:
    assert main(["export", "--data-dir", str(folder), "-o", str(folder / name)]) == 0
    return folder / name


def test_every_sequence_is_there_once(folder: Path) -> None:
    rows = [json.loads(line) for line in exported(folder, "run.jsonl").read_text().splitlines()]
    sampled = [[id_ for id_, was in zip(row["ids"], row["mask"], strict=True) if was] for row in rows]
    assert sampled == [SAID * 2, SAID, SAID]


def test_rewards_and_log_probabilities_come_along(folder: Path) -> None:
    first = json.loads(exported(folder, "run.jsonl").read_text().splitlines()[0])
    assert first["rewards"] == {"reward": 0.5}
    assert [int(logprob is not None) for logprob in first["logprobs"]] == first["mask"]


def test_parquet_says_the_same(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in exported(folder, "run.jsonl").read_text().splitlines()]
    table = parquet.read_table(exported(folder, "run.parquet")).to_pylist()
    assert [row["ids"] for row in table] == [row["ids"] for row in rows]
    assert [row["mask"] for row in table] == [row["mask"] for row in rows]


def test_a_folder_without_a_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--data-dir", str(tmp_path)]) != 0
    assert "There is no store" in capsys.readouterr().err
