"""A good body for every route that takes one, and the same with a field set anywhere in it."""

import copy
import re
from typing import Any

from dragoman.http.routes.table import FORMS, POST

SOCKET = "WEBSOCKET /v1/responses"
"""Responses over a WebSocket, where a body is a message."""
OVER = frozenset(
    {
        "/v1/responses/{id}/cancel",
        "/v1/uploads/{id}/complete",
        "/v1/uploads/{id}/cancel",
        "/api/create",
        "/models/unload",
        "/v1/batches/{id}/cancel",
        "/v1/messages/batches/{id}/cancel",
    }
)
"""Refused even if the body is good: what is there is done, or not begun, or not for clients to change."""
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
_RESPONSE: dict[str, Any] = {"model": "parrot", "input": "hi", "max_output_tokens": 8}
_MESSAGE: dict[str, Any] = {**_CHAT, "model": "parrot"}
_ITEM: dict[str, Any] = {"type": "message", "role": "user", "content": "hi"}
_NAMED: dict[str, Any] = {"model": "parrot"}
_METADATA: dict[str, Any] = {"metadata": {"a": "b"}}
_RANK: dict[str, Any] = {"query": "abc", "documents": ["abc", "xyz"]}
_SCORE: dict[str, Any] = {"text_1": "abc", "text_2": ["abc", "xyz"]}
_CALLS: dict[str, Any] = {"text": "hi", "tool_call_parser": "hermes"}
_REASONING: dict[str, Any] = {"text": "hi", "reasoning_parser": "hermes"}

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [104, 105], "sampling_params": {"max_tokens": 8}},
    "/v1/responses": _RESPONSE,
    SOCKET: _RESPONSE,
    "/v1/responses/compact": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    "/v1/responses/{id}/cancel": {},
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _MESSAGE,
    "/v1/embeddings": {"input": "abc"},
    "/api/chat": {**_NAMED, **_CHAT},
    "/api/generate": {**_NAMED, "prompt": "hi", "max_tokens": 8},
    "/api/embed": {**_NAMED, "input": ["abc"]},
    "/api/embeddings": {**_NAMED, "prompt": "abc"},
    "/api/show": _NAMED,
    "/api/pull": _NAMED,
    "/api/create": {},
    "/api/copy": {"source": "parrot", "destination": "copied"},
    "/models/load": _NAMED,
    "/models/unload": _NAMED,
    "/v1/model/load": _NAMED,
    "/v1/model/unload": {},
    "/v1/rerank": _RANK,
    "/rerank": _RANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/engine/pause": {},
    "/v1/engine/resume": {"weight_version": "1"},
    "/v1/load_lora_adapter": {"lora_name": "poet", "lora_path": "server.py", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "poet"},
    "/lora-adapters": {"adapters": []},
    "/v1/chat/completions/render": _CHAT,
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions/input_tokens": _CHAT,
    "/v1/chat/completions/{id}": _METADATA,
    "/v1/conversations": {"items": [_ITEM], **_METADATA},
    "/v1/conversations/{id}": _METADATA,
    "/v1/conversations/{id}/items": {"items": [_ITEM]},
    "/v1/uploads": {"bytes": 2, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"},
    "/v1/uploads/{id}/complete": {"part_ids": ["part_1"]},
    "/v1/uploads/{id}/cancel": {},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/batches/{id}/cancel": {},
    "/v1/messages/batches": {
        "requests": [
            {
                "custom_id": "a",
                "params": {
                    "model": "parrot",
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": "hi"}],
                },
            }
        ]
    },
    "/v1/messages/batches/{id}/cancel": {},
    "/v1/trajectories/{id}": {"rewards": {"right": 1.0}},
    "/tokenize": {"prompt": "hi"},
    "/v1/tokenize": _CHAT,
    "/v1/check_schema": {"schema": {"type": "object"}},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/detokenize": {"tokens": [104, 105]},
    "/parse": {"text": "hi"},
    "/parse/function_call": _CALLS,
    "/parse/reasoning": _REASONING,
    "/parse_function_call": _CALLS,
    "/separate_reasoning": _REASONING,
}
"""By the path of the route. The ids in paths are those of records that every attacked server has."""
BODILESS = frozenset(
    {*OVER, "/v1/engine/pause", "/v1/model/unload"} - {"/v1/uploads/{id}/complete", "/models/unload"}
)
"""Routes that need no body, and look at none or at an empty one."""
WITH_BODY = tuple(path for path in GOOD if path not in BODILESS)
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", SOCKET)
"""Routes whose answer a model samples."""
CHATTING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", SOCKET)
"""Those of them that render a template and read calls."""
VECTORS = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score")

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def good(path: str) -> dict[str, Any]:
    return copy.deepcopy(GOOD[path])


def changed(path: str, param: str, value: Any) -> dict[str, Any]:
    """`changed("/v1/chat/completions", "messages[0].content", 5)`: the good body with that at that place."""
    body = good(path)
    *way, last = [int(at) if at else name for name, at in _STEP.findall(param)]
    inner: Any = body
    for step in way:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else inner[step]
    inner[last] = value
    return body


def undeclared() -> set[str]:
    """Routes that no body is known for, and bodies that no route is known for."""
    return (set(POST) - FORMS) ^ (set(GOOD) - {SOCKET})
