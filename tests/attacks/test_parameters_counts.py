"""More of something than a request may have. It is refused before anything is done with it."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct

from tests.attacks.bodies import CHATTING, GENERATING, VECTORS, changed
from tests.attacks.frame import Frame

MEMORY_MB = 96
"""Bodies that are kept, in case that they go on; and gaps that many small values leave behind, which the next
ones fill."""
MANY = 100_000
FEWER = 30_000
"""Within what the JSON of a body may hold."""
BOTH = ("/v1/chat/completions", "/v1/completions")
CHAT = ("/v1/chat/completions",)
COMPLETIONS = ("/v1/completions",)
PROMPTS = ("/v1/completions", "/v1/completions/render")
RESPONSES = tuple(route for route in CHATTING if "responses" in route)
LONG_TEXT = "a" * (9 * 1024 * 1024)


class Attack(Struct, frozen=True):
    routes: Sequence[str]
    place: str
    value: Any
    param: str = ""
    """The field that is to be named, where it is not that of the place."""


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}"}}


def flat_tool(number: int) -> dict[str, Any]:
    return {"type": "function", "name": f"f{number}", "parameters": {}}


WIDE = {"properties": {f"p{number}": {"type": "string"} for number in range(15_000)}}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": WIDE}}
MESSAGE = {"role": "user", "content": "a"}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


ATTACKS: dict[str, Attack] = {
    "answers": Attack(BOTH, "n", 10**9),
    "answers over the limit": Attack(BOTH, "n", 257),
    "best of": Attack(COMPLETIONS, "best_of", 10**6, "n"),
    "prompts": Attack(PROMPTS, "prompt", ["a"] * MANY),
    "prompts of ids": Attack(PROMPTS, "prompt", [[1]] * FEWER),
    "empty prompts": Attack(PROMPTS, "prompt", [[]] * FEWER),
    "a long prompt": Attack((*PROMPTS, "/tokenize"), "prompt", LONG_TEXT),
    "ids of a prompt": Attack(COMPLETIONS, "prompt", [1] * MANY),
    "ids of a chat": Attack(CHAT, "prompt_token_ids", [1] * MANY),
    "other ids of a chat": Attack(CHAT, "input_ids", [1] * MANY),
    "a suffix": Attack(PROMPTS, "suffix", LONG_TEXT, "prompt"),
    "messages": Attack(CHAT, "messages", [MESSAGE] * FEWER),
    "a long message": Attack(CHAT, "messages[0].content", LONG_TEXT, "messages"),
    "a long name": Attack(CHAT, "messages[0].name", LONG_TEXT[: 2**20]),
    "long reasoning": Attack(CHAT, "messages[0].reasoning_content", LONG_TEXT, "messages"),
    "a long prefix": Attack(CHAT, "response_prefix", LONG_TEXT, "messages"),
    "long documents": Attack(CHAT, "documents", [{"text": LONG_TEXT}], "messages"),
    "items": Attack(RESPONSES, "input", [MESSAGE] * FEWER),
    "a long item": Attack(RESPONSES, "input", LONG_TEXT),
    "long instructions": Attack(RESPONSES, "instructions", LONG_TEXT, "input"),
    "inputs": Attack(VECTORS[:1], "input", ["a"] * MANY),
    "a long input": Attack(VECTORS[:1], "input", LONG_TEXT),
    "long inputs": Attack(VECTORS[:1], "input", ["a" * 100_000] * 90),
    "documents to rank": Attack(VECTORS[1:3], "documents", ["a"] * MANY),
    "texts to score": Attack(VECTORS[3:], "text_2", ["a"] * MANY),
    "a long query": Attack(VECTORS[1:3], "query", LONG_TEXT, "documents"),
    "a long text to parse": Attack(("/parse/function_call", "/separate_reasoning"), "text", LONG_TEXT),
    "tools to parse with": Attack(("/parse_function_call",), "tools", [tool(n) for n in range(10_000)]),
    "alternatives": Attack(RESPONSES, "top_logprobs", 21),
    "very many alternatives": Attack(CHATTING, "top_logprobs", 10**6),
    "alternatives of a completion": Attack(COMPLETIONS, "logprobs", 21),
    "alternatives of a prompt": Attack(BOTH, "prompt_logprobs", 10**6),
    "stop strings": Attack(GENERATING, "stop", [str(n) for n in range(MANY)]),
    "a long stop string": Attack(GENERATING, "stop", "a" * 1024 * 1024),
    "an empty stop string": Attack(GENERATING, "stop", [""]),
    "stop ids": Attack(GENERATING, "stop_token_ids", list(range(MANY)), "stop"),
    "biases": Attack(GENERATING, "logit_bias", {str(n): 1 for n in range(FEWER)}),
    "bad words": Attack(GENERATING, "bad_words", ["a"] * MANY),
    "a long bad word": Attack(GENERATING, "bad_words", ["a" * 1024 * 1024]),
    "allowed ids": Attack(GENERATING, "allowed_token_ids", [1] * MANY),
    "more least than most": Attack(BOTH, "min_tokens", 100),
    "tools": Attack(CHAT, "tools", [tool(n) for n in range(10_000)]),
    "functions": Attack(CHAT, "functions", [tool(n)["function"] for n in range(10_000)]),
    "flat tools": Attack(RESPONSES, "tools", [flat_tool(n) for n in range(10_000)]),
    "a wide schema": Attack(BOTH, "response_format", NAMED),
    "a wide schema of a response": Attack(
        RESPONSES, "text", {"format": {"type": "json_schema", "name": "a", "schema": WIDE}}
    ),
    "the name of a schema": Attack(BOTH, "response_format", {**NAMED, "json_schema": {"name": LONG_TEXT}}),
    "the name of a schema of a response": Attack(
        RESPONSES, "text", {"format": {"type": "json_schema", "name": LONG_TEXT, "schema": {}}}
    ),
    "what is said of a hosted tool": Attack(
        ("/v1/responses",), "tools", [{"type": "web_search", "filters": LONG_TEXT}]
    ),
    "another wide schema": Attack(GENERATING, "guided_json", WIDE),
    "a long expression": Attack(GENERATING, "guided_regex", "a" * MANY),
    "a long grammar": Attack(GENERATING, "grammar", 'root ::= "' + "a" * MANY + '"'),
    "a long Lark grammar": Attack(GENERATING, "guided_grammar", 'start: "' + "a" * MANY + '"'),
    "choices": Attack(GENERATING, "guided_choice", [str(n) for n in range(MANY)]),
    "variables": Attack(CHATTING, "chat_template_kwargs", {"a": "a" * MANY}),
    "other variables": Attack(CHATTING, "template_vars", {"a": "a" * MANY}, "chat_template_kwargs"),
    "includes": Attack(RESPONSES, "include", ["reasoning.encrypted_content"] * MANY),
    "a salt": Attack(GENERATING, "cache_salt", LONG_TEXT[: 2**20]),
    "a model": Attack(GENERATING, "model", LONG_TEXT[: 2**20]),
    "metadata": Attack(CHATTING, "metadata", {str(n): "a" for n in range(FEWER)}),
    "rewards": Attack(("/v1/trajectories/{id}",), "rewards", {str(n): 1.0 for n in range(FEWER)}),
    "items of a conversation": Attack(("/v1/conversations",), "items", [MESSAGE] * FEWER),
    "lists": Attack(CHATTING, "metadata", [[]] * MANY, "The JSON of the body"),
    "members": Attack(CHATTING, "metadata", {str(n): "a" for n in range(MANY)}, "The JSON of the body"),
    "members of arguments": Attack(
        CHAT, "messages", [calling("{" + '"a":[],' * MANY + '"a":1}'), MESSAGE], "messages"
    ),
    "ids to decode": Attack(("/detokenize",), "tokens", [1] * (1024 * 1024), "The JSON of the body"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_too_much_is_refused(frame: Frame, name: str) -> None:
    attack = ATTACKS[name]
    for route in attack.routes:
        error = frame.refused(route, changed(route, attack.place, attack.value), status=(400, 413))
        named = (error["param"] or error["message"]).removeprefix("'")
        assert named.startswith(attack.param or attack.place.partition("[")[0]), (route, error)
