"""A batch of as many lines as there may be: what a chat beside it notices, and what memory does."""

import json
import statistics
import time
from typing import Any

from tests.attacks.frame import AttackedServer, attacked
from tests.torture.page import Row, scaled

LINES = 50_000
QUICK_LINES = 10_000
ASKS = 15
SLOTS = 8
STEP_S = 0.05
MOST_STEPS = 1.0
MOST_MB = 8.0
CHAT = "/v1/chat/completions"
NAME = "parrot"


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    asks = scaled(ASKS, scale, least=5)
    return [_wait(scaled(LINES, scale, least=500), asks), _memory(scaled(QUICK_LINES, scale, least=500))]


def _wait(lines: int, asks: int) -> Row:
    """All slots are at work for the batch, and all that could be queued is."""
    with attacked(interval=STEP_S, engine_slots=SLOTS) as server:
        alone = _first_token(server, asks)
        batch = _begun(server, lines, "some words " * 4)
        while not server.client.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"]:
            time.sleep(0.1)
        beside = _first_token(server, asks)
        server.client.post(f"/v1/batches/{batch}/cancel")
    steps = (beside - alone) / STEP_S
    return Row(
        f"a chat beside a batch of {lines:,} lines waits for its first token longer by, in steps",
        f"{steps:.2f} ({1000 * alone:.0f} ms alone, {1000 * beside:.0f} ms beside it)",
        f"{MOST_STEPS:g}",
        steps <= MOST_STEPS,
    )


def _memory(lines: int) -> Row:
    """From when a tenth of it is done to its end."""
    with attacked() as server:
        batch = _begun(server, lines, "hi")
        tenth = 0
        while True:
            body = server.client.get(f"/v1/batches/{batch}").json()
            if not tenth and body["request_counts"]["completed"] * 10 >= lines:
                tenth = server.memory()
            if body["status"] == "completed":
                break
            assert body["status"] in ("validating", "in_progress", "finalizing"), body
            time.sleep(0.05)
        grown = (server.memory() - tenth) / 2**20
    return Row(
        f"memory that {lines:,} lines of a batch leave, in MB",
        f"{grown:.1f}",
        f"{MOST_MB:g}",
        grown <= MOST_MB,
    )


def _begun(server: AttackedServer, lines: int, text: str) -> str:
    asked = [_line(str(number), text) for number in range(lines)]
    content = "\n".join(map(json.dumps, asked)).encode()
    files = {"file": ("lines.jsonl", content)}
    file = server.client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(server.client.post("/v1/batches", json=body).json()["id"])


def _line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def _first_token(server: AttackedServer, asks: int) -> float:
    """Seconds until something is said, the median."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    times = []
    for _ in range(asks):
        began = time.perf_counter()
        with server.client.stream("POST", CHAT, json=body) as reply:
            next(line for line in reply.iter_lines() if '"content":"h"' in line)
            times.append(time.perf_counter() - began)
    return statistics.median(times)
