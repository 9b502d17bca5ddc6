"""`--log-json`: everything that the process says is JSON, from its first line to its last."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from tests.support.collector import Collector, collecting
from tests.support.engines import RUNNER
from tests.support.http import get, post

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENGINE = """
import sys, threading, warnings, logging
from dragoman.engines.scripted import ScriptedEngine, say
print("on stdout")
sys.stderr.write("half a ")
sys.stderr.write("line\\n")
sys.stdout.write("no end")
warnings.warn("beware")
logging.getLogger("other").error("of another package")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
engine = ScriptedEngine(say("hi"))
"""


def lines(text: str) -> list[dict[str, Any]]:
    """All of them; one that is no JSON fails."""
    return [json.loads(line) for line in text.splitlines()]


def run(*flags: str, folder: Path, **env: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "dragoman", "serve", *flags]
    fields = {**os.environ, "PYTHONPATH": str(folder), **env}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=fields)
    return done.returncode, lines(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--log-json", "--port", "high"], "port"),
        (["--log-json", "--prot", "1"], "--prot"),
        (["no-such.gguf", "--log-json"], "no-such.gguf"),
        (["--engine", "broken:engine", "--log-json"], "broken"),
    ],
)
def test_a_start_that_fails_is_told_in_json(flags: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    code, rows = run(*flags, folder=tmp_path)
    assert code in (1, 2)
    assert rows[-1]["level"] == "error"
    assert words in rows[-1]["message"]


class LogReader(Struct):
    said: list[dict[str, Any]]
    collector: Collector
    traceresponse: str


def address(process: "subprocess.Popen[str]", log: Path) -> str:
    while process.poll() is None:
        for line in lines(log.read_text().rpartition("\n")[0]):
            if " serves " in line.get("message", ""):
                return str(line["message"].split()[-1].removesuffix("/v1"))
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogReader]:
    """A real model that has answered, with traces; and how the server ended."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    with collecting() as collector, log.open("w") as file:
        flags = ["--log-json", "--port", "0", "--data-dir", str(folder), "--runner", RUNNER]
        command = [sys.executable, "-m", "dragoman", "serve", *flags, "--otel-endpoint", collector.url]
        with subprocess.Popen(command, stdout=file, stderr=file, text=True) as process:
            url = address(process, log)
            body = {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 8,
                "ignore_eos": True,
                "stream": True,
            }
            trace = post(url, CHAT, body, traceparent=PARENT).headers["traceresponse"]
            post(url, CHAT, {"messages": 1})
            assert get(url, "/nowhere").status_code == 404
            process.send_signal(signal.SIGTERM)
            process.wait()
        yield LogReader(lines(log.read_text()), collector, trace)


def test_every_line_of_a_real_server_is_json(heard: LogReader) -> None:
    assert all({"time", "level", "logger"} <= line.keys() for line in heard.said)
    assert [line["status"] for line in heard.said if "status" in line] == [200, 400, 404]


def test_lines_have_the_ids_of_their_request_and_their_trace(heard: LogReader) -> None:
    answered = next(line for line in heard.said if line.get("status") == 200)
    assert answered["trace_id"] == PARENT[3:35]
    assert heard.traceresponse[3:52] == f"{answered['trace_id']}-{answered['span_id']}"
    assert answered["request_id"].startswith("req_")
    assert next(line for line in heard.said if line.get("status") == 400)["code"]


def test_a_real_model_leaves_the_spans_of_a_turn(heard: LogReader) -> None:
    [turn] = [span for span in heard.collector.spans if span.name.startswith("chat ")]
    assert heard.collector.under(turn) == ["prompt", "queue", "prefill", "decode"]
    assert turn.attributes["gen_ai.usage.output_tokens"] == 8
    assert turn.attributes["gen_ai.response.finish_reasons"] == ["length"]
    prefill, decode = heard.collector.one("prefill"), heard.collector.one("decode")
    assert prefill.end - prefill.start > 0
    assert decode.end - decode.start > 0


def test_what_others_print_warn_of_and_fail_with_is_json_too(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(ENGINE)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "dragoman", "serve", "--engine", "loud:engine", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "DRAGOMAN_LOG_JSON": "1", "DRAGOMAN_STORE": "memory"}
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, text=True, env=env, cwd=tmp_path) as process,
    ):
        url = address(process, log)
        httpx.post(url + CHAT, json={"messages": 1}, headers={"traceparent": PARENT})
        process.send_signal(signal.SIGTERM)
        process.wait()
    rows = lines(log.read_text())
    items = [line.get("message", "") for line in rows]
    assert {"on stdout", "half a line", "of another package"} <= set(items)
    assert any(message.startswith("no end") for message in items)
    assert any("beware" in message for message in items)
    [thread] = [line for line in rows if line.get("exception")]
    assert thread["exception"] == "ZeroDivisionError"
    # The trace of a client is told though there are none of our own.
    assert next(line for line in rows if "status" in line)["trace_id"] == PARENT[3:35]
