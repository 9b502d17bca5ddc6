"""Texts and ids, for the routes that have no conversation: completions, tokens, vectors, scores, parsers."""

from collections.abc import Iterator
from typing import Any

from dragoman.dialects.registry import list_dialects
from tests.torture.battery.case import LIMITS, MOST_TOKENS, Case, changed, posted
from tests.torture.battery.chats import tool_sets

EIGHT_MB = LIMITS.content_chars - 1
WORDS = "the quick brown fox. "


def nested_schema(depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        fields = {"type": "object", "properties": {"a": fields}}
    return fields


def cases() -> Iterator[Case]:
    yield from _completions()
    yield from _ids()
    yield from _tokens()
    yield from _vectors()
    yield from _parsers()


def _completions() -> Iterator[Case]:
    many = LIMITS.prompts
    for route in ("/v1/completions", "/v1/completions/render"):
        for what, prompt in (
            (f"{many} prompts of 30,000 characters", [WORDS * 1500] * many),
            (f"{many} prompts of one character", ["a"] * many),
            (f"{many + 1} prompts", ["a"] * (many + 1)),
            (f"{many} prompts of 4,000 ids", [[97] * 4000] * many),
            (f"{many} prompts of 1,200 ids", [[97] * 1200] * many),
            ("a million ids", [97] * 1_000_000),
            ("300,000 ids", [97] * 300_000),
            ("300,000 ids in one list of many", [[97] * 300_000]),
            ("300,000 prompts", ["a"] * 300_000),
            ("8 MB", "a" * EIGHT_MB),
            ("4,000,000 characters of 4 bytes", "\U0001f600" * 4_000_000),
        ):
            yield changed(route, f"prompt: {what}", lambda p: {"prompt": p}, prompt)
    yield changed(
        "/v1/completions",
        "a prompt told back with its ids and their log probabilities",
        lambda: {
            "prompt": WORDS * 2_000,
            "echo": True,
            "logprobs": 5,
            "prompt_logprobs": 5,
            "return_token_ids": True,
            "max_tokens": 1,
        },
    )
    yield changed(
        "/v1/completions",
        "a prompt told back by every answer",
        lambda: {
            "prompt": [97] * (LIMITS.told_ids // LIMITS.choices),
            "n": LIMITS.choices,
            "echo": True,
            "return_token_ids": True,
            "max_tokens": 1,
        },
    )
    yield changed(
        "/v1/completions",
        "a prompt with as many alternatives as there may be",
        lambda: {"prompt": [97] * MOST_TOKENS, "prompt_logprobs": LIMITS.logprobs, "max_tokens": 1},
    )
    yield changed(
        "/v1/completions",
        f"{many} prompts told back",
        lambda: {"prompt": [WORDS * 150] * many, "echo": True, "return_token_ids": True, "max_tokens": 1},
    )
    yield changed(
        "/v1/completions",
        "a suffix of 4 MB",
        lambda: {"prompt": "a" * (4 << 20), "suffix": "a" * (4 << 20)},
    )


def _ids() -> Iterator[Case]:
    for count in (1_000_000, 300_000):
        yield changed("/inference/v1/generate", f"{count:,} ids", lambda n: {"token_ids": [97] * n}, count)
    params = {"prompt_logprobs": LIMITS.logprobs, "max_tokens": 1}
    yield changed(
        "/inference/v1/generate",
        "a prompt with as many alternatives as there may be",
        lambda: {"token_ids": [97] * MOST_TOKENS, "sampling_params": params},
    )


def _tokens() -> Iterator[Case]:
    for route in ("/tokenize", "/v1/tokenize"):
        for what, text in (
            ("8 MB of words", WORDS * (EIGHT_MB // len(WORDS))),
            ("8 MB of one word", "a" * EIGHT_MB),
            ("8 MB of spaces", " " * EIGHT_MB),
            ("names of control tokens", "<|im_start|>" * 600_000),
        ):
            for strings in (False, True):
                with_ = ", with strings" if strings else ""
                yield posted(
                    route, f"{what}{with_}", lambda t, s: {"prompt": t, "return_token_strs": s}, text, strings
                )
    for what, schema in (
        ("2,000 properties", {"properties": {f"p{n}": {"type": "string"} for n in range(2000)}}),
        ("300 options that overlap", {"oneOf": [{"minLength": n} for n in range(300)]}),
        ("500 objects deep", nested_schema(500)),
    ):
        yield changed("/v1/check_schema", what, lambda s: {"schema": s}, schema)
    for route in ("/detokenize", "/v1/detokenize"):
        for count in (1_000_000, 300_000):
            yield changed(route, f"{count:,} ids", lambda n: {"tokens": [97] * n}, count)
            yield changed(
                route, f"{count:,} ids that do not exist", lambda n: {"tokens": [2**31 - 1] * n}, count
            )


def _vectors() -> Iterator[Case]:
    many = LIMITS.prompts
    for what, value in (
        (f"{many} texts of 4,000 characters", [WORDS * 190] * many),
        (f"{many} lists of 1,200 ids", [[97] * 1200] * many),
        ("8 MB", "a" * EIGHT_MB),
        ("300,000 ids", [97] * 300_000),
        ("300,000 texts", ["a"] * 300_000),
    ):
        for coding in ("float", "base64"):
            yield changed(
                "/v1/embeddings",
                f"{what}, {coding}",
                lambda g, c: {"input": g, "encoding_format": c},
                value,
                coding,
            )
    for route, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        yield changed(route, "8 MB", lambda f: {f: "a" * EIGHT_MB}, field)
    yield changed("/api/embed", f"{many} texts of 4,000 characters", lambda: {"input": [WORDS * 190] * many})
    for route in ("/v1/rerank", "/rerank"):
        yield changed(
            route,
            f"{many - 1} documents",
            lambda: {"documents": [WORDS * 190 + f"{n}" for n in range(many - 1)]},
        )
        yield changed(route, "300,000 documents", lambda: {"documents": ["a"] * 300_000})
        yield changed(route, "a query of 8 MB", lambda: {"query": "a" * EIGHT_MB})
        yield changed(
            route,
            "documents told back",
            lambda: {"documents": [{"text": "a" * 30_000}] * 200, "return_documents": True},
        )
    for route in ("/v1/score", "/score"):
        yield changed(
            route,
            f"{many // 2} pairs",
            lambda: {
                "text_1": [WORDS * 190 + f"{n}" for n in range(many // 2)],
                "text_2": [f"{n}" for n in range(many // 2)],
            },
        )
        yield changed(route, "150,000 pairs", lambda: {"text_1": ["a"] * 150_000, "text_2": ["b"] * 150_000})
        yield changed(route, "8 MB", lambda: {"text_1": "a" * EIGHT_MB})


HARD = {
    "many calls": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
    "many beginnings": "<tool_call>\n",
    "brackets": "{",
    "quotation marks": '{"a": "',
    "thoughts": "<think>a</think>",
    "beginnings of markers": "<",
    "words": WORDS,
}
"""What a parser may find hard, once; as often as the text may have it."""


def _parsers() -> Iterator[Case]:
    some = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        }
    ]
    for route, field in (
        ("/parse/function_call", "tool_call_parser"),
        ("/parse_function_call", "tool_call_parser"),
        ("/parse/reasoning", "reasoning_parser"),
        ("/separate_reasoning", "reasoning_parser"),
    ):
        tools: dict[str, Any] = {"tools": some} if field == "tool_call_parser" else {}
        for what, piece in HARD.items():
            yield changed(
                route,
                f"as long a text as there may be, of {what}",
                lambda p, t: {"text": p * (LIMITS.parsed_chars // len(p)), **t},
                piece,
                tools,
            )
    for what, piece in HARD.items():
        yield changed(
            "/parse",
            f"as long a text as there may be, of {what}, in as many pieces",
            lambda p: {"text": p * (LIMITS.parsed_chars // len(p)), "chunk": 64, "return_grammar": True},
            piece,
        )
    yield changed("/parse", "a template of 1 MB", lambda: {"template": "{{ 'a' }}" * 110_000})
    yield changed("/parse", "as many ids as there may be", lambda: {"token_ids": [97] * LIMITS.parsed_chars})
    for what, tool_set in tool_sets():
        yield changed("/parse/function_call", what, lambda t: {"tools": t}, tool_set)
    for name in list_dialects():
        yield changed(
            "/parse/function_call",
            f"1 MB of calls, read as {name}",
            lambda n: {"text": HARD["many calls"] * 16_000, "tool_call_parser": n},
            name,
        )
