"""dragoman on a real cluster of Ray: what is served, and what becomes of it when replicas die."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


def body(model: str = "one", text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if "choices" in e)


class LongStream(threading.Thread):
    """A client that reads a long stream until it ends, or until it is told to leave."""

    def __init__(self, client: httpx.Client, text: str) -> None:
        super().__init__()
        self._client, self._text = client, text
        self.said, self.last = "", ""
        self.leaves = False
        self.start()

    @property
    def process(self) -> int | None:
        """Who answers: it says so first."""
        process, space, _ = self.said.partition(" ")
        return int(process) if space else None

    def run(self) -> None:
        asked = body(text=f"long {self._text}", stream=True)
        with self._client.stream("POST", CHAT, json=asked) as reply:
            for line in filter(None, reply.iter_lines()):
                self.said += text_of([line])
                self.last = line
                if self.leaves:
                    return


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post(CHAT, json=body(**more))


def replicas(client: httpx.Client, model: str = "one") -> set[str]:
    """Those that answer a few questions that have nothing in common."""
    items = [ask(client, model=model, text=f"{number} " * 20, max_tokens=1) for number in range(8)]
    assert all(reply.status_code == 200 for reply in items), [reply.text for reply in items]
    return {reply.headers["x-dragoman-replica"] for reply in items}


def both(client: httpx.Client) -> set[str]:
    """The replicas of the first model, once the door knows both."""
    texts: set[str] = set()

    def are_two() -> bool:
        texts.update(replicas(client))
        return len(texts) == 2

    assert becomes(are_two)
    return texts


def test_models_are_behind_one_address(fleet: httpx.Client) -> None:
    assert {model["id"] for model in fleet.get("/v1/models").json()["data"]} == {"one", "two"}
    assert ask(fleet, model="two").json()["model"] == "two"
    assert ask(fleet, model="three").status_code == 404
    both(fleet)


def test_a_client_that_leaves_is_not_answered_any_longer(fleet: httpx.Client) -> None:
    session = {"x-session-id": "leaves"}
    with fleet.stream("POST", CHAT, json=body(stream=True, text="long"), headers=session) as reply:
        next(reply.iter_lines())
        where = reply.headers["x-dragoman-replica"]

    def has_left() -> bool:
        response = fleet.get("/metrics", params={"replica": where})
        assert response.headers["x-dragoman-replica"] == where
        return any("disconnect" in line and not line.endswith(" 0.0") for line in response.text.splitlines())

    assert becomes(has_left)


def test_a_killed_replica_is_told_of_and_replaced(fleet: httpx.Client) -> None:
    kept = fleet.post("/v1/responses", json={"model": "one", "input": "keep"}).json()["id"]
    before = both(fleet)
    streams = [LongStream(fleet, f"{number} " * 30) for number in range(6)]
    assert becomes(lambda: all(each.process for each in streams))
    killed = streams[0].process
    assert killed
    os.kill(killed, signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        asked = list(pool.map(lambda number: ask(fleet, text=f"new {number}", max_tokens=3), range(12)))
    assert {reply.status_code for reply in asked} == {200}
    broken = [each for each in streams if each.process == killed]
    assert becomes(lambda: not any(each.is_alive() for each in broken))
    assert {json.loads(each.last[6:])["error"]["code"] for each in broken} == {"replica_lost"}
    others = [each for each in streams if each not in broken]
    assert all(each.is_alive() for each in others)
    for each in others:
        each.leaves = True
        each.join()
    assert fleet.get(f"/v1/responses/{kept}").json()["status"] == "completed"
    after: set[str] = set()

    def is_back() -> bool:
        after.update(replicas(fleet))
        return len(after - before) == 1

    assert becomes(is_back)


def test_more_replicas_come_where_answers_wait(fleet: httpx.Client) -> None:
    stopped, seen = threading.Event(), set[str]()

    def has_grown() -> bool:
        seen.update(replicas(fleet, "two"))
        return len(seen) == 2

    def keep_asking(number: int) -> None:
        while not stopped.is_set():
            assert ask(fleet, model="two", text=f"{number} " * 20).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(8)]
        try:
            assert becomes(has_grown)
        finally:
            stopped.set()
        for each in asking:
            each.result()
