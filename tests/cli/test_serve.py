import io
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.cli import main
from dragoman.cli.address import can_listen, host_in_url, key_of
from dragoman.cli.model_info import banner, fact, short
from dragoman.client.config import root_of
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http import server
from dragoman.logs import Colorizer
from dragoman.settings import Settings
from tests.cli.conftest import Fake
from tests.support.engines import RUNNER
from tests.test_logs import Tty

Capture = pytest.CaptureFixture[str]
CARD = ModelCard(
    name="tiny",
    max_model_len=2048,
    adapters=("poet",),
    details={
        "architecture": "llama",
        "description": "llama 135M Q4_K - Medium",
        "parameters": "134515008",
        "bytes": "92000000",
        "runner": "llama.cpp",
        "slots": "8",
        "threads": "2",
    },
)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Commands that load a model get an engine that says "hello"; gives the settings they loaded it with."""
    seen: list[Settings] = []

    def engine_of(settings: Settings) -> ScriptedEngine:
        seen.append(settings)
        return ScriptedEngine(say("hello"))

    monkeypatch.setattr("dragoman.cli.engine.engine_of", engine_of)
    return seen


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As at a terminal: a shell's background jobs are begun with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def visit(ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], None]]:
    """What to do once the server is ready; then comes Ctrl-C."""
    visits: list[Callable[[str], None]] = []
    whole = server.serve

    def serve(*args: Any, on_ready: Callable[[str], None], **kwargs: Any) -> None:
        def ready(url: str) -> None:
            on_ready(url)
            for act in visits:
                act(url)
            signal.raise_signal(signal.SIGINT)

        whole(*args, on_ready=ready, **kwargs)

    monkeypatch.setattr(server, "serve", serve)
    return visits


def test_serve_greets_and_stops_at_ctrl_c(
    scripted: list[Settings], visit: list[Callable[[str], None]], capsys: Capture
) -> None:
    seen: list[str] = []
    visit.append(seen.append)
    assert main(["serve", "my.gguf", "--port", "0", "--slots", "3", "--api-key", "SECRET"]) == 0
    captured = capsys.readouterr()
    assert f"{seen[0]}/v1" in captured.out
    assert "Ctrl-C to stop" in captured.out
    assert "SECRET" not in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert (scripted[0].model, scripted[0].slots) == ("my.gguf", 3)


def test_a_chat_template_is_read_from_its_file(
    scripted: list[Settings], visit: list[Callable[[str], None]], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    assert main(["serve", "--port", "0", "--chat-template", "t.jinja"]) == 0
    assert main(["serve", "--port", "0", "--chat-template", "no.jinja"]) == 2
    assert "chat template no.jinja cannot be read" in capsys.readouterr().err


def test_chat_without_a_server_loads_the_model_itself(
    scripted: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", "1")
    monkeypatch.setenv("DRAGOMAN_API_KEY", "secret")
    assert main(["chat", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert captured.err == ""
    assert scripted[0].slots == 1


def test_chat_with_a_file_loads_it(
    scripted: list[Settings], fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", fake.url.rpartition(":")[2])
    assert main(["chat", "hi", "--model", "my.gguf"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert scripted[0].model == "my.gguf"


def test_bench_measures_a_dragoman(capsys: Capture) -> None:
    with server.background(ScriptedEngine(say("hello"))) as url:
        for api in ("chat", "completions"):
            assert main(["bench", "--url", url, "--streams", "1,4", "--tokens", "5", "--api", api]) == 0
            one, four = capsys.readouterr().out.splitlines()[1:]
            assert (one.split()[-4], four.split()[-4]) == ("5", "20")


def test_a_request_is_logged_once_without_its_contents(capsys: Capture) -> None:
    from dragoman import logs

    logs.setup("info", json=False)
    body = {"messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 3}
    with server.background(ScriptedEngine(say("ANSWER"))) as url:
        httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    texts = [line for line in capsys.readouterr().err.splitlines() if "/v1/chat/completions" in line]
    assert len(texts) == 1
    assert "+3 tok" in texts[0]
    assert "SECRET" not in texts[0]
    assert "ANS" not in texts[0]
    assert logging.getLogger("uvicorn.access").propagate is False


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("dragoman.cli.engine.make_served_engine", lambda _: pytest.fail("It was loaded."))
    assert main(["serve", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")]) == 2
    text = capsys.readouterr().err
    assert "data cannot be written: Not a directory. Choose another data_dir" in text
    assert "Traceback" not in text


def test_a_taken_port_names_a_free_one(taken: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.cli.address.POLL_INTERVAL_S", 0.05)
    assert main(["serve", "--port", str(taken)]) == 1
    text = capsys.readouterr().err
    assert f"Port {taken} on 127.0.0.1 is in use." in text
    free = int(text.partition("--port ")[2].split(".")[0])
    assert free > taken
    assert can_listen("127.0.0.1", free)


def test_a_dragoman_on_the_port_is_recognised(fake: Fake, capsys: Capture) -> None:
    assert main(["serve", "--port", fake.url.rpartition(":")[2]]) == 1
    assert "in use by another dragoman" in capsys.readouterr().err


def test_a_host_of_elsewhere(capsys: Capture) -> None:
    assert main(["serve", "--host", "192.0.2.1"]) == 1
    assert "192.0.2.1 is not an address of this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("gone.gguf", None, "There is no file gone.gguf"), ("text.gguf", "hello", "is not a GGUF file")],
)
def test_a_wrong_file_is_told(
    tmp_path: Path, capsys: Capture, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["serve", name, "--port", "0"]) == 1
    text = capsys.readouterr().err
    assert message in text
    assert "hint:" in text


@pytest.mark.parametrize("lora", ["poet", "=x.gguf", "poet="])
def test_a_wrong_adapter_is_told(lora: str, weights: Path, capsys: Capture) -> None:
    assert main(["serve", str(weights), "--port", "0", "--lora", lora]) == 2
    assert "NAME=FILE" in capsys.readouterr().err


def test_the_banner_says_what_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = banner(CARD, Settings(), "http://h:1", Colorizer(io.StringIO()))
    for part in (
        "tiny · llama · 135M parameters · Q4_K - Medium · 92 MB · llama.cpp",
        "context 2048 · 8 slots · 2 threads · adapters poet",
        "http://h:1/v1",
        "http://h:1/docs",
        "http://h:1/metrics",
        "curl http://h:1/v1/chat/completions",
        "from openai import OpenAI",
    ):
        assert part in plain
    assert "\x1b" not in plain
    assert "\x1b" in banner(CARD, Settings(), "http://h:1", Colorizer(Tty()))
    assert "Bearer $DRAGOMAN_API_KEY" in banner(CARD, Settings(api_key=["k"]), "http://h:1", Colorizer(Tty()))


def test_the_banner_says_how_answers_are_read() -> None:
    assert "hermes · set" in banner(
        CARD, Settings(), "http://h:1", Colorizer(io.StringIO()), "hermes · set as it is"
    )


@pytest.mark.parametrize("flag", ["--dialect", "--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_dialect_ends_the_start(flag: str, weights: Path, capsys: Capture) -> None:
    assert main(["serve", str(weights), "--port", "0", "--runner", RUNNER, flag, "nobody"]) == 2
    assert "hermes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "keys", "said"),
    [
        ("127.0.0.1", [], "loopback only"),
        ("0.0.0.0", [], "set DRAGOMAN_API_KEY"),
        ("0.0.0.0", ["k"], "required"),
    ],
)
def test_the_banner_says_who_may_ask(host: str, keys: list[str], said: str) -> None:
    assert said in banner(CARD, Settings(host=host, api_key=keys), "http://h:1", Colorizer(io.StringIO()))


def test_the_banners_python_compiles() -> None:
    for settings in (Settings(), Settings(api_key=["k"])):
        text = banner(CARD, settings, "http://h:1", Colorizer(Tty()))
        lines = [line.strip() for line in text.splitlines()]
        start = lines.index("import os" if settings.api_key else "from openai import OpenAI")
        compile(
            "\n".join(lines[start : lines.index("print(answer.choices[0].message.content)") + 1]), "x", "exec"
        )


def test_small_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [short(n) for n in (999, 1500, 134_515_008, 7 * 10**9)] == ["999", "1.5k", "135M", "7B"]
    assert (fact("bytes", "92000000"), fact("runner", "x")) == ("92 MB", "x")
    assert root_of("localhost:1/v1/") == "http://localhost:1"
    assert [host_in_url(h) for h in ("0.0.0.0", "::1", "h")] == ["127.0.0.1", "[::1]", "h"]
    monkeypatch.setenv("DRAGOMAN_API_KEY", "a,b")
    assert (key_of(None), key_of("c")) == ("a", "c")


def test_a_server_for_others_needs_a_key(capsys: Capture) -> None:
    """Known before anything is loaded."""
    assert main(["serve", "nowhere.gguf", "--host", "0.0.0.0", "--port", "0"]) != 0
    text = capsys.readouterr().err
    assert "DRAGOMAN_API_KEY" in text and "--insecure" in text
