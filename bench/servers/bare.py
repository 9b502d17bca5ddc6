"""The floor: a bare ASGI app that sends bytes made beforehand: uvicorn, the event loop and the kernel."""

import asyncio
import json
from typing import Any

import uvicorn

from bench.pulse import Pulse
from bench.servers import options
from bench.words import WORDS

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def event(choices: list[dict[str, Any]], **extra: Any) -> bytes:
    envelope = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1800000000,
        "model": "scripted",
        "system_fingerprint": "dragoman-0.0.0",
        "choices": choices,
        "usage": None,
    }
    return b"data: " + json.dumps(envelope | extra, separators=(",", ":")).encode() + b"\n\n"


def choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


TOKENS = [event([choice({"content": word})]) for word in WORDS]


class Waiter:
    """The cheapest way to wait that a task has: one future for each time."""

    def __init__(self, pulse: Pulse) -> None:
        self._ready: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_future()
        pulse.join(self._put)

    def _put(self, number: int) -> None:
        self._ready.append(number)
        if not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> list[int]:
        await self._waiting
        self._waiting = self._loop.create_future()
        ready, self._ready = self._ready, []
        return ready


class Bare:
    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        usage = {"prompt_tokens": 0, "completion_tokens": pulse.tokens, "total_tokens": pulse.tokens}
        self._end = event([choice({}, "length")]) + event([], usage=usage) + b"data: [DONE]\n\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if scope["path"] == "/v1/models":
            await send({"type": "http.response.body", "body": b'{"data":[{"id":"scripted"}]}'})
            return
        while (await receive()).get("more_body"):
            pass
        await self._stream(Waiter(self._pulse), send)

    async def _stream(self, waiter: Waiter, send: Any) -> None:
        left = self._pulse.tokens
        while left:
            for number in await waiter.get():
                body = TOKENS[number % len(WORDS)]
                await send({"type": "http.response.body", "body": body, "more_body": True})
                left -= 1
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


if __name__ == "__main__":
    args = options.parser("a bare ASGI app that sends bytes made beforehand").parse_args()
    bare = Bare(Pulse(args.streams, args.tokens))
    uvicorn.run(bare, port=args.port, access_log=False, log_level="warning", lifespan="off")
