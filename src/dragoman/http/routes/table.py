"""Every route there is, and who answers it."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from dragoman.http.exchange import Exchange
from dragoman.http.host import Host
from dragoman.http.responses import create, stored, summary
from dragoman.http.routes import (
    conversations,
    docs,
    engine,
    generate,
    inspection,
    parsing,
    stored_chat,
    trajectories,
    vectors,
)

Handler: TypeAlias = Callable[[Host, Exchange], Awaitable[None]]

# The routes that generate come first: they are looked for most often.
POST: dict[str, Handler] = {
    "/v1/chat/completions": generate.chat,
    "/v1/completions": generate.completions,
    "/v1/responses": create.create,
    "/v1/responses/compact": summary.compact,
    "/v1/responses/input_tokens": summary.input_tokens,
    "/v1/responses/{id}/cancel": stored.cancel,
    "/v1/embeddings": vectors.embed,
    "/v1/rerank": vectors.rerank,
    "/rerank": vectors.rerank,
    "/v1/score": vectors.score,
    "/score": vectors.score,
    "/v1/engine/pause": engine.pause,
    "/v1/engine/resume": engine.resume,
    "/v1/chat/completions/render": inspection.render_chat,
    "/v1/completions/render": inspection.render_completions,
    "/v1/chat/completions/input_tokens": inspection.count_chat,
    "/v1/chat/completions/{id}": stored_chat.update,
    "/v1/conversations": conversations.create,
    "/v1/conversations/{id}": conversations.update,
    "/v1/conversations/{id}/items": conversations.add_items,
    "/v1/trajectories/{id}": trajectories.reward,
    "/tokenize": inspection.tokenize,
    "/v1/tokenize": inspection.tokenize,
    "/detokenize": inspection.detokenize,
    "/v1/detokenize": inspection.detokenize,
    "/parse/function_call": parsing.function_call,
    "/parse/reasoning": parsing.reasoning,
    "/parse_function_call": parsing.function_call_sglang,
    "/separate_reasoning": parsing.reasoning_sglang,
}
GET: dict[str, Handler] = {
    "/v1/trajectories/{id}": trajectories.retrieve,
    "/v1/responses/{id}": stored.retrieve,
    "/v1/responses/{id}/input_items": stored.input_items,
    "/v1/chat/completions": stored_chat.list_all,
    "/v1/chat/completions/{id}": stored_chat.retrieve,
    "/v1/chat/completions/{id}/messages": stored_chat.messages,
    "/v1/conversations/{id}": conversations.retrieve,
    "/v1/conversations/{id}/items": conversations.list_items,
    "/v1/conversations/{id}/items/{item_id}": conversations.retrieve_item,
    "/v1/models": inspection.list_models,
    "/v1/models/{model:path}": inspection.get_model,
    "/openapi.json": docs.openapi,
    "/docs": docs.page,
    "/docs.js": docs.script,
    "/": docs.root,
}
DELETE: dict[str, Handler] = {
    "/v1/responses/{id}": stored.delete,
    "/v1/chat/completions/{id}": stored_chat.delete,
    "/v1/conversations/{id}": conversations.delete,
    "/v1/conversations/{id}/items/{item_id}": conversations.delete_item,
}
COMPUTED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/responses",
        "/v1/responses/compact",
    }
)
"""These take the engine's time, so they count in its queue; the others that have a body are counted apart."""
UNCOUNTED = frozenset({"/v1/engine/pause", "/v1/engine/resume", "/v1/responses/{id}/cancel"})
"""What helps a full server, or one that stops, is let in always."""
SOCKET = "/v1/responses"
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/docs", "/docs.js", "/openapi.json"})
"""GET is answered without a key: a supervisor can ask, and a browser gets the page that asks for one."""
METRICS = "/metrics"
