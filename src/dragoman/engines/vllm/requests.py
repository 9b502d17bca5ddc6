"""From jobs to the requests of vLLM's core.

Most jobs of a server ask for the same sampling. vLLM checks and completes it once; after that, its request is
copied for another prompt.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.engines.vllm.faults import told
from dragoman.engines.vllm.model import VllmModel
from dragoman.engines.vllm.params import prompt_of, sibling
from dragoman.types import Job

MOST_KEPT = 64
MOST_KEY_BYTES = 1024
_encode = msgspec.msgpack.Encoder().encode


class Requests:
    """All methods are for the event loop's thread."""

    def __init__(self, llm: Any, model: VllmModel) -> None:
        self._inputs = llm.input_processor
        self._model = model
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._numbers = count()

    def of(self, job: Job) -> list[Any]:
        """One for each continuation; what vLLM does not take is told here."""
        first = self._first(job)
        requests = [first]
        for index in range(1, job.n):
            other = copy(first)
            other.request_id = f"{first.request_id}-{index}"
            other.sampling_params = sibling(first.sampling_params, index)
            requests.append(other)
        return requests

    def embedding(self, prompts: Sequence[Sequence[int]], tasks: tuple[str, ...]) -> list[Any]:
        params = self._model.pooling_params()
        return [self._made(f"embed-{n}", prompt, params, tasks) for n, prompt in enumerate(prompts)]

    def _first(self, job: Job) -> Any:
        key = self._key(job)
        if key is not None and key in self._kept:
            self._kept.move_to_end(key)
            return self._again(self._kept[key], job)
        made = self._made(
            job.id,
            job.prompt,
            self._model.sampling_params(job),
            ("generate",),
            salt=job.cache_salt,
            priority=job.priority,
            lora_request=self._model.adapter(job),
        )
        if key is not None:
            # Without its prompt, which may be long.
            self._kept[key] = kept = copy(made)
            kept.prompt_token_ids = None
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _key(self, job: Job) -> bytes | None:
        """What decides how vLLM completes a request; None where it must see the request itself."""
        asked, prompt = job.sampling, job.prompt
        if job.constraint is not None or asked.min_tokens or asked.max_tokens < 1:
            return None
        card, ids = self._model.card, len(self._model.tokenizer.pieces)
        if not 0 < len(prompt) < card.max_model_len or min(prompt) < 0 or max(prompt) >= ids:
            return None
        key = _encode((replace(asked, max_tokens=0), job.adapter, job.reuse_prefix))
        return key if len(key) <= MOST_KEY_BYTES else None

    def _again(self, kept: Any, job: Job) -> Any:
        request = copy(kept)
        request.prompt_token_ids = list(job.prompt)
        request.arrival_time = time.time()
        request.cache_salt = job.cache_salt or None
        request.priority = job.priority
        if request.sampling_params.max_tokens != job.sampling.max_tokens:
            request.sampling_params = copy(request.sampling_params)
            request.sampling_params.max_tokens = job.sampling.max_tokens
        return self._named(request, job.id)

    def _made(
        self, id: str, prompt: Sequence[int], params: Any, tasks: tuple[str, ...], salt: str = "", **how: Any
    ) -> Any:
        with told():
            request = self._inputs.process_inputs(
                id, prompt_of(prompt, salt), params, supported_tasks=tasks, **how
            )
        return self._named(request, id)

    def _named(self, request: Any, id: str) -> Any:
        """With a name of its own: two clients may have chosen the same one."""
        request.external_req_id = id
        request.request_id = f"{id}-{next(self._numbers):x}"
        return request
