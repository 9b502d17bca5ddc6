"""Executors in the shapes that RL-Kernel has, without a line of ours in them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dragoman.engines.scripted import END_ID


@dataclasses.dataclass(frozen=True)
class Candidate:
    prompt_token_ids: list[int] | None
    token_ids: list[int]
    text: str
    finish_reason: str | None
    cumulative_logprob: float | None = None
    logprobs: Any = None


class RolloutExecutor:
    """`generate_candidates`, over a sampler that takes texts and mappings with ids, as vLLM's does."""

    def __init__(self, model_config: dict[str, Any] | None = None, *, finish: str | None = "stop") -> None:
        self.config = model_config or {}
        self.finish = finish
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []

    def generate_candidates(
        self,
        prompts: str | Sequence[Any],
        *,
        num_generations: int | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        assert not isinstance(prompts, str)
        params = dict(sampling_params or {})
        self.calls.append((list(prompts), params))
        groups = [[self._answer(prompt, params)] * (num_generations or 1) for prompt in prompts]
        return {"backend": "fake", "num_prompts": len(groups), "normalized_outputs": groups}

    def _answer(self, prompt: Any, params: dict[str, Any]) -> Candidate:
        ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else [*prompt.encode()]
        items = [*b"Hello", END_ID]
        logprobs = [{id_: -0.5} for id_ in items] if "logprobs" in params else None
        return Candidate(list(ids), items, "Hello", self.finish, logprobs=logprobs)


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Backend:
    """The protocol CompletionBackend."""

    model_id = "backend"

    def __init__(self, text: str = "Hello") -> None:
        self.text = text
        self.calls: list[dict[str, Any]] = []

    def format_chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[str],
        *,
        n: int,
        max_tokens: int,
        temperature: float | None,
        top_p: float | None,
        stop: str | Sequence[str] | None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[list[GeneratedText]]:
        self.calls.append(
            {"prompts": list(prompts), "temperature": temperature, "stop": stop, "extra": extra}
        )
        return [[GeneratedText(self.text, "stop", 7, 3)] * n for _ in prompts]

    def stream_generate(self, prompt: str, **_: Any) -> Iterator[str]:
        raise NotImplementedError

    def count_tokens(self, text: str) -> int:
        return len(text)


class Adapter:
    """Texts and nothing else: what trains beside it says so little."""

    def generate(
        self, prompts: Sequence[str], *, n: int = 1, max_tokens: int = 64, temperature: float = 0.7
    ) -> list[list[str]]:
        return [[f"{temperature:g} {max_tokens}"] * n for _ in prompts]


class BrokenExecutor(Adapter):
    def generate(
        self, prompts: Sequence[str], *, n: int = 1, max_tokens: int = 64, temperature: float = 0.7
    ) -> list[list[str]]:
        return [["one", "two"] for _ in prompts]
