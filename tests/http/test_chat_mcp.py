"""Chat Completions with the server's own MCP servers: a real server process, run by the server itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.scripted import Script, say
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.mcp.support import SERVERS
from tests.support.http import post, stream
from tests.support.tool_model import call, prompt_of, tool_model

CALL, FAIL, OWN = call("add", a=2, b=3), call("fail"), call("mine")
MINE = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}


def server(**more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "sums", "require_approval": "never", **more}


def asked(*tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": list(tools), **more}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(SERVERS / "tools.py"), "stdio"]}
    file.write_text(json.dumps({"mcpServers": {"sums": entry}}))
    return str(file)


def started(serve: Serve, config: str, *said: str) -> tuple[str, list[Job]]:
    """A server whose model says these things, one a turn, and what it was asked."""
    asked: list[Job] = []

    def answer(job: Job) -> Script:
        asked.append(job)
        return say(said[len(asked) - 1])

    return serve(tool_model(answer), mcp_config=config, dialect="hermes", store="memory"), asked


def test_the_result_of_a_call_reaches_the_model(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.")
    reply = post(url, "/v1/chat/completions", asked(server())).json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls"), len(jobs)) == ("It is 5.", None, 2)


def test_a_stream_shows_the_answer_only(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, "It is 5.")
    chunks = stream(url, "/v1/chat/completions", asked(server()))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 5."
    assert not any("tool_calls" in delta for delta in deltas)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]


def test_usage_is_that_of_all_turns(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.")
    usage = post(url, "/v1/chat/completions", asked(server())).json()["usage"]
    assert usage["prompt_tokens"] == sum(len(job.prompt) for job in jobs)


def test_a_call_that_fails_is_told_to_the_model(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, FAIL, "It failed.")
    reply = post(url, "/v1/chat/completions", asked(server())).json()
    assert reply["choices"][0]["message"]["content"] == "It failed."
    assert "it cannot be done" in prompt_of(jobs[1])


def test_the_clients_own_calls_are_the_clients(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, OWN)
    reply = post(url, "/v1/chat/completions", asked(server(), MINE)).json()
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert (made["function"]["name"], reply["choices"][0]["finish_reason"]) == ("mine", "tool_calls")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (server(require_approval="always"), "tools[0].require_approval"),
        (server(server_label="nobody"), "tools"),
        (server(server_label=""), "tools[0].server_label"),
    ],
)
def test_what_cannot_be_done_is_refused(serve: Serve, config: str, tool: dict[str, Any], param: str) -> None:
    url, jobs = started(serve, config, "no")
    reply = post(url, "/v1/chat/completions", asked(tool))
    assert (reply.status_code, reply.json()["error"]["param"], len(jobs)) == (400, param, 0)


def test_tools_that_are_not_allowed_are_not_offered(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, "no second turn")
    reply = post(url, "/v1/chat/completions", asked(server(allowed_tools=["parts"]))).json()
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "add"
