"""Chat Completions with the server's own MCP servers, of which there is a real one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.scripted import Script, say
from dragoman.limits import Limits
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.mcp.support import sdk_server
from tests.support.http import get, post, stream
from tests.support.messages import message_of
from tests.support.tool_model import call, prompt_of, tool_model

CALL, FAIL, OWN = call("add", a=2, b=3), call("fail"), call("mine")
MINE = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}


def server(**more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "sums", "require_approval": "never", **more}


def asked(*tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": list(tools), **more}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    with sdk_server("http") as url:
        file.write_text(json.dumps({"mcpServers": {"sums": {"url": url}}}))
        yield str(file)


def started(serve: Serve, config: str, *said: str, **settings: Any) -> tuple[str, list[Job]]:
    """A server whose model says these things, one a turn, and what it was asked."""
    asked: list[Job] = []

    def answer(job: Job) -> Script:
        asked.append(job)
        return say(said[len(asked) - 1])

    return serve(tool_model(answer), mcp_config=config, dialect="hermes", store="memory", **settings), asked


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


def test_a_length_that_is_decided_is_that_of_all_turns(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.", override={"max_tokens": len(CALL) + 4})
    reply = post(url, "/v1/chat/completions", asked(server(), max_tokens=4000)).json()["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == ("It ", "length")
    assert [job.sampling.max_tokens for job in jobs] == [len(CALL) + 4, 3]


def test_a_call_that_fails_is_told_to_the_model(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, FAIL, "It failed.")
    reply = post(url, "/v1/chat/completions", asked(server())).json()
    assert reply["choices"][0]["message"]["content"] == "It failed."
    assert "it cannot be done" in prompt_of(jobs[1])


def test_the_clients_own_calls_are_the_clients(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, OWN)
    reply = post(url, "/v1/chat/completions", asked(server(), MINE)).json()
    (result,) = reply["choices"][0]["message"]["tool_calls"]
    assert (result["function"]["name"], reply["choices"][0]["finish_reason"]) == ("mine", "tool_calls")


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
    (result,) = reply["choices"][0]["message"]["tool_calls"]
    assert result["function"]["name"] == "add"


# Bounds


def test_no_more_calls_than_allowed_are_made(serve: Serve, config: str) -> None:
    """Then the model is offered the client's tools alone, and a call of another is the end."""
    url, jobs = started(serve, config, CALL, CALL, "no third turn", limits=Limits(tool_calls=1))
    message = post(url, "/v1/chat/completions", asked(server(), MINE)).json()["choices"][0]["message"]
    assert (message["content"] or "", message.get("tool_calls"), len(jobs)) == ("", None, 2)
    offered = prompt_of(jobs[1]).partition("2 + 3?")[0]
    assert ('"mine"' in offered, '"add"' in offered) == (True, False)


@pytest.mark.parametrize("room", [0, 5])
def test_the_tokens_of_all_turns_are_counted(serve: Serve, config: str, room: int) -> None:
    url, _ = started(serve, config, CALL, "It is 5.")
    reply = post(url, "/v1/chat/completions", asked(server(), max_tokens=len(CALL) + 1 + room)).json()
    choice = reply["choices"][0]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("It is 5."[:room], "length")
    assert reply["usage"]["completion_tokens"] == len(CALL) + 1 + room


def test_a_required_call_is_required_once(serve: Serve, config: str) -> None:
    url, jobs = started(serve, config, CALL, "It is 5.")
    post(url, "/v1/chat/completions", asked(server(), MINE, tool_choice="required"))
    assert [job.constraint is None for job in jobs] == [False, True]


# Failures


def test_calls_beside_those_of_the_client_are_not_made(serve: Serve, config: str) -> None:
    """Nobody could tell the model of their results: the client, who goes on, has not seen them."""
    url, jobs = started(serve, config, f"{CALL}\n{OWN}")
    (result,) = post(url, "/v1/chat/completions", asked(server(), MINE)).json()["choices"][0]["message"][
        "tool_calls"
    ]
    assert (result["function"]["name"], len(jobs)) == ("mine", 1)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_fails_between_calls_is_told(serve: Serve, config: str, streams: bool) -> None:
    def answer(job: Job) -> Script:
        if len(job.prompt) > len(first):
            raise RuntimeError("secret")
        return say(CALL)

    first = tool_prompt(serve, config)
    url = serve(tool_model(answer), mcp_config=config, dialect="hermes", store="memory")
    reply = post(url, "/v1/chat/completions", asked(server(), stream=streams))
    assert reply.status_code == (200 if streams else 500)
    assert ("error" in reply.text, "secret" in reply.text) == (True, False)


def tool_prompt(serve: Serve, config: str) -> tuple[int, ...]:
    url, jobs = started(serve, config, "hi")
    post(url, "/v1/chat/completions", asked(server()))
    return jobs[0].prompt


def missing(tmp_path: Path) -> str:
    file = tmp_path / "missing.json"
    file.write_text(json.dumps({"mcpServers": {"sums": {"command": str(tmp_path / "nobody")}}}))
    return str(file)


def test_a_server_that_is_not_there_is_an_error(serve: Serve, tmp_path: Path) -> None:
    url, jobs = started(serve, missing(tmp_path), "no")
    reply = post(url, "/v1/chat/completions", asked(server()))
    assert (reply.status_code, reply.json()["error"]["code"], len(jobs)) == (503, "mcp_unavailable", 0)


def test_a_bad_request_is_refused_before_a_server_is_asked(serve: Serve, tmp_path: Path) -> None:
    url, _ = started(serve, missing(tmp_path), "no")
    reply = post(url, "/v1/chat/completions", asked(server(), model="another"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")


def test_a_stored_answer_is_the_one_that_was_seen(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, CALL, "It is 5.")
    chunks = stream(url, "/v1/chat/completions", asked(server(), store=True))
    kept = get(url, f"/v1/chat/completions/{chunks[0]['id']}").json()
    assert kept["choices"][0]["message"]["content"] == "It is 5."


@pytest.mark.parametrize("streams", [False, True])
def test_what_was_thought_in_all_turns_comes_back_with_the_answer(
    serve: Serve, config: str, streams: bool
) -> None:
    """As if the client had sent the reasoning that it has seen."""
    texts = [f"<think>\nOne.\n</think>\nI add. {CALL}", f"<think>\nTwo.\n</think>\n{OWN}", "Done."]
    url, jobs = started(serve, config, *texts, *texts)
    prompts = []
    for number, kept in enumerate(({}, {"reasoning_content": "One.Two.", "restore_reasoning": "off"})):
        body = asked(server(), MINE, cache_salt=str(number))
        if streams:
            message = message_of(stream(url, "/v1/chat/completions", body))
        else:
            message = post(url, "/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["reasoning"] == "One.Two."
        calls = message["tool_calls"]
        sent = {"role": "assistant", "content": message["content"], "tool_calls": calls}
        sent |= {"reasoning_content": kept["reasoning_content"]} if kept else {}
        body["messages"] += [sent, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "mine"}]
        more = {"restore_reasoning": "off"} if kept else {}
        post(url, "/v1/chat/completions", {**body, "tools": [MINE], **more})
        prompts.append(jobs[-1].prompt)
    assert prompts[0] == prompts[1]
    assert b"One.Two." in bytes(id_ for id_ in prompts[0] if id_ < 256)
