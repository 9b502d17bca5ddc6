"""Talking to a server over a real socket."""

import json
from typing import Any

import httpx

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def plain(text: str) -> dict[str, Any]:
    """The message of a chat completion that is text and nothing else."""
    unset = dict.fromkeys(("refusal", "reasoning_content", "reasoning"))
    return {"role": "assistant", "content": text, **unset}


def send(method: str, url: str, path: str, **more: Any) -> httpx.Response:
    # Nothing here is encrypted, and to load certificates takes ten times as long as a request.
    return httpx.request(method, url + path, timeout=120, verify=False, **more)


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return send("GET", url, path, headers=headers)


def get_json(url: str, path: str, **query: object) -> dict[str, Any]:
    """What is there under a path; it must be there."""
    reply = send("GET", url, path, params=query)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def refusal(reply: httpx.Response) -> tuple[int, str | None]:
    """The status of an error, and the field that it names."""
    return reply.status_code, reply.json()["error"]["param"]


def delete(url: str, path: str, **headers: str) -> httpx.Response:
    return send("DELETE", url, path, headers=headers)


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return send("POST", url, path, json=body, headers=headers)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream; its end mark is checked and left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return chunks(post(url, path, {**body, "stream": True}))
