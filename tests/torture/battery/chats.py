"""Conversations, tools and constraints, for the routes that render a chat."""

from collections.abc import Iterator
from typing import Any

from tests.torture.battery.case import (
    LIMITS,
    MOST_BYTES,
    MOST_NAMES,
    MOST_PARTS,
    MOST_TOKENS,
    Case,
    changed,
)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
OTHERS = (f"{CHAT}/render", f"{CHAT}/input_tokens", "/v1/tokenize")


def cases() -> Iterator[Case]:
    for route in (CHAT, *OTHERS, "/api/chat"):
        yield from _contents(route)
        yield from _calls(route)
    for route in (MESSAGES, f"{MESSAGES}/count_tokens"):
        yield from _contents(route)
        yield from _blocks(route)
    yield changed("/api/generate", "8 MB", lambda: {"prompt": "a b" * 2_700_000})
    yield changed("/api/generate", "300,000 ids", lambda: {"context": [97] * 300_000})
    for route in ("/api/show", "/api/pull", "/api/create", "/api/copy"):
        yield changed(route, "a name of 8 MB", lambda: {"model": "a" * 8_000_000})
    yield from _tools(CHAT)
    yield from _constraints(CHAT)
    yield from _sampling(CHAT)


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _contents(route: str) -> Iterator[Case]:
    for parts in (MOST_PARTS, 2 * MOST_PARTS, 300_000):
        yield changed(
            route,
            f"{parts:,} parts of one message",
            lambda n: {"messages": [_user([_text("a")] * n)]},
            parts,
        )
        yield changed(
            route,
            f"{parts:,} parts of 1,000 messages",
            lambda n: {"messages": [_user([_text("a")] * (n // 1000))] * 1000},
            parts,
        )
    yield changed(
        route, f"{LIMITS.messages} messages", lambda: {"messages": [_user("a" * 2000)] * LIMITS.messages}
    )
    yield changed(
        route, f"{LIMITS.messages + 1} messages", lambda: {"messages": [_user("a")] * (LIMITS.messages + 1)}
    )
    for what, character in (("", "a"), (" of 4 bytes", "\U0001f600"), (" that are newlines", "\n")):
        most = min(LIMITS.content_chars - 1, MOST_BYTES // len(repr(character)[1:-1].encode()))
        yield changed(
            route,
            f"{most:,} characters{what}",
            lambda c, n: {"messages": [_user(c * n)]},
            character,
            most,
        )
    yield changed(route, "4 MB of words", lambda: {"messages": [_user("the quick brown fox. " * 200_000)]})
    yield changed(
        route,
        "names of control tokens",
        lambda: {"messages": [_user("<|im_start|>" * (LIMITS.content_chars // 12))]},
    )


def _calls(route: str) -> Iterator[Case]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields = {"role": "assistant", "content": None}
    for count in (120_000, MOST_NAMES // 5, 5_000):
        yield changed(
            route,
            f"{count:,} calls of one message",
            lambda n: {"messages": [_user("hi"), {**fields, "tool_calls": [call] * n}]},
            count,
        )
    wide = {f"{at}": 1 for at in range(MOST_NAMES - 100)}
    deep: Any = 1
    for _ in range(100):
        deep = {"a": deep}
    for what, arguments in (
        ("as many names as there may be", wide),
        ("8 MB of text", {"a": "a" * (8 << 20)}),
        ("JSON of 8 MB as text", '{"a":"' + "a" * (8 << 20) + '"}'),
        ("JSON of 300,000 numbers as text", '{"a":[' + "0," * 300_000 + "0]}"),
        ("100 levels", deep),
    ):
        one = {**call, "function": {"name": "f", "arguments": arguments}}
        yield changed(
            route,
            f"arguments of a call: {what}",
            lambda c: {"messages": [_user("hi"), {**fields, "tool_calls": [c]}]},
            one,
        )
    yield changed(
        route,
        "4,000 calls and their results",
        lambda: {
            "messages": [
                _user("hi"),
                *(
                    one
                    for at in range(2000)
                    for one in (
                        {**fields, "tool_calls": [{**call, "id": f"c{at}"}]},
                        {"role": "tool", "tool_call_id": f"c{at}", "content": "a" * 1000},
                    )
                ),
            ]
        },
    )
    yield changed(
        route,
        "8 MB of reasoning",
        lambda: {"messages": [_user("a"), {**fields, "reasoning": "a" * (8 << 20)}]},
    )


def _blocks(route: str) -> Iterator[Case]:
    """Blocks of Messages, and what is to be left out of them."""
    call = {"type": "tool_use", "name": "f", "input": {}}
    result = {"type": "tool_result", "content": [_text("a")]}
    edits = [
        {"type": "clear_thinking_20251015"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}},
        {"type": "compact_20260112"},
    ]

    def talk(turns: int, size: int) -> list[dict[str, Any]]:
        thought = {"type": "thinking", "thinking": "a" * size, "signature": "dgm1_" + "a" * 64}
        return [
            _user("hi"),
            *(
                one
                for at in range(turns)
                for one in (
                    {"role": "assistant", "content": [thought, {**call, "id": f"c{at}"}]},
                    _user([{**result, "tool_use_id": f"c{at}"}]),
                )
            ),
        ]

    for turns, size in ((2_000, 1_000), (20, 300_000)):
        yield changed(
            route,
            f"{turns:,} calls with {size:,} characters of thinking, cleared",
            lambda n, s: {"messages": talk(n, s), "context_management": {"edits": edits}},
            turns,
            size,
        )
    for count in (120_000, 5_000):
        many = [{**call, "id": f"c{at}"} for at in range(count)]
        rows = [{**result, "tool_use_id": f"c{at}"} for at in range(count)]
        yield changed(
            route,
            f"{count:,} calls of one message and their results",
            lambda m, g: {"messages": [_user("hi"), {"role": "assistant", "content": m}, _user(g)]},
            many,
            rows,
        )
    document = {"type": "document", "source": {"type": "text", "data": "a b " * 2_000_000}}
    yield changed(route, "a document of 8 MB", lambda d: {"messages": [_user([d])]}, document)
    sealed = {"type": "thinking", "thinking": "", "signature": "dgm1_" + "a" * (8 << 20)}
    yield changed(
        route,
        "a signature of 8 MB",
        lambda s: {"messages": [_user("a"), {"role": "assistant", "content": [s]}, _user("b")]},
        sealed,
    )


def _function(name: str, **parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": parameters}},
    }


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool_sets() -> Iterator[tuple[str, Any]]:
    """As many, as large and as deep as tools may be."""
    string = {"type": "string"}
    yield f"{LIMITS.tools} tools", [_function(f"f{at}", a=string) for at in range(LIMITS.tools)]
    yield f"{LIMITS.tools + 1} tools", [_function(f"f{at}") for at in range(LIMITS.tools + 1)]
    yield (
        f"{LIMITS.tools} tools of 2,000 bytes",
        [_function(f"f{at}", **{f"p{n}": string for n in range(70)}) for at in range(LIMITS.tools)],
    )
    yield (
        f"{LIMITS.tools} names of 256 characters",
        [_function(f"{at:03}" + "f" * 253) for at in range(LIMITS.tools)],
    )
    yield "one tool with 25,000 parameters", [_function("f", **{f"p{n}": string for n in range(25_000)})]
    yield "one tool with 9,000 parameters", [_function("f", **{f"p{n}": string for n in range(9_000)})]
    yield (
        "one tool with a choice of 60,000 words",
        [_function("f", a={"enum": [f"word{n}" for n in range(60_000)]})],
    )
    yield (
        "one tool with a choice of 20,000 words",
        [_function("f", a={"enum": [f"word{n}" for n in range(20_000)]})],
    )
    yield "one tool of 60 levels", [_function("f", a=_deep(29))]
    yield "one tool of 16 MB", [_function("f", a={"type": "string", "description": "a" * (15 << 20)})]
    yield "400,000 tools", [{"type": "function", "function": {}}] * 300_000


def _tools(route: str) -> Iterator[Case]:
    for what, tools in tool_sets():
        for choice in ("auto", "required"):
            yield changed(
                route, f"{what}, {choice}", lambda t, c: {"tools": t, "tool_choice": c}, tools, choice
            )


def schemas() -> Iterator[tuple[str, Any]]:
    string = {"type": "string"}
    yield "7,000 properties", {"type": "object", "properties": {f"p{n}": string for n in range(7_000)}}
    yield (
        "5,000 required properties",
        {
            "type": "object",
            "properties": {f"p{n}": string for n in range(5_000)},
            "required": [f"p{n}" for n in range(5_000)],
            "additionalProperties": False,
        },
    )
    yield "a choice of 18,000 words", {"enum": [f"word{n}" for n in range(18_000)]}
    yield "a choice of 7,000 schemas", {"anyOf": [{"const": f"word{n}"} for n in range(7_000)]}
    yield "5,000 schemas at once", {"allOf": [{"minLength": n} for n in range(5_000)]}
    yield (
        "4,000 definitions",
        {
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(4_000)} | {"d4000": string},
            "$ref": "#/$defs/d0",
        },
    )
    yield "60 levels", _deep(29)
    yield "a pattern of 8,000 characters", {"type": "string", "pattern": "(a|b)" * 1600}
    yield "patterns that count", {"type": "string", "pattern": "^(a{1,1000}b{1,1000}){1,100}$"}
    yield "text of 250,000 characters", {"const": "a" * 250_000}
    yield (
        "lists of up to 10,000",
        {"type": "array", "items": {"type": "array", "maxItems": 9_999, "items": string}, "maxItems": 9_999},
    )
    yield "16 MB of description", {"type": "string", "description": "a" * (15 << 20)}


def _constraints(route: str) -> Iterator[Case]:
    for what, schema in schemas():
        yield changed(
            route,
            f"schema: {what}",
            lambda s: {"response_format": {"type": "json_schema", "json_schema": {"schema": s}}},
            schema,
        )
    for what, field, value in (
        ("8,192 characters of alternatives", "guided_regex", "|".join(["abc"] * 2048)),
        ("nested repeats", "guided_regex", "((a{1,50}){1,50}){1,50}"),
        ("classes", "guided_regex", r"[\w\d\s]{1,2000}"),
        ("rules", "guided_grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(3500))),
        ("alternatives", "guided_grammar", "root ::= " + " | ".join(f'"w{n}"' for n in range(6000))),
        ("one literal", "guided_grammar", 'root ::= "' + "a" * 60_000 + '"'),
        ("long choices", "guided_choice", [f"{n:05}" + "a" * 3500 for n in range(4096)]),
        ("many choices", "guided_choice", [f"{n:05}" for n in range(4096)]),
        ("too many choices", "guided_choice", ["a"] * 1_000_000),
    ):
        yield changed(route, f"{field}: {what}", lambda f, v: {f: v}, field, value)


def _sampling(route: str) -> Iterator[Case]:
    yield changed(
        route,
        f"{LIMITS.stops} stops of {LIMITS.stop_chars} characters and a long answer",
        lambda: {
            "messages": [_user("ab" * 50_000)],
            "max_tokens": 100_000,
            "stop": ["ab" * 500 + f"{n}" for n in range(LIMITS.stops)],
        },
    )
    yield changed(
        route,
        "a long answer",
        lambda: {"messages": [_user("ab" * 100_000)], "max_tokens": 200_000},
    )
    yield changed(
        route,
        "a long answer with everything said of it",
        lambda: {
            "messages": [_user("ab" * (MOST_TOKENS // 2))],
            "max_tokens": MOST_TOKENS,
            "logprobs": True,
            "top_logprobs": LIMITS.logprobs,
            "return_token_ids": True,
        },
    )
    yield changed(route, f"n: {LIMITS.choices}", lambda: {"n": LIMITS.choices, "max_tokens": 64})
    yield changed(
        route,
        f"n: {LIMITS.choices} of 100,000 ids",
        lambda: {"n": LIMITS.choices, "input_ids": [97] * 100_000, "messages": None},
    )
    for count in (1_000_000, 300_000):
        yield changed(route, f"{count:,} ids", lambda n: {"input_ids": [97] * n, "messages": None}, count)
    yield changed(
        route, "every logit biased", lambda: {"logit_bias": {f"{n}": 1 for n in range(256)}, "max_tokens": 64}
    )
    yield changed(
        route, "bad words", lambda: {"bad_words": ["ab" * 1000 + f"{n}" for n in range(LIMITS.bad_words)]}
    )
    yield changed(
        route, "allowed ids", lambda: {"allowed_token_ids": [*range(256)] * (LIMITS.token_ids // 256)}
    )
    yield changed(
        route, "template kwargs", lambda: {"chat_template_kwargs": {f"k{n}": "a" for n in range(5000)}}
    )
    yield changed(route, "8 MB of documents", lambda: {"documents": [{"text": "a" * 1000}] * 8000})
    for count in (300_000, MOST_NAMES):
        yield changed(route, f"{count:,} documents", lambda n: {"documents": [{"text": "a"}] * n}, count)
