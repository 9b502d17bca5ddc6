"""What such engines can do beside generating: vectors, pauses, adapters; and what they say of requests."""

import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.protocol import AdapterEngine, EmbeddingEngine, PausableEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.fake_asyncllm import DuckEngine, FakeAsyncLLM, Manner
from tests.support.fake_sglang import FakeSglang, GenerateReqInput, Manager
from tests.support.http import HELLO, post

CHAT = "/v1/chat/completions"


@dataclasses.dataclass
class EmbeddingReqInput:
    rid: str | None = None
    input_ids: list[int] | None = None


@dataclasses.dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclasses.dataclass
class ContinueGenerationReqInput:
    pass


@dataclasses.dataclass
class LoadLoRAAdapterReqInput:
    lora_name: str
    lora_path: str
    pinned: bool = False


@dataclasses.dataclass
class UnloadLoRAAdapterReqInput:
    lora_name: str


@dataclasses.dataclass
class Done:
    success: bool
    error_message: str = ""


class AbleManager(Manager):
    """With the methods that SGLang's has; `orders` tells what came."""

    def __init__(self, manner: Manner | None = None) -> None:
        super().__init__(manner)
        self.orders: list[Any] = []
        self.loras: set[str] = set()

    def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput, request: None = None
    ) -> AsyncIterator[dict[str, Any]]:
        return self._vectors(obj) if isinstance(obj, EmbeddingReqInput) else self.run(obj)

    async def _vectors(self, obj: EmbeddingReqInput) -> AsyncIterator[dict[str, Any]]:
        if len(obj.input_ids or ()) > 5:
            raise ValueError("The input (6 tokens) is longer than the model's context length (5 tokens).")
        yield {"embedding": [3.0, 4.0], "meta_info": {"prompt_tokens": len(obj.input_ids or ())}}

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        self.orders.append(obj)

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        self.orders.append(obj)

    def flush_cache(self) -> None:
        self.orders.append("flush")

    async def load_lora_adapter(self, obj: LoadLoRAAdapterReqInput) -> Done:
        if Path(obj.lora_path).name == "broken":
            return Done(False, "secret")
        self.loras.add(obj.lora_name)
        return Done(True)

    async def unload_lora_adapter(self, obj: UnloadLoRAAdapterReqInput) -> Done:
        self.loras.discard(obj.lora_name)
        return Done(True)


class AbleSglang(FakeSglang):
    def __init__(self) -> None:
        super().__init__(weight_version="v1")
        args, self.tokenizer_manager = self.tokenizer_manager.server_args, AbleManager()  # type: ignore[attr-defined]
        self.tokenizer_manager.server_args = args  # type: ignore[attr-defined]


def test_an_engine_has_what_its_manager_has() -> None:
    kinds = (EmbeddingEngine, PausableEngine, AdapterEngine)
    assert all(isinstance(AsyncLLMEngine(AbleSglang()), kind) for kind in kinds)
    assert not any(isinstance(AsyncLLMEngine(DuckEngine()), kind) for kind in kinds)


def test_vectors_are_of_length_one() -> None:
    with background(AsyncLLMEngine(AbleSglang())) as url:
        body = post(url, "/v1/embeddings", {"input": ["a", "b"]}).json()
        assert [entry["embedding"] for entry in body["data"]] == [[0.6, 0.8]] * 2
        reply = post(url, "/v1/embeddings", {"input": "abcdef"})
    assert (reply.status_code, "longer than the model's" in reply.json()["error"]["message"]) == (400, True)


def test_it_is_paused_and_goes_on_with_other_weights() -> None:
    engine = AbleSglang()
    with background(AsyncLLMEngine(engine)) as url:
        assert post(url, "/v1/engine/pause", {}).json()["weight_version"] == "v1"
        running = post(url, "/v1/engine/resume", {"weight_version": "v2"}).json()
    assert (running["status"], running["weight_version"]) == ("running", "v2")
    orders = [PauseGenerationReqInput("retract"), "flush", ContinueGenerationReqInput()]
    assert engine.tokenizer_manager.orders == orders  # type: ignore[attr-defined]


def test_adapters_come_and_go(tmp_path: Path) -> None:
    for name in ("poet", "broken"):
        (tmp_path / name).mkdir()
    engine = AbleSglang()
    manager: Any = engine.tokenizer_manager
    with background(AsyncLLMEngine(engine), Settings(port=0, lora_dir=str(tmp_path))) as url:
        for name, status in (("poet", 200), ("broken", 400)):
            reply = post(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
            assert reply.status_code == status
            assert "secret" not in reply.text
        assert post(url, CHAT, {**HELLO, "model": "poet"}).status_code == 200
        assert manager.requests[-1].lora_path == "poet"
        post(url, "/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert manager.loras == set()


def test_why_an_answer_was_given_up_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    finish = {"type": "abort", "message": "The request was preempted."}
    with background(AsyncLLMEngine(FakeAsyncLLM(Manner(finish=finish)))) as url:
        reply = post(url, CHAT, HELLO)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "The request was preempted.")
    assert "The request was preempted." in caplog.text


@pytest.mark.parametrize("own", [FakeAsyncLLM, type("Own", (FakeAsyncLLM,), {"__module__": "own.engine"})])
def test_what_the_engine_says_of_a_request_reaches_its_client(own: type[FakeAsyncLLM]) -> None:
    """Also where its class is somebody's own, made from that of the engine."""
    fault = ValueError("top_k must be -1 (disable) or at least 1, got 0.")
    with background(AsyncLLMEngine(own(Manner(fault=fault)))) as url:
        reply = post(url, CHAT, HELLO)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, str(fault))


def test_what_a_library_says_does_not(caplog: pytest.LogCaptureFixture) -> None:
    class Careless(FakeAsyncLLM):
        def check(self, obj: Any) -> None:
            json.loads("{secret")

    caplog.set_level(logging.WARNING)
    with background(AsyncLLMEngine(Careless())) as url:
        reply = post(url, CHAT, HELLO)
    assert (reply.status_code, "Expecting" in reply.text) == (400, False)
    assert "Expecting property name" in caplog.text
