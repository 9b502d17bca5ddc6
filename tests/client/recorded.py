"""Streams in the shapes that three kinds of servers write."""

import json
from typing import Any


def sse(*events: Any, done: bool = True) -> bytes:
    data = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events)
    return data + (b"data: [DONE]\n\n" if done else b"")


def chat(*choices: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [
        {**head, **fields, "choices": [{"index": 0, "finish_reason": None, **choice}]} for choice in choices
    ]


USAGE = {
    "id": "chatcmpl-1",
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": None,
    },
}

OPENAI_CALLS = sse(
    *chat(
        {"delta": {"role": "assistant", "content": None, "refusal": None}, "logprobs": None},
        {
            "delta": {
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "call_a",
                        "type": "function",
                        "function": {"name": "look", "arguments": ""},
                    }
                ]
            }
        },
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"place": "}'}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '\\"Ö"}'}}]}},
        {
            "delta": {
                "tool_calls": [
                    {
                        "index": 1,
                        "id": "call_b",
                        "type": "function",
                        "function": {"name": "now", "arguments": ""},
                    }
                ]
            }
        },
        {"delta": {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}},
        {"delta": {}, "finish_reason": "tool_calls"},
        service_tier="default",
        obfuscation="xK2",
    ),
    USAGE,
)
"""OpenAI: calls one after the other, with an index, the name first."""

VLLM_CHAT = sse(
    *chat({"delta": {"role": "assistant", "content": ""}, "logprobs": None}, prompt_token_ids=[1, 2, 3]),
    *chat(
        {"delta": {"reasoning": "Hm"}, "token_ids": [10, 11], "logprobs": None},
        {"delta": {"reasoning": "m."}, "token_ids": [12], "logprobs": None},
        {"delta": {"content": "Hi"}, "token_ids": [13, 14], "logprobs": None},
        {"delta": {"content": ""}, "token_ids": [15], "finish_reason": "stop", "stop_reason": None},
    ),
    USAGE,
)
"""vLLM with `return_token_ids`: ids beside the deltas, those of markers too."""

VLLM_COMPLETIONS = sse(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": " the",
                "token_ids": [20],
                "finish_reason": None,
                "stop_reason": None,
                "logprobs": {
                    "text_offset": [0],
                    "token_logprobs": [-0.5],
                    "tokens": ["token_id:20"],
                    "top_logprobs": [{"token_id:20": -0.5, "token_id:21": -1.5}],
                },
            }
        ],
    },
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": "",
                "token_ids": [2],
                "finish_reason": "stop",
                "stop_reason": 2,
                "logprobs": {
                    "text_offset": [4],
                    "token_logprobs": [-0.25],
                    "tokens": ["token_id:2"],
                    "top_logprobs": [{"token_id:2": -0.25}],
                },
            }
        ],
    },
)
"""vLLM's completions with log probabilities and `return_tokens_as_token_ids`."""

LLAMA_SERVER = sse(
    *chat(
        {"delta": {"role": "assistant", "content": None}},
        {"delta": {"reasoning_content": "So"}},
        {
            "delta": {"content": "Grüß"},
            "logprobs": {
                "content": [
                    {
                        "id": 5,
                        "token": "Gr",
                        "bytes": [71, 114],
                        "logprob": -0.1,
                        "top_logprobs": [{"id": 5, "token": "Gr", "logprob": -0.1}],
                    },
                    {
                        "id": 6,
                        "token": "üß",
                        "bytes": [195, 188, 195, 159],
                        "logprob": -0.2,
                        "top_logprobs": [],
                    },
                ]
            },
        },
        {"delta": {}, "finish_reason": "length"},
        timings={"predicted_n": 3},
    ),
)
"""llama-server: `timings` beside the choices, ids in the log probabilities."""


def responses(*events: tuple[str, dict[str, Any]]) -> bytes:
    raw = b""
    for number, (name, fields) in enumerate(events):
        data = json.dumps({"type": name, "sequence_number": number, **fields}).encode()
        raw += b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
    return raw


_CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "look", "status": "in_progress"}
OPENAI_RESPONSES = responses(
    ("response.created", {"response": {"id": "resp_1", "status": "in_progress", "output": []}}),
    (
        "response.output_item.added",
        {"output_index": 0, "item": {"type": "reasoning", "id": "rs_1", "summary": []}},
    ),
    (
        "response.reasoning_summary_text.delta",
        {"output_index": 0, "item_id": "rs_1", "summary_index": 0, "delta": "Hm."},
    ),
    (
        "response.reasoning_summary_text.done",
        {"output_index": 0, "item_id": "rs_1", "summary_index": 0, "text": "Hm."},
    ),
    (
        "response.output_text.delta",
        {
            "output_index": 1,
            "item_id": "msg_1",
            "content_index": 0,
            "delta": "Hi",
            "logprobs": [{"token": "Hi", "logprob": -0.5, "top_logprobs": []}],
        },
    ),
    ("response.output_text.done", {"output_index": 1, "item_id": "msg_1", "content_index": 0, "text": "Hi"}),
    ("response.output_item.added", {"output_index": 2, "item": {**_CALL, "arguments": ""}}),
    ("response.function_call_arguments.delta", {"output_index": 2, "item_id": "fc_1", "delta": '{"a"'}),
    ("response.function_call_arguments.delta", {"output_index": 2, "item_id": "fc_1", "delta": ":1}"}),
    ("response.function_call_arguments.done", {"output_index": 2, "item_id": "fc_1", "arguments": '{"a":1}'}),
    (
        "response.output_item.done",
        {"output_index": 2, "item": {**_CALL, "status": "completed", "arguments": '{"a":1}'}},
    ),
    (
        "response.completed",
        {
            "response": {
                "id": "resp_1",
                "status": "completed",
                "incomplete_details": None,
                "error": None,
                "usage": {
                    "input_tokens": 4,
                    "output_tokens": 6,
                    "input_tokens_details": {"cached_tokens": 1},
                    "output_tokens_details": {"reasoning_tokens": 2},
                },
            }
        },
    ),
)
"""OpenAI's Responses: named events, no end mark."""

MANY_LINES = b"".join(
    b"event: chunk\n"
    + b"".join(b"data: " + line + b"\n" for line in json.dumps(event, indent=1).encode().split(b"\n"))
    + b"\n"
    for event in chat({"delta": {"content": "a\nb"}}, {"delta": {}, "finish_reason": "stop"})
)
"""Nobody writes so, but everybody may."""

STREAMS = {
    "many-lines": ("/v1/chat/completions", MANY_LINES),
    "openai-calls": ("/v1/chat/completions", OPENAI_CALLS),
    "vllm-chat": ("/v1/chat/completions", VLLM_CHAT),
    "vllm-completions": ("/v1/completions", VLLM_COMPLETIONS),
    "llama-server": ("/v1/chat/completions", LLAMA_SERVER),
    "openai-responses": ("/v1/responses", OPENAI_RESPONSES),
}
