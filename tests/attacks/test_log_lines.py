"""Keys and prompts never reach a line of the log, whatever goes wrong with them."""

import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.attacks.frame import ROOT
from tests.attacks.leaky import BREAK
from tests.attacks.raw_messages import HOST
from tests.attacks.raw_socket import Raw

KEY = "sk-KEYCANARY"
WRONG_KEY = "sk-WRONGCANARY"
PROMPT = "PROMPTCANARY"
CANARY = "CANARY"
BROKEN = f"{BREAK.decode()} {PROMPT}"
"""The engine fails on it, and says why."""


URL = re.compile(r"http://[\d.]+:\d+")
CLI = (
    "-m",
    "dragoman",
    "serve",
    "--engine",
    "tests.attacks.leaky:ENGINE",
    "--port",
    "0",
    "--store",
    "memory",
)
PYTHON = (
    "from dragoman import serve; from tests.attacks.leaky import ENGINE as engine; "
    f"serve(engine, port=0, store='memory', api_key=['{KEY}'], on_ready=lambda url: print(url, flush=True))"
)
WAYS = {
    "for people": (*CLI, "--api-key", KEY),
    "as JSON": (*CLI, "--api-key", KEY, "--log-json"),
    "from Python": ("-c", PYTHON),
}


@pytest.fixture(scope="module", params=WAYS)
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that a server has written when it was asked and attacked."""
    log = tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, *WAYS[request.param]]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            text = ""
            while not (match := URL.search(text)):
                line = process.stdout.readline()
                assert line, log.read_text()
                text += line
            provoke(match[0])
        finally:
            process.terminate()
            text += process.stdout.read()
            process.stdout.close()
            process.wait()
    return text + log.read_text()


def provoke(url: str) -> None:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, verify=False) as client:
        for text in (PROMPT, BROKEN):
            chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": chat,
                "/v1/completions": {"prompt": text},
                "/v1/responses": {"input": text},
                "/tokenize": chat,
            }
            for path, body in bodies.items():
                client.post(path, json=body)
                client.post(path, json={**body, "stream": True})
                client.post(path, json={**body, "temperature": "hot"})
                client.post(path, json={**body, "n": 10**9, "stop": [text] * 1000})
                client.post(path, json={**body, "metadata": {text: [text]}, "user": [text]})
                client.post(path, json=body, headers={"authorization": f"Bearer {WRONG_KEY}"})
                client.post(path, json=body, headers={"content-type": f"text/{CANARY}"})
                client.post(path, content=f'{{"messages": "{text}'.encode())
        client.get("/v1/models", params={"key": KEY, "prompt": PROMPT})
    over_socket(url)
    for message in (
        f"GET /health HTTP/1.1\r\nAuthorization: Bearer {KEY}\nX: {PROMPT}\r\n\r\n".encode(),
        f"{KEY} {PROMPT}\r\n\r\n".encode(),
        b"POST /tokenize HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + KEY.encode()
        + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + f"X: {PROMPT}".encode() * 10_000,
    ):
        with Raw(url) as raw:
            raw.send(message)
            raw.rest()


def over_socket(url: str) -> None:
    param = url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus):
        connect(param, additional_headers={"x-api-key": WRONG_KEY})
    with connect(param, additional_headers={"x-api-key": KEY}) as socket:
        for message in (
            f'{{"type": "response.create", "input": "{BROKEN}"}}',
            f'{{"type": "{PROMPT}"}}',
            PROMPT,
        ):
            socket.send(message)
            socket.recv(timeout=60)


def test_a_refused_socket_is_no_fault_of_ours(lines: str) -> None:
    assert "ASGI" not in lines


def test_no_line_has_a_key_or_a_prompt_in_it(lines: str) -> None:
    assert [line for line in lines.splitlines() if CANARY in line] == []


def test_the_lines_tell_what_happened(lines: str) -> None:
    """Otherwise nothing would have been shown above."""
    assert "ValueError" in lines and "leaky.py" in lines
