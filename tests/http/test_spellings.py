"""One conversation in the words of every API: the model is shown the same ids, and gives the same answer."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from msgspec import Struct

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.support.http import post
from tests.support.parrot import call, parrot

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THOUGHT, ASKS, CITY = "Where is it?", "I look.", {"city": "Paris"}
ANSWER = f"<think>\n{THOUGHT}\n</think>\n{ASKS}" + call("look", **CITY)


class ApiAnswer(Struct):
    """An answer, free of how an API spells it."""

    thought: str
    text: str
    calls: list[tuple[str, Any]]


Conversation: TypeAlias = list[tuple[str, Any]]
"""Turns in nobody's words: `("user", "hi")`, `("said", ApiAnswer(...))`, `("result", "sunny")`."""
CALLED = ApiAnswer(THOUGHT, ASKS, [("look", CITY)])
CONVERSATIONS: dict[str, Conversation] = {
    "a question": [("user", "What is the weather?")],
    "with instructions": [("system", "Be kind."), ("user", "What is the weather?")],
    "after an answer": [
        ("user", "hi"),
        ("said", ApiAnswer("", "Hello.", [])),
        ("user", "What is the weather?"),
    ],
    "after thinking": [("user", "hi"), ("said", ApiAnswer("Who?", "Hello.", [])), ("user", "And?")],
    "after a call": [("system", "Be kind."), ("user", "hi"), ("said", CALLED), ("result", "sunny")],
    "after a call and a word": [("user", "hi"), ("said", CALLED), ("result", "sunny"), ("user", "And?")],
}


# Chat Completions.


def in_chat(turns: Conversation) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind, what in turns:
        if kind == "said":
            calls = [
                {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(result)}}
                for name, result in what.calls
            ]
            thought = {"reasoning_content": what.thought} if what.thought else {}
            fields = {"tool_calls": calls} if calls else {}
            messages.append({"role": "assistant", "content": what.text, **thought, **fields})
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": "c1", "content": what})
        else:
            messages.append({"role": kind, "content": what})
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    return "/v1/chat/completions", {"messages": messages, "tools": [tool]}


def of_chat(reply: dict[str, Any]) -> ApiAnswer:
    message = reply["choices"][0]["message"]
    functions = [each["function"] for each in message.get("tool_calls", ())]
    calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
    return ApiAnswer(message.get("reasoning_content", ""), message["content"] or "", calls)


# Responses.


def in_responses(turns: Conversation) -> tuple[str, dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for kind, what in turns:
        if kind == "said":
            if what.thought:
                summary = [{"type": "summary_text", "text": what.thought}]
                items.append({"type": "reasoning", "summary": summary})
            items.append({"type": "message", "role": "assistant", "content": what.text})
            items += [
                {"type": "function_call", "call_id": "c1", "name": name, "arguments": json.dumps(result)}
                for name, result in what.calls
            ]
        elif kind == "result":
            items.append({"type": "function_call_output", "call_id": "c1", "output": what})
        else:
            items.append({"type": "message", "role": kind, "content": what})
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    return "/v1/responses", {"input": items, "tools": [tool], "store": False}


def of_responses(reply: dict[str, Any]) -> ApiAnswer:
    api_answer = ApiAnswer("", "", [])
    for item in reply["output"]:
        if item["type"] == "reasoning":
            api_answer.thought = item["summary"][0]["text"]
        elif item["type"] == "message":
            api_answer.text = item["content"][0]["text"]
        else:
            api_answer.calls.append((item["name"], json.loads(item["arguments"])))
    return api_answer


# Messages.


def in_messages(turns: Conversation) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = {}
    for kind, what in turns:
        if kind == "system":
            system = {"system": what}
        elif kind == "said":
            thought = (
                [{"type": "thinking", "thinking": what.thought, "signature": ""}] if what.thought else []
            )
            calls = [
                {"type": "tool_use", "id": "c1", "name": name, "input": outcome}
                for name, outcome in what.calls
            ]
            text = {"type": "text", "text": what.text}
            messages.append({"role": "assistant", "content": [*thought, text, *calls]})
        elif kind == "result":
            result = {"type": "tool_result", "tool_use_id": "c1", "content": what}
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"role": kind, "content": what})
    tool = {"name": "look", "input_schema": SCHEMA}
    body = {"model": "parrot", "max_tokens": 1000, "messages": messages, "tools": [tool], **system}
    return "/v1/messages", body


def of_messages(reply: dict[str, Any]) -> ApiAnswer:
    blocks = reply["content"]
    return ApiAnswer(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
    )


# Ollama.


def in_ollama(turns: Conversation) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind, what in turns:
        if kind == "said":
            calls = [{"function": {"name": name, "arguments": result}} for name, result in what.calls]
            thought = {"thinking": what.thought} if what.thought else {}
            fields = {"tool_calls": calls} if calls else {}
            messages.append({"role": "assistant", "content": what.text, **thought, **fields})
        elif kind == "result":
            messages.append({"role": "tool", "tool_name": "look", "content": what})
        else:
            messages.append({"role": kind, "content": what})
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    return "/api/chat", {"model": "parrot", "messages": messages, "tools": [tool], "stream": False}


def of_ollama(reply: dict[str, Any]) -> ApiAnswer:
    message = reply["message"]
    functions = [each["function"] for each in message.get("tool_calls", ())]
    calls = [(each["name"], each["arguments"]) for each in functions]
    return ApiAnswer(message.get("thinking", ""), message["content"], calls)


SPELLINGS: dict[str, tuple[Callable[[Conversation], tuple[str, Any]], Callable[[Any], ApiAnswer]]] = {
    "chat": (in_chat, of_chat),
    "responses": (in_responses, of_responses),
    "messages": (in_messages, of_messages),
    "ollama": (in_ollama, of_ollama),
}
"""How each API writes a conversation, and how an answer of its is read."""


def answer(job: Job) -> Script:
    return say(ANSWER)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_all_spellings_have_one_prompt_and_one_answer(serve: Serve, name: str) -> None:
    prompts, answers = {}, {}
    engine: ScriptedEngine = parrot(answer=answer)
    url = serve(engine, store="memory")
    for spelling, (write, read) in SPELLINGS.items():
        path, body = write(CONVERSATIONS[name])
        reply = post(url, path, body)
        assert reply.status_code == 200, (spelling, reply.text)
        answers[spelling], prompts[spelling] = read(reply.json()), engine.jobs[-1].prompt
    assert answers == dict.fromkeys(SPELLINGS, CALLED)
    assert prompts == dict.fromkeys(SPELLINGS, prompts["chat"])
