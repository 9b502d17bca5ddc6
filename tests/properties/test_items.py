"""The laws of a context of items: nothing in it is lost, and nothing in it can do harm."""

import contextlib
import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.api.responses import request as requests
from dragoman.api.responses.history import messages, pending_approvals
from dragoman.api.responses.items import KINDS, check_size, normalise, references
from dragoman.api.responses.tools import HOSTED, echo, offer_tools
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.responses.seal import Sealer
from dragoman.types import Message

pytestmark = pytest.mark.thorough

SEALER = Sealer(b"0" * 32)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer"])
# fmt: off
FIELDS = [
    "id", "call_id", "name", "namespace", "arguments", "input", "output", "content", "role", "summary",
    "status", "tools", "action", "approve", "reason", "encrypted_content", "server_label", "error", "queries",
    "approval_request_id", "result", "type", "text",
]
# fmt: on
PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "x"]), "text": words})


def typed(kinds: list[str], fields: list[str], inner: Any) -> Any:
    """Objects of known types, with known names in them, whose values are anything."""
    loose = st.dictionaries(st.sampled_from(fields), inner, max_size=8)
    return st.builds(lambda kind, item: {"type": kind, **item}, st.sampled_from(kinds), loose) | loose


wild_items = st.lists(
    typed([*KINDS, "configuration_update", "unknown"], FIELDS, values | st.lists(PART) | ROLES), max_size=5
)
wild_tools = st.lists(
    typed(
        ["function", "custom", "namespace", "mcp", "x", *HOSTED],
        ["name", "type", "parameters", "tools", "format", "server_label", "headers"],
        values,
    ),
    max_size=4,
)
wild_choices = values | typed(["function", "mcp", "allowed_tools"], ["name", "tools", "server_label"], values)

# Every text of these has a place in what the model is told.
ids = st.sampled_from("abc")
CALLED = [{"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"} for id_ in "abc"]
"""Before all others, so that every output has a call."""
named = {"name": st.just("f"), "call_id": ids, "server_label": st.just("l")}


def item(kind: str, **fields: Any) -> Any:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


def text_parts(kind: str) -> Any:
    return st.lists(st.fixed_dictionaries({"type": st.just(kind), "text": words}), min_size=1, max_size=3)


sound_items = st.lists(
    item("message", role=ROLES, content=words | text_parts("input_text"))
    | item("reasoning", summary=st.just([]), content=text_parts("reasoning_text"))
    | item("reasoning", summary=text_parts("summary_text"))
    | item("reasoning", encrypted_content=words.map(lambda text: SEALER.seal(text, "me")))
    | item("function_call", arguments=words.map(lambda text: json.dumps({"a": text})), **named)
    | item("function_call_output", call_id=ids, output=words | text_parts("input_text"))
    | item("custom_tool_call", input=words, **named)
    | item("custom_tool_call_output", call_id=ids, output=words)
    | item("mcp_call", arguments=st.just("{}"), output=words, **named)
    | item("mcp_call", arguments=st.just("{}"), error=words, **named)
    | item("shell_call", call_id=ids, action=st.fixed_dictionaries({"commands": st.lists(words)}))
    | item("web_search_call", action=st.fixed_dictionaries({"query": words}))
    | item("apply_patch_call_output", call_id=ids, output=words),
    max_size=8,
)


def new_ids() -> Any:
    numbers = count()
    return lambda prefix: f"{prefix}{next(numbers)}"


def told(items: list[dict[str, Any]]) -> tuple[Message, ...]:
    return messages(items, None, lambda sealed: SEALER.open(sealed, "me"), lambda space, name: name)


@given(sound_items)
def test_normal_items_are_normal(items: list[dict[str, Any]]) -> None:
    once = normalise(items, new_ids())
    assert normalise(once, lambda prefix: pytest.fail("everything has an id")) == once


def read_and_told(items: list[Any]) -> None:
    """All that is done with the items of a request before the engine hears of them."""
    request = requests.read(json.dumps({"input": items, "instructions": "x"}).encode(), Limits())
    normal = normalise(request.input, new_ids())
    check_size(normal, Limits())
    offer_tools(request.tools, Limits(), normal)
    if not references(normal):
        pending_approvals(normal)
        told(normal)


@settings(max_examples=300)
@given(wild_items)
def test_whatever_is_sent_is_read_or_refused(items: list[Any]) -> None:
    with contextlib.suppress(BadRequest):
        read_and_told(items)


@settings(max_examples=300)
@given(sound_items, st.integers(0, 7), st.sampled_from(FIELDS), values)
def test_one_wrong_value_is_read_or_refused(items: list[Any], at: int, field: str, value: Any) -> None:
    damaged = [{**one, field: value} if number == at else one for number, one in enumerate(items)]
    with contextlib.suppress(BadRequest):
        read_and_told([*CALLED, *damaged])


@settings(max_examples=200)
@given(wild_tools, wild_choices)
def test_whatever_tools_are_sent_are_read_or_refused(tools: list[dict[str, Any]], choice: Any) -> None:
    body = json.dumps({"input": "x", "tools": tools, "tool_choice": choice}).encode()
    try:
        request = requests.read(body, Limits())
        echo(request.tools)
        items = normalise(request.input, new_ids())
        requests.spec(
            request, items, offer_tools(request.tools, Limits()), first=True, unseal=lambda sealed: None
        )
    except BadRequest as error:
        assert error.param


def everything(message: Message) -> str:
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    texts += [text for call in message.tool_calls for text in json.loads(call.arguments).values()]
    return "\n".join([message.reasoning or "", *texts])


def said(one: dict[str, Any]) -> list[str]:
    """The texts of an item that are for the model."""
    if "encrypted_content" in one:
        return [SEALER.open(one["encrypted_content"], "me") or ""]
    if one["type"] == "function_call":
        return list(json.loads(one["arguments"]).values())
    action = one.get("action", {})
    items = [one.get(key) for key in ("input", "output", "error", "content", "summary")]
    items += [action.get("query"), *action.get("commands", [])]
    texts = [[part["text"] for part in each] if isinstance(each, list) else [each] for each in items]
    return [text for each in texts for text in each if text is not None]


@settings(max_examples=300)
@given(sound_items)
def test_nothing_is_lost(items: list[dict[str, Any]]) -> None:
    shown = told(normalise([*CALLED, *items], new_ids()))
    context = "\n".join(everything(message) for message in shown)
    assert all(text in context for one in items for text in said(one))


@given(words, words, words)
def test_a_seal_opens_for_its_owner_only(text: str, owner: str, other: str) -> None:
    sealed = SEALER.seal(text, owner)
    assert SEALER.open(sealed, owner) == text
    assert (SEALER.open(sealed, other) is None) == (other != owner)


@given(st.text() | words.map(lambda text: f"dgm1_{text}"))
def test_junk_is_no_seal(junk: str) -> None:
    assert SEALER.open(junk, "me") is None
