"""`dragoman batch run`: with an engine in the process, and on a server."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dragoman.cli import main
from dragoman.cli.batch import bar
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.batches.support import jsonl, line, read_lines
from tests.support.parrot import parrot
from tests.support.wait import becomes

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent.parent
ENGINE = ["--engine", "tests.support.parrot:parrot"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(jsonl([line("a", "one"), line("b", "two", temperature=9), line("c", "three")]))
    return path


def said(folder: Path, name: str) -> dict[str, str]:
    """What came of each line: the answer, or the code of what is wrong."""
    mapping = {}
    for one in read_lines((folder / name).read_bytes()):
        answered = one["error"] is None
        body = one["response"]["body"]
        mapping[one["custom_id"]] = (
            body["choices"][0]["message"]["content"] if answered else one["error"]["code"]
        )
    return mapping


def test_a_file_is_answered_without_a_server(source: Path, capsys: Capture) -> None:
    assert main(["batch", "run", str(source), *ENGINE]) == 0
    assert said(source.parent, "questions.output.jsonl") == {"a": "one", "c": "three"}
    assert said(source.parent, "questions.errors.jsonl") == {"b": "invalid_value"}
    assert "2 answered" in capsys.readouterr().out


def test_what_is_done_is_not_done_again(source: Path) -> None:
    output = source.with_name("out.jsonl")
    command = ["batch", "run", str(source), "-o", str(output), *ENGINE]
    assert main(command) == 0
    first = output.read_bytes()
    half = first.splitlines(keepends=True)[0]
    output.write_bytes(half + b'{"id":"batch_req_')
    assert main(command) == 0
    assert output.read_bytes().startswith(half)
    assert said(source.parent, "out.jsonl") == {"a": "one", "c": "three"}


def test_the_same_on_a_server(source: Path, capsys: Capture) -> None:
    with background(parrot(), Settings(port=0, store="memory", api_key=["k"])) as url:
        assert main(["batch", "run", str(source), "--url", url, "--api-key", "k"]) == 0
    assert said(source.parent, "questions.output.jsonl") == {"a": "one", "c": "three"}
    assert said(source.parent, "questions.errors.jsonl") == {"b": "invalid_value"}
    assert not source.with_name("questions.jsonl.batch").exists()


def test_a_batch_that_is_known_is_waited_for(source: Path) -> None:
    """Who lost the command finds the batch again, and does not ask a second time."""
    with background(parrot(), Settings(port=0, store="memory")) as url:
        engine_flags = ["batch", "run", str(source), "--url", url]
        assert main(engine_flags) == 0
        (batch,) = httpx.get(f"{url}/v1/batches").json()["data"]
        source.with_name("questions.jsonl.batch").write_text(json.dumps({"url": url, "id": batch["id"]}))
        assert main(engine_flags) == 0
        assert len(httpx.get(f"{url}/v1/batches").json()["data"]) == 1


@pytest.mark.parametrize("there", [[], ["--url"]], ids=["here", "there"])
def test_lines_that_are_no_requests_are_told(tmp_path: Path, capsys: Capture, there: list[str]) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(jsonl([line("a"), line("a"), line("b", stream=True)]))
    with background(parrot(), Settings(port=0, store="memory")) as url:
        assert main(["batch", "run", str(path), *([*there, url] if there else ENGINE)]) == 1
    text = capsys.readouterr().err
    assert "line 2: " in text and "line 3: Streaming" in text


def test_nothing_of_another_s_is_written_over(source: Path, capsys: Capture) -> None:
    output = source.with_name("mine.txt")
    output.write_text("dear diary")
    assert main(["batch", "run", str(source), "-o", str(output), *ENGINE]) == 1
    assert output.read_text() == "dear diary" and "was not written by a batch" in capsys.readouterr().err


def test_a_signal_ends_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_bytes(jsonl(line(str(number), "some words") for number in range(300)))
    engine = ["--engine", "tests.support.scripted_server:slow_parrot"]
    command = [sys.executable, "-m", "dragoman", "batch", "run", str(path), *engine]
    output = tmp_path / "many.output.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert becomes(lambda: output.exists() and output.read_bytes().count(b"\n") > 20)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None and "again to resume" in process.stderr.read()
    before = output.read_bytes()
    assert 20 < before.count(b"\n") < 300
    assert main(["batch", "run", str(path), *engine]) == 0
    assert output.read_bytes().startswith(before)
    assert set(said(tmp_path, "many.output.jsonl")) == {str(number) for number in range(300)}


def test_the_bar() -> None:
    assert bar(25, 100, 1, 5.0) == "[######..................] 25 of 100 · 1 failed · 5.0/s · 0:15 left"
    assert bar(0, 50_000, 0, 0.0) == f"[{'.' * 24}] 0 of 50,000 · 0.0/s"
    assert bar(10, 10_000, 0, 1.0).endswith("2:46:30 left")
