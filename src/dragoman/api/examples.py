"""An example request for every operation, which works on any server that supports the operation.

The OpenAPI document includes them, the page at /docs prefills them, and a test sends each to a server. Words
in capitals are placeholders: MODEL is the name of the model, the others are values from the replies of
earlier steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

MODEL = "MODEL"


class ExampleStep(Struct, frozen=True, omit_defaults=True):
    """A request to send first, which creates what the example uses."""

    path: str
    body: Any = None
    method: str = "post"
    form: Mapping[str, Any] | None = None
    """Form fields, and the file as `{"name": ..., "content": ...}`."""
    take: Mapping[str, str] = {}
    """Placeholders for fields of the reply: `{"ID": "id"}`, or `data.0.id` within a list."""
    until: Mapping[str, str] = {}
    """Field values for which the step is repeated until the reply has them."""


class Example(Struct, frozen=True):
    body: Any = None
    path: Mapping[str, str] = {}
    """Parameters of the path."""
    query: Mapping[str, str] = {}
    form: Mapping[str, Any] | None = None
    before: Sequence[ExampleStep] = ()
    note: str = ""
    """A hint for the user who tries the example."""


_ASK = [{"role": "user", "content": "Name three colours."}]
_RESPONSE: dict[str, Any] = {"input": "Name three colours.", "max_output_tokens": 32}
_ITEM: dict[str, Any] = {"type": "message", "role": "user", "content": "Name three colours."}
_METADATA: dict[str, Any] = {"metadata": {"topic": "colours"}}
_RANK: dict[str, Any] = {
    "query": "What do cats eat?",
    "documents": ["Cats eat mice.", "Paris is in France.", "Dogs bark."],
}
_SCORE: dict[str, Any] = {"text_1": "What do cats eat?", "text_2": ["Cats eat mice.", "Dogs bark."]}
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_CALLS: dict[str, Any] = {"text": _CALL, "tool_call_parser": "hermes", "tools": [_WEATHER]}
_REASONING: dict[str, Any] = {
    "text": "<think>They greet me.</think>Hello!",
    "reasoning_parser": "qwen3",
}
_LINE = (
    '{"custom_id": "first", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"model": "MODEL", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 512}}\n'
)
_BATCH: dict[str, Any] = {
    "input_file_id": "FILE",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
_MESSAGES: dict[str, Any] = {"max_tokens": 32, "messages": _ASK}
_MESSAGE_BATCH: dict[str, Any] = {
    "requests": [{"custom_id": "first", "params": {"model": MODEL, **_MESSAGES, "max_tokens": 512}}]
}
_UPLOAD: dict[str, Any] = {
    "bytes": 6,
    "filename": "hello.txt",
    "mime_type": "text/plain",
    "purpose": "user_data",
}
_HELLO = {"name": "hello.txt", "content": "Hello\n"}
_FILE = {"purpose": "user_data", "file": _HELLO}
_POET = {"lora_name": "poet", "lora_path": "poet", "load_inplace": True}
_BY_ID = {"id": "ID"}

_STORED_CHAT = ExampleStep(
    "/v1/chat/completions",
    {"messages": _ASK, "max_tokens": 16, "store": True, "return_token_ids": True},
    take={"ID": "id"},
)
_STORED = ExampleStep("/v1/responses", _RESPONSE, take={"ID": "id"})
_BACKGROUND = ExampleStep("/v1/responses", {**_RESPONSE, "background": True}, take={"ID": "id"})
_TALK = ExampleStep("/v1/conversations", {"items": [_ITEM]}, take={"ID": "id"})
_TALK_ITEM = ExampleStep("/v1/conversations/ID/items", method="get", take={"ITEM": "data.0.id"})
_SENT_FILE = ExampleStep("/v1/files", form=_FILE, take={"ID": "id"})
_SENT_LINES = ExampleStep(
    "/v1/files",
    form={"purpose": "batch", "file": {"name": "lines.jsonl", "content": _LINE}},
    take={"FILE": "id"},
)
_BEGUN_BATCH = ExampleStep("/v1/batches", _BATCH, take={"ID": "id"})
_BEGUN_UPLOAD = ExampleStep("/v1/uploads", _UPLOAD, take={"ID": "id"})
_SENT_PART = ExampleStep("/v1/uploads/ID/parts", form={"data": _HELLO}, take={"PART": "id"})
_BEGUN_MESSAGES = ExampleStep("/v1/messages/batches", _MESSAGE_BATCH, take={"ID": "id"})
_DONE_MESSAGES = ExampleStep("/v1/messages/batches/ID", method="get", until={"processing_status": "ended"})


def _about(step: ExampleStep, *more: ExampleStep, body: Any = None, note: str = "", **query: str) -> Example:
    """Build an example that uses the result of a step."""
    return Example(body, path=_BY_ID, query=query, before=(step, *more), note=note)


_ADMIN_NOTE = "Needs an admin key."
_IDS_NOTE = "Token ids differ between models; get yours from /tokenize."
EXAMPLES: Mapping[str, Example] = {
    "post /v1/chat/completions": Example({"messages": _ASK, "max_tokens": 64, "stream": True}),
    "get /v1/chat/completions": Example(query={"limit": "5"}),
    "get /v1/chat/completions/{id}": _about(_STORED_CHAT),
    "post /v1/chat/completions/{id}": _about(_STORED_CHAT, body=_METADATA),
    "delete /v1/chat/completions/{id}": _about(_STORED_CHAT),
    "get /v1/chat/completions/{id}/messages": _about(_STORED_CHAT, limit="5"),
    "post /v1/chat/completions/render": Example({"messages": _ASK}),
    "post /v1/chat/completions/input_tokens": Example({"messages": _ASK}),
    "post /v1/completions": Example({"prompt": "The capital of France is", "max_tokens": 8}),
    "post /v1/completions/render": Example({"prompt": "The capital of France is"}),
    "post /inference/v1/generate": Example(
        {"token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 8}}, note=_IDS_NOTE
    ),
    "post /v1/responses": Example({**_RESPONSE, "stream": True}),
    "get /v1/responses/{id}": _about(_STORED),
    "delete /v1/responses/{id}": _about(_STORED),
    "post /v1/responses/{id}/cancel": _about(_BACKGROUND),
    "get /v1/responses/{id}/input_items": _about(_STORED, limit="5"),
    "post /v1/responses/compact": Example({"model": MODEL, **_RESPONSE}),
    "post /v1/responses/input_tokens": Example(_RESPONSE),
    "post /v1/conversations": Example({"items": [_ITEM], **_METADATA}),
    "get /v1/conversations/{id}": _about(_TALK),
    "post /v1/conversations/{id}": _about(_TALK, body=_METADATA),
    "delete /v1/conversations/{id}": _about(_TALK),
    "post /v1/conversations/{id}/items": _about(_TALK, body={"items": [_ITEM]}),
    "get /v1/conversations/{id}/items": _about(_TALK, limit="5"),
    "get /v1/conversations/{id}/items/{item_id}": Example(
        path={**_BY_ID, "item_id": "ITEM"}, before=(_TALK, _TALK_ITEM)
    ),
    "delete /v1/conversations/{id}/items/{item_id}": Example(
        path={**_BY_ID, "item_id": "ITEM"}, before=(_TALK, _TALK_ITEM)
    ),
    "get /v1/trajectories/{id}": _about(_STORED_CHAT),
    "post /v1/trajectories/{id}": _about(_STORED_CHAT, body={"reward": 1.0}),
    "post /v1/embeddings": Example({"input": ["Cats eat mice.", "Dogs bark."]}),
    "post /v1/messages": Example({"model": MODEL, **_MESSAGES, "stream": True}),
    "post /v1/messages/count_tokens": Example({"model": MODEL, "messages": _ASK}),
    "post /v1/messages/batches": Example(_MESSAGE_BATCH),
    "get /v1/messages/batches": Example(query={"limit": "5"}),
    "get /v1/messages/batches/{id}": _about(_BEGUN_MESSAGES),
    "delete /v1/messages/batches/{id}": _about(_BEGUN_MESSAGES, _DONE_MESSAGES),
    "post /v1/messages/batches/{id}/cancel": _about(_BEGUN_MESSAGES),
    "get /v1/messages/batches/{id}/results": _about(_BEGUN_MESSAGES, _DONE_MESSAGES),
    "post /api/chat": Example({"model": MODEL, "messages": _ASK, "options": {"num_predict": 32}}),
    "post /api/generate": Example(
        {"model": MODEL, "prompt": "Name three colours.", "options": {"num_predict": 32}}
    ),
    "post /api/embed": Example({"model": MODEL, "input": ["Cats eat mice."]}),
    "post /api/embeddings": Example({"model": MODEL, "prompt": "Cats eat mice."}),
    "post /api/show": Example({"model": MODEL}),
    "post /api/pull": Example({"model": MODEL}),
    "post /v1/rerank": Example(_RANK),
    "post /rerank": Example(_RANK),
    "post /v1/score": Example(_SCORE),
    "post /score": Example(_SCORE),
    "post /tokenize": Example({"prompt": "Hello, world!", "return_token_strs": True}),
    "post /v1/tokenize": Example({"messages": _ASK, "return_token_strs": True}),
    "post /detokenize": Example({"tokens": [65, 66, 67], "return_token_strs": True}, note=_IDS_NOTE),
    "post /v1/detokenize": Example({"tokens": [65, 66, 67], "return_token_strs": True}, note=_IDS_NOTE),
    "post /v1/check_schema": Example(
        {"schema": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}}}
    ),
    "post /parse": Example(
        {
            "text": f"<think>\nThey ask for the weather.\n</think>\n\n{_CALL}",
            "dialect": "hermes",
            "tools": [_WEATHER],
            "return_grammar": True,
        }
    ),
    "post /parse/function_call": Example(_CALLS),
    "post /parse_function_call": Example(_CALLS),
    "post /parse/reasoning": Example(_REASONING),
    "post /separate_reasoning": Example(_REASONING),
    "post /v1/engine/pause": Example({}, note="All requests wait until you send /v1/engine/resume."),
    "post /v1/engine/resume": Example({"weight_version": "2"}, before=(ExampleStep("/v1/engine/pause", {}),)),
    "post /v1/load_lora_adapter": Example(
        _POET,
        note="The server needs --lora-dir with an adapter of this name.",
    ),
    "post /v1/unload_lora_adapter": Example(
        {"lora_name": "poet"},
        before=(ExampleStep("/v1/load_lora_adapter", _POET),),
        note="The server needs --lora-dir with an adapter of this name.",
    ),
    "post /lora-adapters": Example({"adapters": []}),
    "post /models/load": Example({"model": MODEL}, note=_ADMIN_NOTE),
    "post /models/unload": Example({"model": MODEL}, note=_ADMIN_NOTE),
    "post /v1/model/load": Example({"model_name": MODEL}, note=_ADMIN_NOTE),
    "post /v1/model/unload": Example({"model_name": MODEL}, note=_ADMIN_NOTE),
    "post /api/copy": Example({"source": MODEL, "destination": "my-model"}, note=_ADMIN_NOTE),
    "get /models/sse": Example(note="The stream continues until you stop it."),
    "get /v1/models/{model}": Example(path={"model": MODEL}),
    "post /v1/files": Example(form=_FILE),
    "get /v1/files": Example(query={"limit": "5"}),
    "get /v1/files/{id}": _about(_SENT_FILE),
    "delete /v1/files/{id}": _about(_SENT_FILE),
    "get /v1/files/{id}/content": _about(_SENT_FILE),
    "post /v1/uploads": Example(_UPLOAD),
    "post /v1/uploads/{id}/parts": Example(path=_BY_ID, form={"data": _HELLO}, before=(_BEGUN_UPLOAD,)),
    "post /v1/uploads/{id}/complete": _about(_BEGUN_UPLOAD, _SENT_PART, body={"part_ids": ["PART"]}),
    "post /v1/uploads/{id}/cancel": _about(_BEGUN_UPLOAD),
    "post /v1/batches": Example(_BATCH, before=(_SENT_LINES,)),
    "get /v1/batches": Example(query={"limit": "5"}),
    "get /v1/batches/{id}": _about(_SENT_LINES, _BEGUN_BATCH),
    "post /v1/batches/{id}/cancel": _about(_SENT_LINES, _BEGUN_BATCH),
}
