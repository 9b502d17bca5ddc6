"""Many streams at once, each with a word of its own that no other hears."""

import asyncio
import json
import time
from random import Random
from typing import Any

from msgspec import Struct

from tests.attacks.frame import AttackedServer, attacked
from tests.support.wire import RawReply, ask, request
from tests.torture.page import Row, scaled

CLIENTS, SECONDS = 200, 600
PACE_S = 0.002
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Count(Struct):
    answers: int = 0
    wrong: int = 0
    """Answers that are not, to the letter, what their request said."""


def bodies(text: str) -> dict[str, dict[str, Any]]:
    return {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text, "max_tokens": len(text) + 1},
        RESPONSES: {"input": text},
    }


def said(path: str, heard: RawReply) -> str:
    """What a stream says, in its own API's words."""
    lines = [line[6:] for line in heard.body.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line) for line in lines]
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    choices = [choice for event in events for choice in event["choices"]]
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(choice["text"] for choice in choices)


async def listen(server: AttackedServer, clients: int, seconds: float, seed: int) -> Count:
    """All of them send one and the same request id, which must be nobody's name inside."""
    count, chance, until = Count(), Random(seed), time.monotonic() + seconds

    async def client(number: int) -> None:
        turn = 0
        while turn == 0 or time.monotonic() < until:
            word = f"canary-{number}-{turn}-{chance.getrandbits(64):x} "
            text = (word * chance.randrange(1, 8)).strip()
            path, body = chance.choice(list(bodies(text).items()))
            headers = {"x-request-id": "the-same"}
            heard = await ask(
                server.url, request(server.url, path, {**body, "stream": True}, **headers), patience=120
            )
            count.answers += 1
            count.wrong += heard.status != 200 or said(path, heard) != text
            turn += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    return count


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    """A smaller scale is a shorter time: there are as many at once."""
    seconds = scaled(SECONDS, scale)
    with attacked(interval=PACE_S) as server:
        count = asyncio.run(listen(server, CLIENTS, seconds, seed))
    what = f"{CLIENTS} streams at once for {seconds} s: answers that are not their own"
    return [Row(what, f"{count.wrong} of {count.answers:,}", "0", count.wrong == 0)]
