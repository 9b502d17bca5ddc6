"""Talking to a server over a real socket."""

import json
from typing import Any

import httpx

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=30)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream; its end mark is checked and left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return chunks(post(url, path, {**body, "stream": True}))
