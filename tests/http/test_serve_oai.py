"""`serve_oai` as an engine's author calls it: in a process of its own, until a signal comes."""

import signal
import subprocess
import sys
from typing import Any

import pytest

import dragoman
from dragoman.errors import SettingsError
from tests.support.fake_asyncllm import FakeAsyncLLM
from tests.support.http import HELLO, post, send

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>'
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROGRAM = f"""
import dragoman
from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from tests.support.fake_asyncllm import FakeAsyncLLM, Manner

text = '<think>Hm.</think>{CALL}'
engines = {{
    "asyncllm": FakeAsyncLLM(Manner(ids=(*text.encode(), END_ID))),
    "own": ScriptedEngine(say(text)),
}}
dragoman.serve_oai(
    engines["NAME"],
    port=0,
    chat_template="{TEMPLATE}",
    tool_parser="qwen",
    reasoning_parser="qwen3",
    on_ready=lambda url: print(url, flush=True),
)
"""
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("name", ["asyncllm", "own"])
def test_it_serves_until_a_signal_comes(name: str) -> None:
    program = PROGRAM.replace("NAME", name)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        message: dict[str, Any] = post(url, CHAT, {**HELLO, "tools": TOOLS}).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
        process.communicate()


GIVEN = """
import asyncio
import dragoman
from tests.support.text_engines import TextLLM

llm = TextLLM("Hel", "lo<eos>")
given = dict(
    port=0,
    chat_template="{{ bos_token }}{{ messages[0].content }}",
    special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
    max_model_len=77,
    model_name="given",
)
CALL
print(llm.asked[0].text, flush=True)
"""
CALLS = {
    "serve_oai": "dragoman.serve_oai(llm, **given)",
    "aserve_oai": """
try:
    asyncio.run(dragoman.aserve_oai(llm, **given))
except KeyboardInterrupt:
    pass
""",
}


@pytest.mark.parametrize("name", CALLS)
def test_an_engine_is_told_of_and_the_address_is_printed(name: str) -> None:
    """There is neither a tokenizer nor a length: what is known is given, and the answer is text."""
    program = GIVEN.replace("CALL", CALLS[name])
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = process.stdout.readline()
        url = text.split(" at ")[1].split("/v1")[0]
        assert text.startswith("dragoman serves given at http://127.0.0.1:")
        model = send("GET", url, "/v1/models").json()["data"][0]
        assert (model["id"], model["max_model_len"], model["token_ids"]) == ("given", 77, "none")
        answer = post(url, CHAT, {**HELLO, "model": "given"}).json()
        assert answer["choices"][0]["message"]["content"] == "Hello"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert rest.strip() == "<bos>hi"
    finally:
        process.kill()
        process.communicate()


def test_wrong_names_are_told_before_anything_is_served() -> None:
    with pytest.raises(SettingsError, match="Unknown dialect 'nobody'"):
        dragoman.serve_oai(FakeAsyncLLM(), port=0, tool_parser="nobody")


def test_what_is_no_engine_is_told() -> None:
    with pytest.raises(SettingsError, match="generate_request"):
        dragoman.serve_oai(object(), port=0)
