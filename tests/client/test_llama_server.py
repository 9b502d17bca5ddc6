"""A server of other people, llama.cpp's own, read by the client and used as an engine."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import dragoman
from dragoman.client import StatusError
from dragoman.engines.default_weights import default_model
from dragoman.engines.remote import RemoteEngine
from dragoman.engines.remote.engine import tokenizer_of
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.client.support import HELLO
from tests.support.http import post

FEW: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    size = ["--slots", "1", "--context", "256", "--threads", "1"]
    command = [
        sys.executable,
        "-m",
        "bench.servers.llamacpp",
        str(default_model()),
        "--port",
        str(port),
        *size,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        assert "listening" in server.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def client(url: str) -> Iterator[dragoman.Client]:
    with dragoman.Client(url) as result:
        yield result


def test_chat_with_ids_and_logprobs(client: dragoman.Client) -> None:
    stream = client.chat(HELLO, logprobs=True, top_logprobs=2, **FEW)
    answer = stream.answer()
    tokenizer = tokenizer_of(str(default_model()))
    assert b"".join(tokenizer.pieces[id_] for id_ in answer.ids).decode() == answer.text != ""
    assert all(token.logprob is not None and len(token.top) == 2 for token in answer.tokens)
    assert (answer.finish, stream.usage and stream.usage.completion_tokens) == ("length", 6)


def test_the_three_apis_tell_the_same(client: dragoman.Client) -> None:
    chat = client.chat(HELLO, **FEW).answer()
    assert client.responses("hi", max_output_tokens=6, temperature=0).answer().text == chat.text
    assert client.completions([504, 3575, 282], **FEW).answer().text


def test_a_refusal(client: dragoman.Client) -> None:
    with pytest.raises(StatusError) as caught:
        client.chat([{"role": "user"}]).answer()
    assert caught.value.context.status == 400
    assert "content" in caught.value.server_message


def test_it_is_an_engine_that_gives_text(url: str, client: dragoman.Client) -> None:
    engine = RemoteEngine.open([url], tokenizer_of(str(default_model())))
    assert (engine.card.returns_ids, engine.card.max_model_len) == (False, 256)
    with background(engine, Settings(port=0, store="none", shutdown_grace=0)) as front:
        reply = post(front, "/v1/chat/completions", {"messages": HELLO, **FEW}).json()["choices"][0]
    assert reply["message"]["content"] == client.chat(HELLO, **FEW).answer().text
    assert reply["finish_reason"] == "length"
