"""Requests in the forms that real clients send them in."""

import json
from itertools import count
from typing import Any

from dragoman.api.responses import request as requests
from dragoman.api.responses.items import normalise
from dragoman.api.responses.tools import offer_tools
from dragoman.limits import Limits
from dragoman.turns.spec import TurnSpec
from dragoman.types import Conversation, Message, ToolCall

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


def asked(body: dict[str, Any]) -> tuple[TurnSpec, Conversation]:
    request = requests.read(json.dumps(body).encode(), Limits())
    numbers = count()
    items = normalise(request.input, lambda prefix: f"{prefix}{next(numbers)}")
    offer = offer_tools(request.tools, Limits(), items)
    spec = requests.spec(request, items, offer, first=True, unseal={"sealed": "hm"}.get)
    [item] = spec.prompts
    assert isinstance(item, Conversation)
    return spec, item


def text(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


def test_codex() -> None:
    spec, conversation = asked(
        {
            "model": "local",
            "instructions": "You are a coding agent.",
            "input": [
                text("developer", "<permissions>"),
                text("developer", "<environment>"),
                text("user", "# AGENTS.md", "list the files"),
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": None,
                    "encrypted_content": "sealed",
                },
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "status": "completed",
                    "name": "read",
                    "namespace": "mcp__files__",
                    "arguments": '{"cmd":"ls"}',
                    "call_id": "call_1",
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "description": "",
                    "strict": False,
                    "parameters": PARAMETERS,
                },
                {
                    "type": "namespace",
                    "name": "mcp__files__",
                    "description": "Files.",
                    "tools": [
                        {"type": "function", "name": "read", "strict": False, "parameters": PARAMETERS}
                    ],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198",
            "client_metadata": {"x-codex-installation-id": "1"},
            "text": {"verbosity": "low"},
        }
    )
    assert [message.role for message in conversation.messages] == [
        *("system", "developer", "developer", "user", "assistant", "tool")
    ]
    call = ToolCall(id="call_1", name="mcp__files__read", arguments='{"cmd":"ls"}')
    assert conversation.messages[4] == Message(role="assistant", reasoning="hm", tool_calls=(call,))
    assert [tool["function"]["name"] for tool in conversation.tools] == ["shell", "mcp__files__read"]
    assert spec.parsing is not None and spec.parsing.calls and spec.tool_policy is None


def test_pi() -> None:
    """Easy messages without a type, and a call without a status."""
    _, conversation = asked(
        {
            "model": "local",
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "stream": True,
            "store": False,
            "max_output_tokens": 100,
            "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}],
        }
    )
    assert [message.role for message in conversation.messages] == ["developer", "user", "assistant", "tool"]


def test_llama_index() -> None:
    """Null for everything that is not used."""
    unset = "include instructions metadata previous_response_id truncation user tools tool_choice"
    spec, conversation = asked(
        {"model": "m", "input": [{"role": "user", "content": "hi"}], "temperature": 0.1}
        | dict.fromkeys(
            [*unset.split(), "max_output_tokens", "reasoning", "text", "top_p", "store", "prompt"]
        )
    )
    assert conversation.messages == (Message(role="user", content="hi"),)
    assert spec.sampling.temperature == 0.1


def test_the_output_of_a_response_is_sent_back_as_it_came() -> None:
    """As the SDK dumps it, with all its nulls."""
    output = [
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": None,
            "encrypted_content": None,
            "status": None,
        },
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": None}],
        },
    ]
    _, conversation = asked(
        {"input": [{"role": "user", "content": "hi"}, *output, {"role": "user", "content": "more"}]}
    )
    assert [(message.role, message.content) for message in conversation.messages] == [
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "more"),
    ]
