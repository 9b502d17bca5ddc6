"""`serve_oai` as an engine's author calls it: in a process of its own, until a signal comes."""

import signal
import subprocess
import sys
from typing import Any

import pytest

import dragoman
from dragoman.errors import SettingsError
from tests.support.fake_asyncllm import FakeAsyncLLM
from tests.support.http import HELLO, post

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


def test_wrong_names_are_told_before_anything_is_served() -> None:
    with pytest.raises(SettingsError, match="no dialect 'nobody'"):
        dragoman.serve_oai(FakeAsyncLLM(), port=0, tool_parser="nobody")


def test_what_is_no_engine_is_told() -> None:
    with pytest.raises(SettingsError, match="generate_request"):
        dragoman.serve_oai(object(), port=0)
