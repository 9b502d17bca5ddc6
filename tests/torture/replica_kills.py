"""Replicas on Ray that are killed under load, one after the other, each as soon as another one is there.

All the while clients ask: for streams, which must end whole or with an error that says why, and for responses
that are stored, which must be there in the end if their end was read. Needs Ray: `make ray` fetches it, and
`build/ray/bin/python -m tests.torture replica_kills` runs this.
"""

import json
import os
import signal
import threading
from collections import deque
from itertools import count
from random import Random
from typing import Any

import httpx
from msgspec import Struct, field

from tests.ray.cluster import running
from tests.store.postgres import running as running_postgres
from tests.support.wait import becomes
from tests.torture.page import Row, progress, scaled

KILLS = 100
REPLICAS = 4
CLIENTS = 8
RECENT = 3 * CLIENTS
"""Answers of which those who gave them are thought to live."""
ENGINE = "tests.ray.engine:make"


class Observations(Struct):
    whole: int = 0
    told: int = 0
    """Streams that were broken, and ended with an error event."""
    untold: int = 0
    """Streams that just ended."""
    refused: list[str] = field(default_factory=list)
    """What was said instead of an answer."""
    kept: dict[str, str] = field(default_factory=dict)
    """What stored responses say, by their ids."""


class Load:
    """Clients that ask again and again, until they are told to stop."""

    def __init__(self, seed: int) -> None:
        self.seen = Observations()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._killed: set[int] = set()
        self._threads = [
            threading.Thread(target=self._client, args=(number, Random(seed + number)))
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def living(self) -> list[int]:
        """The processes that have answered lately."""
        with self._lock:
            return sorted({*self._recent} - self._killed)

    def kill(self, process: int) -> None:
        with self._lock:
            self._killed.add(process)
        os.kill(process, signal.SIGKILL)

    def _client(self, name: int, chance: Random) -> None:
        with running.client() as client:
            for turn in count():
                if self._stopped.is_set():
                    return
                text, streams = f"{name}-{turn} " * 20, chance.random() < 0.7
                is_kept = chance.random() < 0.5
                try:
                    (self._respond if is_kept else self._chat)(client, text, streams)
                except httpx.HTTPError as error:
                    self._refuse(type(error).__name__)

    def _refuse(self, what: str) -> None:
        with self._lock:
            self.seen.refused.append(what)

    def _chat(self, client: httpx.Client, text: str, streams: bool) -> None:
        asked = {"model": "one", "messages": [{"role": "user", "content": text}], "stream": streams}
        events = self._events(client, "/v1/chat/completions", asked)
        if events is None:
            return
        if not streams:
            self._count(True, "", str(events[0]["choices"][0]["message"]["content"]))
            return
        value = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))
        self._count(bool(events) and events[-1].get("done", False), _error(events), value)

    def _respond(self, client: httpx.Client, text: str, streams: bool) -> None:
        events = self._events(client, "/v1/responses", {"model": "one", "input": text, "stream": streams})
        if events is None:
            return
        ends = [event for event in events if event.get("type") == "response.completed"]
        done = (ends[0]["response"] if ends else {}) if streams else events[0]
        is_whole = done.get("status") == "completed"
        value = str(done["output"][0]["content"][0]["text"]) if is_whole else ""
        self._count(is_whole, _error(events), value)
        if is_whole:
            with self._lock:
                self.seen.kept[done["id"]] = value

    def _events(self, client: httpx.Client, path: str, asked: dict[str, Any]) -> list[dict[str, Any]] | None:
        """None where there is no answer: it is counted."""
        with client.stream("POST", path, json=asked) as reply:
            if reply.status_code != 200:
                self._refuse(f"{reply.status_code} {reply.read()[:200]!r}")
                return None
            if not asked["stream"]:
                return [json.loads(reply.read())]
            data = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
        return [{"done": True} if each == "[DONE]" else json.loads(each) for each in data]

    def _count(self, is_whole: bool, error: str, said: str) -> None:
        with self._lock:
            if is_whole:
                self.seen.whole += 1
                self._recent.append(int(said.split()[0]))
            elif error == "replica_lost":
                self.seen.told += 1
            else:
                self.seen.untold += 1


def _error(events: list[dict[str, Any]]) -> str:
    """The code of the error that ends a stream, in the form of either API."""
    last = events[-1] if events else {}
    return str(last.get("code") or (last.get("error") or {}).get("code") or "")


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    kills, chance = scaled(KILLS, scale), Random(seed)
    with running_postgres() as url, running.cluster(), running.client() as client:
        model = {"name": "one", "engine": ENGINE, "replicas": REPLICAS, "cpus": 0.01}
        running.deploy(
            {"settings": {"insecure": True, "store": url, "log_level": "warning"}, "models": [model]}
        )
        assert becomes(lambda: client.get("/ready").status_code == 200)
        with Load(seed) as load:
            for number in range(kills):
                assert becomes(lambda: len(load.living()) > 1)
                load.kill(chance.choice(load.living()))
                progress(number + 1, kills, "kills")
            assert becomes(lambda: len(load.living()) > 1)
        seen = load.seen
        lost = sum(_text(client.get(f"/v1/responses/{id_}")) != text for id_, text in seen.kept.items())
    return _rows(kills, seen, lost)


def _text(reply: httpx.Response) -> str | None:
    if reply.status_code != 200 or reply.json()["status"] != "completed":
        return None
    return str(reply.json()["output"][0]["content"][0]["text"])


def _rows(kills: int, seen: Observations, lost: int) -> list[Row]:
    what = f"{kills} x SIGKILL of replicas on Ray under load"
    broken = f"{seen.untold} untold, {seen.told:,} told, {seen.whole:,} whole"
    kept = f"{lost} of {len(seen.kept):,}"
    refused = f"{len(seen.refused)} {' '.join(sorted({*seen.refused})[:3])}".strip()
    return [
        Row(f"{what}: broken streams are told", broken, "0 untold", not seen.untold),
        Row(f"{what}: stored responses that are lost", kept, "0", not lost and bool(seen.kept)),
        Row(f"{what}: requests without an answer", refused, "0", not seen.refused),
    ]
