"""Every field of every request, found by reflection: a new one is attacked without a word about it here."""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, inspect

import dragoman.api
from dragoman.api.request_decoder import RequestDecoder
from tests.attacks.bodies import GOOD

TYPES: dict[str, tuple[str, ...]] = {
    "ChatRequest": (
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/chat/completions/input_tokens",
    ),
    "CompletionRequest": ("/v1/completions", "/v1/completions/render"),
    "IdsRequest": ("/inference/v1/generate",),
    "ResponseRequest": (
        "/v1/responses",
        "WEBSOCKET /v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
    ),
    "MessagesRequest": ("/v1/messages", "/v1/messages/count_tokens"),
    "CreateMessageBatchRequest": ("/v1/messages/batches",),
    "CreateBatchRequest": ("/v1/batches",),
    "CreateUploadRequest": ("/v1/uploads",),
    "CompleteUploadRequest": ("/v1/uploads/{id}/complete",),
    "EmbeddingRequest": ("/v1/embeddings",),
    "OllamaChatRequest": ("/api/chat",),
    "OllamaGenerateRequest": ("/api/generate",),
    "OllamaEmbedRequest": ("/api/embed", "/api/embeddings"),
    "OllamaModelRequest": ("/api/show", "/api/pull", "/api/create"),
    "ChangeModelRequest": ("/models/load", "/models/unload", "/v1/model/load", "/v1/model/unload"),
    "CopyModelRequest": ("/api/copy",),
    "RerankRequest": ("/v1/rerank", "/rerank"),
    "ScoreRequest": ("/v1/score", "/score"),
    "TokenizeTextRequest": ("/tokenize",),
    "TokenizeChatRequest": ("/v1/tokenize",),
    "DetokenizeRequest": ("/detokenize", "/v1/detokenize"),
    "CheckSchemaRequest": ("/v1/check_schema",),
    "ParseAnswerRequest": ("/parse",),
    "ParseCallsRequest": ("/parse/function_call", "/parse_function_call"),
    "ParseReasoningRequest": ("/parse/reasoning", "/separate_reasoning"),
    "CreateConversationRequest": ("/v1/conversations",),
    "AddItemsRequest": ("/v1/conversations/{id}/items",),
    "ChangeMetadataRequest": ("/v1/conversations/{id}", "/v1/chat/completions/{id}"),
    "SetRewardsRequest": ("/v1/trajectories/{id}",),
    "PauseRequest": ("/v1/engine/pause",),
    "ResumeRequest": ("/v1/engine/resume",),
    "LoadAdapterRequest": ("/v1/load_lora_adapter",),
    "UnloadAdapterRequest": ("/v1/unload_lora_adapter",),
    "SetScalesRequest": ("/lora-adapters",),
}
"""The routes that read a type of request."""
PARTS = {
    *("PresetFields", "McpDeclaration", "FunctionTool", "FlatCustomTool", "NamespaceTool", "_Shape"),
    "FileForm",
}
"""Types that are read of a part of a request, or of a form, or only to see which type it is."""
_SLOT = "@here@"

Build = Callable[[Any], Any]


class Site(Struct, frozen=True):
    """A place in a request that holds a value of one kind."""

    type: str
    place: str
    kind: inspect.Type
    build: Build
    """The field of the request that the place is in, with a value at the place."""

    @property
    def field(self) -> str:
        return self.place.split(".")[1].partition("[")[0]

    def body(self, route: str, raw: str) -> bytes:
        """The good body of a route with a piece of JSON at the place."""
        whole = {**GOOD[route], self.field: self.build(_SLOT)}
        return json.dumps(whole).replace(f'"{_SLOT}"', raw).encode()


def readers() -> dict[str, RequestDecoder]:
    """All that read requests, by the names of their types."""
    fields: dict[str, RequestDecoder] = {}
    for module in pkgutil.walk_packages(dragoman.api.__path__, "dragoman.api."):
        _collect(module.name, fields)
    return fields


def _collect(module: str, fields: dict[str, RequestDecoder]) -> None:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, RequestDecoder):
            fields[value.decoder.type.__name__] = value


def sites(*kinds: type[inspect.Type]) -> list[Site]:
    """All places that hold values of these kinds."""
    return [
        Site(name, param, kind, build)
        for name, reader in readers().items()
        if name in TYPES
        for field in _struct(reader).fields
        for param, kind, build in _inside(field.type, f".{field.encode_name}", _same, ())
        if isinstance(kind, kinds)
    ]


def _struct(reader: RequestDecoder) -> inspect.StructType:
    info = inspect.type_info(reader.decoder.type)
    assert isinstance(info, inspect.StructType)
    return info


def _same(value: Any) -> Any:
    return value


def _inside(
    kind: inspect.Type, param: str, build: Build, outer: Sequence[type]
) -> Iterator[tuple[str, inspect.Type, Build]]:
    kind = _plain(kind)
    yield param, kind, build
    if isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _inside(option, param, build, outer)
    elif isinstance(kind, inspect.ListType):
        yield from _inside(kind.item_type, f"{param}[0]", lambda value: build([value]), outer)
    elif isinstance(kind, inspect.DictType):
        yield from _inside(kind.value_type, f"{param}.1", lambda value: build({"1": value}), outer)
    elif isinstance(kind, inspect.StructType) and kind.cls not in outer:
        for field in kind.fields:
            around = {f.encode_name: sample(f.type) for f in kind.fields if f.required and f is not field}
            put = _member(build, around, field.encode_name)
            yield from _inside(field.type, f"{param}.{field.encode_name}", put, (*outer, kind.cls))


def _member(build: Build, around: dict[str, Any], name: str) -> Build:
    return lambda value: build({**around, name: value})


def _plain(kind: inspect.Type) -> inspect.Type:
    return _plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def sample(kind: inspect.Type) -> Any:
    """The least that is of a type."""
    match _plain(kind):
        case inspect.UnionType(types=types):
            return sample(next(one for one in types if not isinstance(_plain(one), inspect.NoneType)))
        case inspect.StructType(fields=fields):
            return {field.encode_name: sample(field.type) for field in fields if field.required}
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType(item_type=item):
            return [sample(item)]
        case inspect.IntType(ge=least) | inspect.FloatType(ge=least):
            return max(least or 0, 1)
        case inspect.StrType():
            return "a"
        case inspect.BoolType():
            return True
        case _:
            return {}
