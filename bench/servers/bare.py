"""The floor: a bare ASGI app that sends bytes made beforehand. No Python server can be much cheaper."""

import json
from typing import Any

import uvicorn

from bench.pulse import Collector, Pulse
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
        await self._stream(Collector(self._pulse), send)

    async def _stream(self, collector: Collector, send: Any) -> None:
        over = False
        while not over:
            for number in await collector.get():
                body = TOKENS[number % len(WORDS)]
                await send({"type": "http.response.body", "body": body, "more_body": True})
                over = collector.ends(number)
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


if __name__ == "__main__":
    args = options.parser("a bare ASGI app that sends bytes made beforehand").parse_args()
    bare = Bare(Pulse(args.streams, args.tokens))
    uvicorn.run(bare, port=args.port, access_log=False, log_level="warning", lifespan="off")
