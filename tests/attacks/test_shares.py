"""A key that asks or stores as much as it likes takes nothing from another's share."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.attacks.frame import AttackedServer, attacked

GREEDY, MODEST = "sk-greedy", "sk-modest"
CHAT = "/v1/chat/completions"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[AttackedServer]:
    limits = {"in_flight": 4}
    keys = [GREEDY, MODEST]
    with attacked(interval=0.002, api_key=keys, limits=limits, store_max_bytes=1024 * 1024) as started:
        yield started


def client(server: AttackedServer, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, verify=False)


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize("fields", [{"priority": -(2**31)}, {"n": 256}, {"n": 64, "priority": -9}])
def test_no_priority_and_no_n_keeps_another_key_waiting(
    server: AttackedServer, fields: dict[str, int]
) -> None:
    async def scenario() -> None:
        async with client(server, GREEDY) as greedy, client(server, MODEST) as modest:
            body = asked("a long answer, " * 8, **fields)
            flood = [asyncio.create_task(greedy.post(CHAT, json=body)) for _ in range(40)]
            await asyncio.sleep(0.2)
            for _ in range(3):
                reply = await asyncio.wait_for(modest.post(CHAT, json=asked("hi", priority=9)), PATIENCE_S)
                assert reply.json()["choices"][0]["message"]["content"] == "hi"
            assert sum(not one.done() for one in flood) > 20
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(scenario())


def test_what_one_key_stores_does_not_push_out_what_another_has(server: AttackedServer) -> None:
    def said(size: int) -> dict[str, Any]:
        return {"items": [{"type": "message", "role": "user", "content": "x" * size}]}

    async def scenario() -> None:
        async with client(server, GREEDY) as greedy, client(server, MODEST) as modest:
            mine = (await modest.post("/v1/conversations", json=said(100_000))).json()["id"]
            theirs = [
                (await greedy.post("/v1/conversations", json=said(60_000))).json()["id"] for _ in range(40)
            ]
            assert (await modest.get(f"/v1/conversations/{mine}")).status_code == 200
            assert (await greedy.get(f"/v1/conversations/{theirs[0]}")).status_code == 404
            assert (await greedy.get(f"/v1/conversations/{theirs[-1]}")).status_code == 200
            refused = await greedy.post("/v1/conversations", json=said(600_000))
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "store_share_exceeded")

    asyncio.run(scenario())
