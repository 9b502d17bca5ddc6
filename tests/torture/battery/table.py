"""All cases there are, and to which group of routes each belongs."""

from collections.abc import Iterator

from dragoman.http.routes.table import DELETE, GET, POST
from tests.torture.battery import chats, files, frames, heads, items, stored, texts
from tests.torture.battery.case import Case

GROUPS = {
    "WEBSOCKET": "frames of a WebSocket",
    "GET any": "paths, queries and headers",
    "POST any": "paths, queries and headers",
    "POST /v1/chat/completions/": "prompts that are only rendered or counted",
    "POST /v1/completions/render": "prompts that are only rendered or counted",
    "POST /v1/chat": "chat",
    "POST /v1/completions": "completions",
    "POST /api/embed": "vectors and scores",
    "POST /api": "Ollama's names",
    "POST /inference": "completions",
    "POST /v1/responses": "responses",
    "POST /v1/messages": "messages",
    "POST /v1/conversations": "conversations",
    "POST /v1/embeddings": "vectors and scores",
    "POST /v1/files": "files and batches",
    "POST /v1/uploads": "files and batches",
    "POST /v1/batches": "files and batches",
    "POST /v1/messages/batches": "files and batches",
    "POST /parse": "parsers",
    "POST /separate": "parsers",
    "POST /tokenize": "tokens",
    "POST /v1/tokenize": "tokens",
    "POST /detokenize": "tokens",
    "POST /v1/detokenize": "tokens",
    "GET": "what is stored, asked for",
    "DELETE": "what is stored, deleted",
}
"""By how a route begins; the first that fits."""
VECTORS = ("rerank", "score")


def cases() -> Iterator[Case]:
    """Those that were thought of. What follows from the types of requests is in `walked`."""
    for module in (chats, texts, items, stored, files, heads, frames):
        yield from module.cases()


def group(route: str) -> str:
    if route.endswith(VECTORS):
        return "vectors and scores"
    return next((name for start, name in GROUPS.items() if route.startswith(start)), "the rest")


ENDLESS = {"GET /models/sse"}
"""A stream without an end, which tells no more than the list does."""


def forgotten() -> set[str]:
    """Routes that no case is for."""
    every = {f"POST {path}" for path in POST} | {f"GET {path}" for path in GET}
    every |= {f"DELETE {path}" for path in DELETE} | {frames.ROUTE}
    return every - ENDLESS - {case.route for case in cases()}
