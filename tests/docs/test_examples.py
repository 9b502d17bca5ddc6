"""The code in the documents runs, and does what the text beside it says."""

import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import httpx
import msgspec
import pytest

import dragoman
from dragoman.api.shared_fields import read_presets
from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.settings import Settings
from tests.docs.support import blocks
from tests.support.http import stream
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "Pieces of eight!"}]}


def run(folder: Path, *documents: str) -> ModuleType:
    """The Python of documents that go on from each other, block after block, as one module."""
    file = folder / "example.py"
    file.write_text("\n".join(block for document in documents for block in blocks(document, "python")))
    spec = spec_from_file_location("example", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return run(tmp_path_factory.mktemp("docs"), "docs/engines.md", "docs/existing_engines.md")


@pytest.fixture
def parrot(tmp_path: Path) -> Iterator[str]:
    """The address of the first engine of docs/engines.md, run as a person would run it."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    program = tmp_path / "parrot.py"
    program.write_text(blocks("docs/engines.md", "python")[0].replace("port=8000", f"port={port}"))
    process = subprocess.Popen([sys.executable, program])
    try:
        yield answering(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(20)


def answering(url: str) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            httpx.get(url + "/health").raise_for_status()
            return url
        time.sleep(0.05)
    raise TimeoutError(url)


def test_minimal_engine_answers_over_a_socket(parrot: str) -> None:
    answer = httpx.post(parrot + CHAT, json=SAY).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Pieces of eight!", "stop")


def test_minimal_engine_streams(parrot: str) -> None:
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream(parrot, CHAT, SAY)]
    assert "".join(deltas) == "Pieces of eight!"


@pytest.mark.parametrize("name", ["Parrot", "Flock"])
def test_engines_of_the_guide_count_stop_and_cancel(engines: ModuleType, name: str) -> None:
    with dragoman.background(getattr(engines, name)()) as url:
        short = httpx.post(url + CHAT, json={**SAY, "max_tokens": 3, "n": 2}).json()["choices"]
        stopped = httpx.post(url + CHAT, json={**SAY, "stop": " of"}).json()["choices"][0]
        ready = httpx.get(url + "/ready").json()
    assert [(one["message"]["content"], one["finish_reason"]) for one in short] == [("Pie", "length")] * 2
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("Pieces", " of")
    assert ready["status"] == "ready"


def test_engine_of_the_guide_with_generate_request(engines: ModuleType) -> None:
    assert (engines.echo.card.name, engines.echo.card.max_model_len) == ("parrot-2", 512)
    engine = engines.Echo()
    template = "{{ messages[-1].content }}"
    with dragoman.background(AsyncLLMEngine(engine, chat_template=template)) as url:
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream(url, CHAT, SAY)]
        short = httpx.post(url + CHAT, json={**SAY, "max_tokens": 3, "n": 2}).json()["choices"]
        stopped = httpx.post(url + CHAT, json={**SAY, "stop": " of"}).json()["choices"][0]
        assert becomes(lambda: not engine.running)
    assert "".join(deltas) == "Pieces of eight!"
    assert [(one["message"]["content"], one["finish_reason"]) for one in short] == [("Pie", "length")] * 2
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("Pieces", " of")


def test_tests_of_the_guide_pass(engines: ModuleType) -> None:
    engines.test_an_answer()
    engines.test_a_failure()


def test_embedded_engine_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "docs/embedded.md")
    assert "Paris" in capsys.readouterr().out


def test_dialects_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module_type = run(tmp_path, "docs/dialects.md")
    assert "name contains" in capsys.readouterr().out
    assert module_type.ACME.name == "acme"


def test_settings_in_python(tmp_path: Path) -> None:
    module_type = run(tmp_path, "docs/settings.md")
    assert module_type.app.settings.port == module_type.as_the_command_has_them.port == 9000


def test_settings_file() -> None:
    file, for_all = (
        msgspec.convert(tomllib.loads(text), Settings) for text in blocks("docs/settings.md", "toml")
    )
    assert file.limits.queue == 64
    assert read_presets(for_all)[1]["quick"].overrides.max_tokens == 512


def test_error_example_is_the_real_one() -> None:
    [example] = blocks("docs/api.md", "json")
    with dragoman.background(ScriptedEngine(say("hi"))) as url:
        reply = httpx.post(url + CHAT, json={**SAY, "tempreature": 1})
    assert reply.json() == msgspec.json.decode(example)
