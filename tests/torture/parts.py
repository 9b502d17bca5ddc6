"""What there is to run, in the order of the page."""

import importlib
from collections.abc import Callable
from typing import TypeAlias

from tests.torture.page import Row

Run: TypeAlias = Callable[[float, int], list[Row]]
"""How much of it, where 1 is all, and a seed."""

PAGE: dict[str, str] = {
    "aborts": "clients that leave at any byte",
    "kills": "kill -9 while answers are stored",
    "store_faults": "each operation of the store fails once",
    "fuzzed_bodies": "bodies that are nearly right, on all routes",
    "doors": "raw HTTP, paths and keys that open nothing",
    "cuts": "answers cut anywhere, in all dialects",
    "utf8": "characters cut anywhere",
    "stalls": "the largest bodies of all routes",
    "slow_readers": "clients that read a kilobyte a second",
    "slow_senders": "clients that send a byte a second",
    "connections": "connections, frames and unread bytes by the thousand",
    "drain": "SIGTERM with requests in flight",
    "stops": "signals at any moment, to both runners",
    "engine_crashes": "engines that are killed, crash and hang",
    "model_changes": "models loaded and unloaded beside streams, and woken",
    "overload": "four times as much as there is room for",
    "fairness": "a flood by one key, and what another notices",
    "batches": "a batch as long as may be, and a chat beside it",
    "bleed": "streams that must not mix",
    "determinism": "one seed, one log of events",
    "gguf_headers": "model files that were tampered with",
    "real_aborts": "clients that leave the embedded model",
    "page_speed": "the page in Chromium: first paint, 1,000 tokens a second, 2,000 messages",
    "mixture": "everything mixed, and nothing that grows",
}
BY_NAME: dict[str, str] = {
    "hour": "an hour of everything with the real model, and memory that comes to a rest",
    "schemas": "random schemas and a real model: an hour",
    "trajectories": "random conversations with the embedded model, and their ids: 15 minutes",
    "vllm_trajectories": "the same with vLLM, which `make vllm` fetches",
    "replica_kills": "replicas on Ray that are killed under load, which `make ray` fetches: 10 minutes",
    "transformers": "the embedded weights over transformers, which needs torch",
}
"""Bound to the speed of a model, or to what is not there by default: run only if named."""


def part(name: str) -> Run:
    run: Run = importlib.import_module(f"tests.torture.{name}").run
    return run
