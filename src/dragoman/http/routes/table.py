"""All routes with their handlers, grouped by API, and the OpenAPI document."""

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache

import msgspec
from msgspec import Struct

from dragoman._version import __version__
from dragoman.api import batches as batch_bodies
from dragoman.api import completions
from dragoman.api import conversations as conversation_bodies
from dragoman.api import embeddings as vector_bodies
from dragoman.api import files as file_bodies
from dragoman.api import inspection as inspection_bodies
from dragoman.api import model_admin as model_bodies
from dragoman.api.chat import reply as chat_reply
from dragoman.api.messages import reply as message_reply
from dragoman.api.ollama import ERRORS as OLLAMA_ERRORS
from dragoman.api.openapi import OPERATIONS, Operation, document
from dragoman.api.reply import ErrorSerializer
from dragoman.api.responses.response import ERRORS as RESPONSE_ERRORS
from dragoman.http.app_state import AppState, Handler
from dragoman.http.exchange import Exchange
from dragoman.http.routes import (
    batches,
    conversations,
    embeddings,
    files,
    generate,
    inspection,
    messages,
    models,
    ollama,
    responses,
    stored_chat,
    training,
    web_ui,
)

# An API: routes with a common path prefix and error format.


class Api(Struct, frozen=True):
    """The handlers of an API by path, and by method."""

    path: str
    """The path prefix of the API; its error format is also used for unknown paths below it."""
    errors: ErrorSerializer
    computed: Mapping[str, Handler] = {}
    """POST routes that use the engine and count in its queue."""
    post: Mapping[str, Handler] = {}
    """Other POST routes with a body, which have a separate limit."""
    forms: Mapping[str, Handler] = {}
    """POST routes with a file in a form; they may take as long as the network needs, and have a separate
    limit."""
    uncounted: Mapping[str, Handler] = {}
    """POST routes that relieve a full or stopping server; they are always admitted."""
    get: Mapping[str, Handler] = {}
    delete: Mapping[str, Handler] = {}
    any_media: bool = False
    """Whether to parse the body as JSON whatever its content type, or without one."""
    operations: Sequence[Operation] = ()
    """Descriptions of the routes that are not in `OPERATIONS`."""

    def has(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


# The OpenAPI document at /openapi.json, which the web UI shows at /docs.


@cache
def _openapi(root: str) -> bytes:
    return msgspec.json.encode(document(__version__, operations(), root))


async def show_openapi(host: AppState, exchange: Exchange) -> None:
    await exchange.reply(_openapi(host.settings.root_path), b"application/json")


# All APIs.


CHAT = Api(
    "/v1/chat/completions",
    chat_reply.ERRORS,
    computed={"/v1/chat/completions": generate.chat},
    post={
        "/v1/chat/completions/render": inspection.render_chat,
        "/v1/chat/completions/input_tokens": inspection.count_chat,
        "/v1/chat/completions/{id}": stored_chat.update,
    },
    get={
        "/v1/chat/completions": stored_chat.list_all,
        "/v1/chat/completions/{id}": stored_chat.retrieve,
        "/v1/chat/completions/{id}/messages": stored_chat.messages,
    },
    delete={"/v1/chat/completions/{id}": stored_chat.delete},
)
COMPLETIONS = Api(
    "/v1/completions",
    completions.ERRORS,
    computed={"/v1/completions": generate.completions},
    post={"/v1/completions/render": inspection.render_completions},
)
RESPONSES = Api(
    "/v1/responses",
    RESPONSE_ERRORS,
    computed={"/v1/responses": responses.create, "/v1/responses/compact": responses.compact},
    post={"/v1/responses/input_tokens": responses.input_tokens},
    uncounted={"/v1/responses/{id}/cancel": responses.cancel},
    get={
        "/v1/responses/{id}": responses.retrieve,
        "/v1/responses/{id}/input_items": responses.input_items,
    },
    delete={"/v1/responses/{id}": responses.delete},
)
CONVERSATIONS = Api(
    "/v1/conversations",
    conversation_bodies.ERRORS,
    post={
        "/v1/conversations": conversations.create,
        "/v1/conversations/{id}": conversations.update,
        "/v1/conversations/{id}/items": conversations.add_items,
    },
    get={
        "/v1/conversations/{id}": conversations.retrieve,
        "/v1/conversations/{id}/items": conversations.list_items,
        "/v1/conversations/{id}/items/{item_id}": conversations.retrieve_item,
    },
    delete={
        "/v1/conversations/{id}": conversations.delete,
        "/v1/conversations/{id}/items/{item_id}": conversations.delete_item,
    },
)
GENERATE = Api(
    "/inference/v1/generate",
    completions.GENERATE_ERRORS,
    computed={"/inference/v1/generate": generate.generate},
)
OLLAMA = Api(
    "/api",
    OLLAMA_ERRORS,
    computed={
        "/api/chat": ollama.chat,
        "/api/generate": ollama.generate,
        "/api/embed": ollama.embed,
        "/api/embeddings": ollama.embeddings,
    },
    post={
        "/api/show": ollama.show,
        "/api/pull": ollama.pull,
        "/api/create": ollama.create,
        "/api/copy": ollama.copy,
    },
    get={
        "/api/version": ollama.show_version,
        "/api/tags": ollama.list_models,
        "/api/ps": ollama.list_loaded,
    },
    delete={"/api/delete": ollama.delete},
    any_media=True,
)
MESSAGES = Api(
    "/v1/messages",
    message_reply.ERRORS,
    computed={"/v1/messages": messages.create},
    post={
        "/v1/messages/count_tokens": messages.count_tokens,
        "/v1/messages/batches": batches.create_messages,
    },
    uncounted={"/v1/messages/batches/{id}/cancel": batches.cancel_messages},
    get={
        "/api/hello": messages.hello,
        "/v1/messages/batches": batches.list_messages,
        "/v1/messages/batches/{id}": batches.retrieve_messages,
        "/v1/messages/batches/{id}/results": batches.results,
    },
    delete={"/v1/messages/batches/{id}": batches.delete_messages},
    operations=(*messages.OPERATIONS, *messages.batch_operations()),
)
EMBEDDINGS = Api("/v1/embeddings", vector_bodies.ERRORS, computed={"/v1/embeddings": embeddings.embed})
FILES = Api(
    "/v1/files",
    file_bodies.FILE_ERRORS,
    forms={"/v1/files": files.create},
    get={
        "/v1/files": files.list_all,
        "/v1/files/{id}": files.retrieve,
        "/v1/files/{id}/content": files.content,
    },
    delete={"/v1/files/{id}": files.delete},
    operations=file_bodies.FILE_OPERATIONS,
)
UPLOADS = Api(
    "/v1/uploads",
    file_bodies.UPLOAD_ERRORS,
    post={"/v1/uploads": files.begin, "/v1/uploads/{id}/complete": files.complete},
    forms={"/v1/uploads/{id}/parts": files.add_part},
    uncounted={"/v1/uploads/{id}/cancel": files.cancel},
    operations=file_bodies.UPLOAD_OPERATIONS,
)
BATCHES = Api(
    "/v1/batches",
    batch_bodies.ERRORS,
    post={"/v1/batches": batches.create},
    uncounted={"/v1/batches/{id}/cancel": batches.cancel},
    get={"/v1/batches": batches.list_all, "/v1/batches/{id}": batches.retrieve},
    operations=batch_bodies.BATCH_OPERATIONS,
)
OTHERS = Api(
    "",
    inspection_bodies.ERRORS,
    computed={
        "/v1/rerank": embeddings.rerank,
        "/rerank": embeddings.rerank,
        "/v1/score": embeddings.score,
        "/score": embeddings.score,
    },
    post={
        "/v1/trajectories/{id}": training.reward,
        "/tokenize": inspection.tokenize,
        "/v1/tokenize": inspection.tokenize,
        "/detokenize": inspection.detokenize,
        "/v1/detokenize": inspection.detokenize,
        "/v1/check_schema": inspection.check_schema,
        "/parse": inspection.parse_answer,
        "/parse/function_call": inspection.function_call,
        "/parse/reasoning": inspection.reasoning,
        "/parse_function_call": inspection.function_call_sglang,
        "/separate_reasoning": inspection.reasoning_sglang,
    },
    uncounted={
        "/v1/engine/pause": training.pause,
        "/v1/engine/resume": training.resume,
        "/v1/load_lora_adapter": training.load_adapter,
        "/v1/unload_lora_adapter": training.unload_adapter,
        "/lora-adapters": training.weigh_adapters,
        "/models/load": models.load,
        "/models/unload": models.unload,
        "/v1/model/load": models.load_for_tabby,
        "/v1/model/unload": models.unload_for_tabby,
    },
    get={
        "/v1/trajectories/{id}": training.retrieve,
        "/tokenizer_info": inspection.tokenizer_info,
        "/v1/mcp_servers": inspection.list_mcp_servers,
        "/dialects": inspection.list_dialects,
        "/v1/models": models.list_models,
        "/lora-adapters": training.list_adapters,
        "/models/sse": models.watch,
        "/v1/model": models.show_default,
        "/v1/model/list": models.list_models,
        "/v1/models/{model:path}": models.get_model,
        "/openapi.json": show_openapi,
        **web_ui.GET,
    },
    operations=model_bodies.OPERATIONS,
)
APIS: Sequence[Api] = (
    *(CHAT, COMPLETIONS, RESPONSES, CONVERSATIONS, MESSAGES, GENERATE, EMBEDDINGS),
    *(FILES, UPLOADS, BATCHES, OLLAMA),
    OTHERS,
)
"""The API without a path prefix comes last."""

POST: dict[str, Handler] = {
    path: handler
    for api in APIS
    for table in (api.computed, api.post, api.forms, api.uncounted)
    for path, handler in table.items()
}
GET: dict[str, Handler] = {path: handler for api in APIS for path, handler in api.get.items()}
DELETE: dict[str, Handler] = {path: handler for api in APIS for path, handler in api.delete.items()}
FORMS = frozenset(path for api in APIS for path in api.forms)
ANY_MEDIA = frozenset(path for api in APIS if api.any_media for path in (*api.computed, *api.post))
UNCOUNTED = frozenset(path for api in APIS for path in api.uncounted)
"""Routes for operators: accepted only in the exact spelling, so that a proxy can recognize them."""
SOCKET = "/v1/responses"
OPEN_PATHS = frozenset(
    {"/health", "/healthz", "/ping", "/ready", "/openapi.json", "/api/hello", *web_ui.OPEN}
)
"""Paths whose GET needs no key: probes can request them, and browsers get the page that asks for a key."""
METRICS, BOARD = "/metrics", "/operations"


def operations() -> list[Operation]:
    """Return the descriptions of all routes."""
    return [*OPERATIONS, *(operation for api in APIS for operation in api.operations)]


def api_at(path: str) -> Api:
    """Return the API of a path, whether or not the path exists."""
    return next(api for api in APIS if api.has(path) or not api.path)


def errors_at(path: str, headers: Container[bytes] = ()) -> ErrorSerializer:
    """Return the error format for a path.

    On paths without an own API, Anthropic's clients get the format that they know.
    """
    api = api_at(path)
    return MESSAGES.errors if not api.path and message_reply.HEADER in headers else api.errors


# Variants of a path: clients may have a base URL with /v1 twice or not at all, or an extra slash.


VERSION = "v1"
NEAR = 0.8
"""Minimum similarity of two paths for suggesting one for the other."""


def path_variants(path: str) -> Iterator[str]:
    """Yield the paths that a path may stand for.

    >>> [*ways_to_write("/v1/v1/models/")]
    ['/v1/models', '/models']
    """
    parts = [part for part in path.split("/") if part]
    while parts[:1] == [VERSION]:
        del parts[0]
    if plain := "/".join(parts):
        yield from (way for way in (f"/{VERSION}/{plain}", f"/{plain}") if way != path)


def nearest_path(path: str, known: Iterable[str]) -> str | None:
    """Return the known path that a path ends with or resembles: `/v1/models` for `/openai/v1/models`."""
    plain = {each.removeprefix(f"/{VERSION}"): each for each in known if "{" not in each and len(each) > 1}
    ends = [each for each in plain if path.rstrip("/").endswith(each)]
    near = difflib.get_close_matches(path[:200], plain.values(), n=1, cutoff=NEAR)
    return plain[max(ends, key=len)] if ends else next(iter(near), None)
