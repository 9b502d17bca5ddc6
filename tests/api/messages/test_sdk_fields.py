"""Every field in the SDK's types is honoured, refused by name, or known to have no effect."""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

pytest.importorskip("anthropic")

import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create
from msgspec.structs import fields

from dragoman.api.compat_fields import MESSAGES
from dragoman.api.messages import request as requests
from dragoman.api.messages.blocks import BLOCKS, REFUSED_BLOCKS, REFUSED_SOURCES, MessageParam
from dragoman.api.messages.request import TOOLS, MessagesRequest
from dragoman.errors import BadRequest
from tests.api.messages.asking import asked

REQUESTS = (
    message_create_params.MessageCreateParamsStreaming,
    beta_create.MessageCreateParamsStreaming,
    message_count_tokens_params.MessageCountTokensParams,
    beta_count.MessageCountTokensParams,
)
NESTED: dict[str, Any] = {
    "ServerParam": requests.ServerParam,
    "ToolConfigurationParam": requests.ServerToolConfig,
    "OutputConfigParam": requests.OutputConfig,
    "JSONOutputFormatParam": requests.OutputFormat,
    "ContextManagementConfigParam": requests.ContextManagementConfig,
    "CompactionConfigParam": requests.CompactionConfig,
    "UserMessageParam": MessageParam,
    "AssistantMessageParam": MessageParam,
    "SystemMessageParam": MessageParam,
    "MCPServerURLDefinitionParam": requests.ServerParam,
}


def is_dict(kind: Any) -> bool:
    return is_typeddict(kind) or typing_extensions.is_typeddict(kind)


def inside(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """Every TypedDict that a type speaks of."""
    if get_origin(kind) is not None:
        for each in get_args(kind):
            yield from inside(each, seen)
    elif is_dict(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        for each in get_type_hints(kind).values():
            yield from inside(each, seen)


def tag(kind: Any) -> str | None:
    """The `type` of a block or a tool, if it has one."""
    args = get_args(get_type_hints(kind).get("type"))
    return args[0] if args and isinstance(args[0], str) else None


KINDS = [*dict.fromkeys(kind for request in REQUESTS for kind in inside(request, set()))]


@pytest.mark.parametrize("request_type", REQUESTS)
def test_each_field_of_a_request_is_known(request_type: Any) -> None:
    known = {spec.encode_name for spec in fields(MessagesRequest)} | MESSAGES.refused.keys()
    assert get_type_hints(request_type).keys() - known == set()


def test_each_field_of_what_is_in_it_is_known() -> None:
    unknown = {}
    for kind in KINDS:
        name = kind.__name__.removeprefix("Beta").removeprefix("Request")
        block = (tag(kind) or "") if "Block" in name else ""
        own = NESTED.get(name) or (BLOCKS[block].decoder.type if block in BLOCKS else None)
        if own is None:
            continue
        known = {spec.encode_name for spec in fields(own)} | getattr(own, "echoed", frozenset())
        if missing := get_type_hints(kind).keys() - known:
            unknown[name] = missing
    assert unknown == {}


def list_blocks() -> list[str]:
    """The types of what may stand in the content of a message."""
    content = get_type_hints(beta_create.MessageCreateParamsStreaming)["messages"]
    texts = {tag(kind) for kind in inside(content, set()) if kind.__name__.endswith("BlockParam")}
    return sorted(kind for kind in texts if kind)


@pytest.mark.parametrize("kind", list_blocks())
def test_each_block_is_read_or_refused(kind: str) -> None:
    inner = ("_result", "_error", "_output", "web_fetch_result", "advisor")
    within = kind not in BLOCKS and kind not in REFUSED_BLOCKS
    assert not within or any(part in kind for part in inner), "It stands in a block that is refused."


def test_each_source_of_a_document_is_read_or_refused() -> None:
    sources = {tag(kind) for kind in KINDS if "Source" in kind.__name__ and "Fetch" not in kind.__name__}
    assert sources == {"text", "content", *REFUSED_SOURCES}


def test_each_tool_is_read_or_refused_by_name() -> None:
    tools = get_args(get_args(get_type_hints(beta_create.MessageCreateParamsStreaming)["tools"])[0])
    assert len(tools) > 10
    for kind in tools:
        name = tag(kind)
        if name is None:
            continue
        if name in TOOLS:
            known = {spec.encode_name for spec in fields(TOOLS[name].decoder.type)}
            assert get_type_hints(kind).keys() - known == set()
            continue
        with pytest.raises(BadRequest) as wrong:
            asked(tools=[{"type": name, "name": "x"}])
        assert wrong.value.param == "tools[0].type"


def test_each_edit_and_choice_is_known() -> None:
    """What these may say is said as one struct each, whatever their type."""
    structs: dict[str, Any] = {
        "Edit": requests.ContextEdit,
        "ToolChoice": requests.ToolChoice,
        "ThinkingConfig": requests.ThinkingConfig,
    }
    for kind in KINDS:
        own = next((one for part, one in structs.items() if part in kind.__name__), None)
        if own is None or "Editor" in kind.__name__:
            continue
        assert get_type_hints(kind).keys() - {spec.encode_name for spec in fields(own)} == set(), kind


def test_a_way_to_think_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as wrong:
        asked(thinking=json.loads('{"type": "between_tools"}'))
    assert wrong.value.param == "thinking.type"
