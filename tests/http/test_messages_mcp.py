"""Messages with MCP servers, of which there is a real one: calls and results are blocks of the answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.engines.scripted import say
from dragoman.limits import Limits
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.http.test_chat_mcp import started
from tests.http.test_messages import PATH, comparable, events, fold
from tests.mcp.support import sdk_server
from tests.support.http import post, refusal
from tests.support.tool_model import call, prompt_of, tool_model

CALL, FAIL, OWN = call("add", a=2, b=3), call("fail"), call("mine")
MINE = {"name": "mine", "input_schema": {"type": "object"}}
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "sums"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with sdk_server("http") as url:
        yield url


@pytest.fixture(scope="module")
def config(address: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"sums": {"url": address}}}))
    return str(file)


def asked(*tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 3?"}]
    return {"model": "scripted", "max_tokens": 1000, "messages": messages, "tools": list(tools), **more}


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_results_are_blocks(serve: Serve, config: str, stream: bool) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.")
    reply = post(url, PATH, asked(TOOLSET, stream=stream))
    message = fold(events(reply)) if stream else reply.json()
    use, result, text = message["content"]
    assert (use["type"], use["server_name"], use["name"]) == ("mcp_tool_use", "sums", "add")
    assert use["input"] == {"a": 2, "b": 3}
    assert (result["type"], result["tool_use_id"], result["is_error"]) == (
        "mcp_tool_result",
        use["id"],
        False,
    )
    assert result["content"] == [{"type": "text", "text": "5"}]
    assert (text["text"], message["stop_reason"], len(jobs)) == ("It is 5.", "end_turn", 2)


def test_what_comes_back_goes_on_from_the_ids_of_the_answer(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.", "Yes.")
    first = asked(TOOLSET)
    content = post(url, PATH, first).json()["content"]
    later = [{"role": "assistant", "content": content}, {"role": "user", "content": "Sure?"}]
    assert post(url, PATH, {**first, "messages": first["messages"] + later}).status_code == 200
    assert jobs[2].prompt[: len(jobs[1].prompt)] == jobs[1].prompt


def test_calls_of_both_are_made_and_told(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL + "\n" + OWN)
    message = post(url, PATH, asked(TOOLSET, MINE)).json()
    assert kinds(message) == ["mcp_tool_use", "tool_use", "mcp_tool_result"]
    assert message["stop_reason"] == "tool_use"


def test_a_call_that_fails_is_an_error(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, FAIL, "It failed.")
    message = post(url, PATH, asked(TOOLSET)).json()
    assert message["content"][1]["is_error"] is True
    assert "Error" in prompt_of(jobs[1])


def test_a_model_that_goes_on_calling_is_paused(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, CALL, CALL, limits=Limits(tool_calls=1))
    message = post(url, PATH, asked(TOOLSET, MINE)).json()
    assert message["stop_reason"] == "pause_turn"
    assert message["content"][-1]["is_error"] is True


def test_a_server_that_the_request_brings(serve: Serve, address: str, config: str) -> None:
    own = {"type": "url", "name": "theirs", "url": address}
    refused = serve_with(serve, config)
    assert refusal(post(refused, PATH, asked(mcp_servers=[own])))[0] in (400, 403)
    url = serve_with(serve, config, mcp_allow=["127.0.0.1:*"])
    message = post(url, PATH, asked(mcp_servers=[own])).json()
    assert message["content"][0]["server_name"] == "theirs"
    only = {**own, "tool_configuration": {"enabled": True, "allowed_tools": ["add"]}}
    off = {"type": "mcp_toolset", "mcp_server_name": "theirs", "default_config": {"enabled": False}}
    some = {**off, "configs": {"add": {"enabled": True}}}
    for wish in (asked(mcp_servers=[only]), asked(some, mcp_servers=[own])):
        assert kinds(post(url, PATH, wish).json()) == ["mcp_tool_use", "mcp_tool_result", "text"]
    assert kinds(post(url, PATH, asked(off, mcp_servers=[own])).json()) == ["text"]


def serve_with(serve: Serve, config: str, **settings: Any) -> str:
    def answer(job: Job) -> str:
        return "It is 5." if "\ntool\n" in prompt_of(job) or '"add"' not in prompt_of(job) else CALL

    return serve(
        tool_model(lambda job: say(answer(job))),
        mcp_config=config,
        dialect="hermes",
        store="memory",
        **settings,
    )


def test_the_whole_is_what_its_events_add_up_to(serve: Serve, config: str) -> None:
    url = serve_with(serve, config)
    whole = post(url, PATH, asked(TOOLSET)).json()
    streamed = fold(events(post(url, PATH, asked(TOOLSET, stream=True))))
    for message in (whole, streamed):
        message["content"][1]["tool_use_id"] = ""
    assert comparable(whole) == comparable(streamed)
