"""The OpenAPI description, made from the very structs that requests are decoded with."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.api.chat.request import ChatRequest
from dragoman.api.completions import CompletionRequest, IdsRequest
from dragoman.api.conversations import AddItems, ChangeMetadata, CreateConversation
from dragoman.api.examples import EXAMPLES, Example
from dragoman.api.inspection import (
    CheckSchema,
    Detokenize,
    ParseAnswer,
    ParseCalls,
    ParseReasoning,
    TokenizeChat,
    TokenizeText,
)
from dragoman.api.ollama import OllamaChat, OllamaModel, OllamaPrompt, OllamaTexts
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.training import (
    AdapterScale,
    LoadAdapter,
    PauseRequest,
    ResumeRequest,
    SetRewards,
    SetScales,
    UnloadAdapter,
)
from dragoman.api.vectors import EmbeddingRequest, RerankRequest, ScoreRequest


class Operation(Struct, frozen=True):
    method: str
    path: str
    summary: str
    body: tuple[type[Any], ...] = ()
    streams: bool = False
    query: tuple[str, ...] = ()
    form: dict[str, Any] | None = None
    """The schema of the form that it takes, where that is no JSON."""
    error: dict[str, Any] | None = None
    """The schema of what is said when it fails, where that is not OpenAI's."""


BINARY = frozenset({"/v1/files/{id}/content"})
"""Where the reply is bytes."""
PLAIN = frozenset({"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Where the reply is text."""
PAGE = ("after", "limit", "order")

OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
OPERATIONS: Sequence[Operation] = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", (ChatRequest,), streams=True),
    Operation("post", "/v1/completions", "Continue a text", (CompletionRequest,), streams=True),
    Operation("post", "/inference/v1/generate", "Continue ids with ids, as vLLM has it", (IdsRequest,)),
    Operation("post", "/v1/responses", "Make a response", (ResponseRequest,), streams=True),
    Operation(
        "get",
        "/v1/responses/{id}",
        "A response that is stored, or its events",
        streams=True,
        query=("stream", "starting_after"),
    ),
    Operation("delete", "/v1/responses/{id}", "Delete a response"),
    Operation("post", "/v1/responses/{id}/cancel", "End a response that is made in the background"),
    Operation("get", "/v1/responses/{id}/input_items", "What a response was asked", query=PAGE),
    Operation("post", "/v1/responses/compact", "Make a context short", (ResponseRequest,)),
    Operation("post", "/v1/responses/input_tokens", "Count the tokens of a context", (ResponseRequest,)),
    Operation("post", "/v1/conversations", "Begin a conversation", (CreateConversation,)),
    Operation("get", "/v1/conversations/{id}", "A conversation"),
    Operation("post", "/v1/conversations/{id}", "Change its metadata", (ChangeMetadata,)),
    Operation("delete", "/v1/conversations/{id}", "Delete it with its items"),
    Operation("post", "/v1/conversations/{id}/items", "Add items to a conversation", (AddItems,)),
    Operation("get", "/v1/conversations/{id}/items", "The items of a conversation", query=(*PAGE, "include")),
    Operation("get", "/v1/conversations/{id}/items/{item_id}", "An item of a conversation"),
    Operation("delete", "/v1/conversations/{id}/items/{item_id}", "Delete an item"),
    Operation(
        "get",
        "/v1/chat/completions",
        "The chat completions that are stored",
        query=(*PAGE, "model", "metadata"),
    ),
    Operation("get", "/v1/chat/completions/{id}", "A stored chat completion"),
    Operation("post", "/v1/chat/completions/{id}", "Change its metadata", (ChangeMetadata,)),
    Operation("delete", "/v1/chat/completions/{id}", "Delete it"),
    Operation("get", "/v1/chat/completions/{id}/messages", "The messages that it answers", query=PAGE),
    Operation("get", "/v1/trajectories/{id}", "What was seen and sampled, as ids"),
    Operation("post", "/v1/trajectories/{id}", "Set rewards", (SetRewards,)),
    Operation("post", "/v1/embeddings", "Embed texts", (EmbeddingRequest,)),
    Operation("post", "/api/chat", "A conversation, as Ollama has it", (OllamaChat,), error=OLLAMA_ERROR),
    Operation("post", "/api/generate", "A prompt, as Ollama has it", (OllamaPrompt,), error=OLLAMA_ERROR),
    Operation("post", "/api/embed", "Embed texts, as Ollama has it", (OllamaTexts,), error=OLLAMA_ERROR),
    Operation("post", "/api/embeddings", "Embed one text", (OllamaTexts,), error=OLLAMA_ERROR),
    Operation("post", "/api/show", "What a model is", (OllamaModel,), error=OLLAMA_ERROR),
    Operation("post", "/api/pull", "Whether a model is here", (OllamaModel,), error=OLLAMA_ERROR),
    Operation("get", "/api/tags", "The models there are, for clients of Ollama", error=OLLAMA_ERROR),
    Operation("get", "/api/ps", "The models that are loaded", error=OLLAMA_ERROR),
    Operation("get", "/api/version", "The version of Ollama whose API this is", error=OLLAMA_ERROR),
    Operation("post", "/v1/rerank", "Order texts by how well they fit a query", (RerankRequest,)),
    Operation("post", "/rerank", "The same as /v1/rerank", (RerankRequest,)),
    Operation("post", "/v1/score", "How well texts fit each other", (ScoreRequest,)),
    Operation("post", "/score", "The same as /v1/score", (ScoreRequest,)),
    Operation(
        "post", "/v1/chat/completions/render", "The prompt of a conversation, as text and ids", (ChatRequest,)
    ),
    Operation(
        "post", "/v1/completions/render", "The prompts of a completion, as text and ids", (CompletionRequest,)
    ),
    Operation("post", "/v1/chat/completions/input_tokens", "Count a conversation's tokens", (ChatRequest,)),
    Operation("post", "/tokenize", "Text or a conversation to ids", (TokenizeText, TokenizeChat)),
    Operation("post", "/detokenize", "Ids to text", (Detokenize,)),
    Operation("post", "/v1/check_schema", "Whether answers can be held to a JSON Schema", (CheckSchema,)),
    Operation("get", "/v1/mcp_servers", "The operator's MCP servers"),
    Operation("get", "/tokenizer_info", "The tokenizer's special tokens, and the chat template"),
    Operation("post", "/v1/tokenize", "The same as /tokenize", (TokenizeText, TokenizeChat)),
    Operation("post", "/v1/detokenize", "The same as /detokenize", (Detokenize,)),
    Operation("post", "/parse", "How an answer is read: dialect, events, parts, grammar", (ParseAnswer,)),
    Operation("get", "/dialects", "The dialects there are, with examples, and that of the model"),
    Operation("post", "/parse/function_call", "Find the tool calls in a text", (ParseCalls,)),
    Operation("post", "/parse/reasoning", "Split a text into reasoning and answer", (ParseReasoning,)),
    Operation(
        "post", "/parse_function_call", "/parse/function_call with SGLang's names of the reply", (ParseCalls,)
    ),
    Operation(
        "post", "/separate_reasoning", "/parse/reasoning with SGLang's names of the reply", (ParseReasoning,)
    ),
    Operation("post", "/v1/engine/pause", "Hold the engine, to change its weights", (PauseRequest,)),
    Operation("post", "/v1/engine/resume", "Let it go on, with weights of another version", (ResumeRequest,)),
    Operation("post", "/v1/load_lora_adapter", "Load an adapter", (LoadAdapter,)),
    Operation("post", "/v1/unload_lora_adapter", "Take an adapter away", (UnloadAdapter,)),
    Operation("get", "/lora-adapters", "The adapters there are, with their usual scales"),
    Operation("post", "/lora-adapters", "Set their usual scales", (SetScales, list[AdapterScale])),
    Operation("get", "/v1/models", "The models there are"),
    Operation("get", "/v1/models/{model}", "One model"),
    Operation("get", "/health", "Whether the server is alive"),
    Operation("get", "/healthz", "The same as /health"),
    Operation("get", "/ping", "The same as /health"),
    Operation("get", "/ready", "Whether the engine moves"),
    Operation("get", "/metrics", "Figures for Prometheus"),
    Operation("get", "/operations", "What the server is doing", query=("request_id",)),
    Operation("get", "/version", "The server's version"),
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
    """`root` is the path at which a proxy has the server."""
    bodies = list(dict.fromkeys(body for operation in operations for body in operation.body))
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    for component in components.values():
        # What nobody knows is named in a header, and other servers' names are read.
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
                "description": "What is wrong, and what to change",
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
        # What to send first, for there to be something that this one is about.
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
            # As `metadata[topic]=tea`.
            pairs = {"type": "object", "additionalProperties": {"type": "string"}}
            yield {"name": name, "in": "query", "style": "deepObject", "explode": True, "schema": pairs}
        else:
            shown = {"example": example.query[name]} if name in example.query else {}
            yield {"name": name, "in": "query", "schema": {"type": "string"}, **shown}
