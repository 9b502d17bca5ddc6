"""dragoman on a real cluster of Ray: what is served, and what becomes of it when replicas die."""

import json
import os
import signal
import threading
from collections.abc import Callable
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


def stream(client: httpx.Client, on_begun: Callable[[str], None] = lambda _: None, **more: Any) -> list[str]:
    lines: list[str] = []
    with client.stream("POST", CHAT, json=body(stream=True, **more)) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line:
                lines.append(line)
            if " " in text_of(lines[-1:]):
                on_begun(text_of(lines).split()[0])
    return lines


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post(CHAT, json=body(**more))


def replicas(client: httpx.Client, model: str = "one") -> set[str]:
    """Those that answer a few questions that have nothing in common."""
    found = [ask(client, model=model, text=f"{number} " * 20, max_tokens=1) for number in range(8)]
    assert all(reply.status_code == 200 for reply in found), [reply.text for reply in found]
    return {reply.headers["x-dragoman-replica"] for reply in found}


def test_models_are_behind_one_address(fleet: httpx.Client) -> None:
    assert {model["id"] for model in fleet.get("/v1/models").json()["data"]} == {"one", "two"}
    assert ask(fleet, model="two").json()["model"] == "two"
    assert ask(fleet, model="three").status_code == 404
    assert len(replicas(fleet)) == 2


def test_a_client_that_leaves_is_not_answered_any_longer(fleet: httpx.Client) -> None:
    session = {"x-session-id": "leaves"}
    with fleet.stream("POST", CHAT, json=body(stream=True, text="long"), headers=session) as reply:
        next(reply.iter_lines())
        where = reply.headers["x-dragoman-replica"]

    def has_left() -> bool:
        told = fleet.get("/metrics", headers=session)
        assert told.headers["x-dragoman-replica"] == where
        return any("disconnect" in line and not line.endswith(" 0.0") for line in told.text.splitlines())

    assert becomes(has_left)


def test_a_killed_replica_is_told_of_and_replaced(fleet: httpx.Client) -> None:
    kept = fleet.post("/v1/responses", json={"model": "one", "input": "keep"}).json()["id"]
    before, lines = replicas(fleet), dict[int, list[str]]()
    processes: set[str] = set()
    started = threading.Barrier(7)

    def read(number: int) -> None:
        first = threading.Event()

        def on_begun(process: str) -> None:
            if not first.is_set():
                first.set()
                processes.add(process)
                started.wait(120)

        lines[number] = stream(fleet, on_begun, text=f"{number} " * 30)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    started.wait(120)
    os.kill(int(sorted(processes)[0]), signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        asked = list(pool.map(lambda number: ask(fleet, text=f"new {number}", max_tokens=3), range(12)))
    for thread in threads:
        thread.join()
    assert {reply.status_code for reply in asked} == {200}
    ends = [each[-1] for each in lines.values()]
    whole = [end for end in ends if end == "data: [DONE]"]
    told = [json.loads(end[6:])["error"]["code"] for end in ends if end != "data: [DONE]"]
    assert len(whole) + len(told) == 6 and {*told} == {"replica_lost"} and whole
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
