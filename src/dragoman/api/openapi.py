"""The OpenAPI document, generated from the structs that decode requests."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.api.chat.request import ChatRequest
from dragoman.api.completions import CompletionRequest, IdsRequest
from dragoman.api.conversations import AddItemsRequest, ChangeMetadataRequest, CreateConversationRequest
from dragoman.api.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from dragoman.api.examples import EXAMPLES, Example
from dragoman.api.inspection import (
    CheckSchemaRequest,
    DetokenizeRequest,
    ParseAnswerRequest,
    ParseCallsRequest,
    ParseReasoningRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from dragoman.api.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.training import (
    AdapterScale,
    LoadAdapterRequest,
    PauseRequest,
    ResumeRequest,
    SetRewardsRequest,
    SetScalesRequest,
    UnloadAdapterRequest,
)


class Operation(Struct, frozen=True):
    method: str
    path: str
    summary: str
    body: tuple[type[Any], ...] = ()
    streams: bool = False
    query: tuple[str, ...] = ()
    form: dict[str, Any] | None = None
    """The schema of the form that the operation takes instead of JSON."""
    error: dict[str, Any] | None = None
    """The schema of errors, if it differs from OpenAI's."""


BINARY = frozenset({"/v1/files/{id}/content"})
"""Paths whose reply is bytes."""
PLAIN = frozenset({"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths whose reply is text."""
PAGE = ("after", "limit", "order")

OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
OPERATIONS: Sequence[Operation] = (
    Operation("post", "/v1/chat/completions", "Create a chat completion", (ChatRequest,), streams=True),
    Operation("post", "/v1/completions", "Create a completion", (CompletionRequest,), streams=True),
    Operation("post", "/inference/v1/generate", "Generate from token ids (vLLM)", (IdsRequest,)),
    Operation("post", "/v1/responses", "Create a response", (ResponseRequest,), streams=True),
    Operation(
        "get",
        "/v1/responses/{id}",
        "Retrieve a response or its events",
        streams=True,
        query=("stream", "starting_after"),
    ),
    Operation("delete", "/v1/responses/{id}", "Delete a response"),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a background response"),
    Operation("get", "/v1/responses/{id}/input_items", "List input items", query=PAGE),
    Operation("post", "/v1/responses/compact", "Compact a context", (ResponseRequest,)),
    Operation("post", "/v1/responses/input_tokens", "Count the tokens of a context", (ResponseRequest,)),
    Operation("post", "/v1/conversations", "Create a conversation", (CreateConversationRequest,)),
    Operation("get", "/v1/conversations/{id}", "Retrieve a conversation"),
    Operation(
        "post", "/v1/conversations/{id}", "Update the metadata of a conversation", (ChangeMetadataRequest,)
    ),
    Operation("delete", "/v1/conversations/{id}", "Delete a conversation with its items"),
    Operation("post", "/v1/conversations/{id}/items", "Add items to a conversation", (AddItemsRequest,)),
    Operation(
        "get", "/v1/conversations/{id}/items", "List the items of a conversation", query=(*PAGE, "include")
    ),
    Operation("get", "/v1/conversations/{id}/items/{item_id}", "Retrieve an item of a conversation"),
    Operation("delete", "/v1/conversations/{id}/items/{item_id}", "Delete an item of a conversation"),
    Operation(
        "get",
        "/v1/chat/completions",
        "List stored chat completions",
        query=(*PAGE, "model", "metadata"),
    ),
    Operation("get", "/v1/chat/completions/{id}", "Retrieve a stored chat completion"),
    Operation(
        "post",
        "/v1/chat/completions/{id}",
        "Update the metadata of a chat completion",
        (ChangeMetadataRequest,),
    ),
    Operation("delete", "/v1/chat/completions/{id}", "Delete a stored chat completion"),
    Operation(
        "get", "/v1/chat/completions/{id}/messages", "List the messages of a chat completion", query=PAGE
    ),
    Operation("get", "/v1/trajectories/{id}", "Retrieve prompt and sampled token ids"),
    Operation("post", "/v1/trajectories/{id}", "Set the rewards of a trajectory", (SetRewardsRequest,)),
    Operation("post", "/v1/embeddings", "Create embeddings", (EmbeddingRequest,)),
    Operation(
        "post", "/api/chat", "Answer a conversation (Ollama)", (OllamaChatRequest,), error=OLLAMA_ERROR
    ),
    Operation(
        "post", "/api/generate", "Answer a prompt (Ollama)", (OllamaGenerateRequest,), error=OLLAMA_ERROR
    ),
    Operation("post", "/api/embed", "Create embeddings (Ollama)", (OllamaEmbedRequest,), error=OLLAMA_ERROR),
    Operation(
        "post", "/api/embeddings", "Create one embedding (Ollama)", (OllamaEmbedRequest,), error=OLLAMA_ERROR
    ),
    Operation("post", "/api/show", "Describe a model (Ollama)", (OllamaModelRequest,), error=OLLAMA_ERROR),
    Operation("post", "/api/pull", "Download a model (Ollama)", (OllamaModelRequest,), error=OLLAMA_ERROR),
    Operation("get", "/api/tags", "List models (Ollama)", error=OLLAMA_ERROR),
    Operation("get", "/api/ps", "List loaded models (Ollama)", error=OLLAMA_ERROR),
    Operation("get", "/api/version", "Supported version of Ollama's API", error=OLLAMA_ERROR),
    Operation("post", "/v1/rerank", "Rank documents by relevance to a query", (RerankRequest,)),
    Operation("post", "/rerank", "Same as /v1/rerank", (RerankRequest,)),
    Operation("post", "/v1/score", "Score pairs of texts", (ScoreRequest,)),
    Operation("post", "/score", "Same as /v1/score", (ScoreRequest,)),
    Operation(
        "post", "/v1/chat/completions/render", "Render a conversation to text and token ids", (ChatRequest,)
    ),
    Operation("post", "/v1/completions/render", "Render the prompts of a completion", (CompletionRequest,)),
    Operation(
        "post", "/v1/chat/completions/input_tokens", "Count the tokens of a conversation", (ChatRequest,)
    ),
    Operation(
        "post", "/tokenize", "Tokenize a text or a conversation", (TokenizeTextRequest, TokenizeChatRequest)
    ),
    Operation("post", "/detokenize", "Detokenize token ids", (DetokenizeRequest,)),
    Operation(
        "post", "/v1/check_schema", "Check whether a JSON Schema can be enforced", (CheckSchemaRequest,)
    ),
    Operation("get", "/v1/mcp_servers", "List the configured MCP servers"),
    Operation("get", "/tokenizer_info", "Special tokens and chat template"),
    Operation("post", "/v1/tokenize", "Same as /tokenize", (TokenizeTextRequest, TokenizeChatRequest)),
    Operation("post", "/v1/detokenize", "Same as /detokenize", (DetokenizeRequest,)),
    Operation(
        "post", "/parse", "Parse a model's output: dialect, events, parts, grammar", (ParseAnswerRequest,)
    ),
    Operation("get", "/dialects", "List dialects with examples, and the model's own"),
    Operation("post", "/parse/function_call", "Parse tool calls in a text", (ParseCallsRequest,)),
    Operation("post", "/parse/reasoning", "Separate reasoning from the answer", (ParseReasoningRequest,)),
    Operation(
        "post",
        "/parse_function_call",
        "/parse/function_call with SGLang's reply fields",
        (ParseCallsRequest,),
    ),
    Operation(
        "post", "/separate_reasoning", "/parse/reasoning with SGLang's reply fields", (ParseReasoningRequest,)
    ),
    Operation("post", "/v1/engine/pause", "Pause the engine to change its weights", (PauseRequest,)),
    Operation("post", "/v1/engine/resume", "Resume the engine with a new weight version", (ResumeRequest,)),
    Operation("post", "/v1/load_lora_adapter", "Load an adapter", (LoadAdapterRequest,)),
    Operation("post", "/v1/unload_lora_adapter", "Unload an adapter", (UnloadAdapterRequest,)),
    Operation("get", "/lora-adapters", "List adapters with their default scales"),
    Operation(
        "post", "/lora-adapters", "Set the default scales of adapters", (SetScalesRequest, list[AdapterScale])
    ),
    Operation("get", "/v1/models", "List models"),
    Operation("get", "/v1/models/{model}", "Retrieve a model"),
    Operation("get", "/health", "Liveness probe"),
    Operation("get", "/healthz", "Same as /health"),
    Operation("get", "/ping", "Same as /health"),
    Operation("get", "/ready", "Readiness probe"),
    Operation("get", "/metrics", "Prometheus metrics"),
    Operation("get", "/operations", "Current requests, queues and engine state", query=("request_id",)),
    Operation("get", "/version", "Server version"),
)

ERROR_REF = {"$ref": "#/components/schemas/Error"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(version: str, operations: Sequence[Operation] = OPERATIONS, root: str = "") -> dict[str, Any]:
    """Build the document; `root` is the path prefix at which a proxy serves the API."""
    bodies = list(dict.fromkeys(body for operation in operations for body in operation.body))
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    for component in components.values():
        # Unknown fields are accepted and listed in a header, and other servers' names are known.
        component.pop("additionalProperties", None)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dragoman", "version": version, "license": {"name": "Apache-2.0"}},
        **({"servers": [{"url": root}]} if root else {}),
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schemas: dict[type[Any], dict[str, Any]]) -> dict[str, Any]:
    name = f"{operation.method} {operation.path}"
    example = EXAMPLES.get(name) or Example()
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": name,
        "responses": {
            "200": {"description": "OK", "content": _reply(operation)},
            "default": {
                "description": "Error: what is wrong, and how to fix it",
                "content": {"application/json": {"schema": operation.error or ERROR_REF}},
            },
        },
    }
    if example.note:
        described["description"] = example.note
    if parameters := list(_parameters(operation, example)):
        described["parameters"] = parameters
    if content := _request(operation, example, schemas):
        described["requestBody"] = {"required": True, "content": content}
    if example.before:
        # Requests to send first, which create what the example uses.
        described["x-before"] = msgspec.to_builtins(example.before)
    return described


def _reply(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if operation.path in PLAIN:
        content = {"text/plain": {"schema": {"type": "string"}}}
    if operation.path in BINARY:
        content = {"application/octet-stream": {"schema": {}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _request(
    operation: Operation, example: Example, schemas: dict[type[Any], dict[str, Any]]
) -> dict[str, Any]:
    if operation.form:
        return {"multipart/form-data": {"schema": operation.form, "example": example.form}}
    if not operation.body:
        return {}
    some = [schemas[body] for body in operation.body]
    schema = some[0] if len(some) == 1 else {"anyOf": some}
    return {"application/json": {"schema": schema, "example": example.body}}


def _parameters(operation: Operation, example: Example) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", operation.path):
        shown = {"example": example.path[name]} if name in example.path else {}
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, **shown}
    for name in operation.query:
        if name == "metadata":
            # Sent as `metadata[topic]=tea`.
            pairs = {"type": "object", "additionalProperties": {"type": "string"}}
            yield {"name": name, "in": "query", "style": "deepObject", "explode": True, "schema": pairs}
        else:
            shown = {"example": example.query[name]} if name in example.query else {}
            yield {"name": name, "in": "query", "schema": {"type": "string"}, **shown}
