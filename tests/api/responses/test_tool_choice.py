from typing import Any

import pytest

from dragoman.api.responses.request import check_choice, read_calling
from dragoman.api.responses.tools import ModelTools, offer_tools
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import ToolCallPolicy
from tests.api.responses.listed import listed_tool

F: dict[str, Any] = {"type": "function", "name": "f"}
C: dict[str, Any] = {"type": "custom", "name": "c"}
SPACE = {"type": "namespace", "name": "n", "description": "", "tools": [F]}
MCP: dict[str, Any] = {"type": "mcp", "server_label": "files"}
BEFORE = offer_tools([F, {**F, "name": "g"}, C, SPACE, MCP], Limits())
OFFER = BEFORE.with_mcp("files", [listed_tool("read"), listed_tool("write")])


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "calling"),
    [
        ("none", None),
        ("required", ToolCallPolicy(required=True)),
        (F, ToolCallPolicy(required=True, named=True, names=("f",))),
        (C, ToolCallPolicy(required=True, named=True, names=("c",))),
        ({**F, "namespace": "n"}, ToolCallPolicy(required=True, named=True, names=("n__f",))),
        (MCP, ToolCallPolicy(required=True, names=("read", "write"))),
        ({**MCP, "name": "read"}, ToolCallPolicy(required=True, named=True, names=("read",))),
        (allowed("auto", F, MCP), ToolCallPolicy(names=("f", "read", "write"))),
        (allowed("required", {**MCP, "name": "read"}), ToolCallPolicy(required=True, names=("read",))),
    ],
)
def test_what_is_asked_in_the_first_round(choice: Any, calling: ToolCallPolicy | None) -> None:
    assert read_calling(choice, OFFER, first=True) == calling


@pytest.mark.parametrize(
    ("choice", "calling"),
    [
        ("required", None),
        (F, None),
        (allowed("auto", F), ToolCallPolicy(names=("f",))),
        (allowed("required", F), ToolCallPolicy(names=("f",))),
        (MCP, ToolCallPolicy(names=("read", "write"))),
    ],
)
def test_later_rounds_require_no_call(choice: Any, calling: ToolCallPolicy | None) -> None:
    offer = offer_tools([F, MCP], Limits()).with_mcp("files", [listed_tool("read"), listed_tool("write")])
    assert read_calling(choice, offer, first=False) == calling


def test_a_strict_tool_is_strict_in_every_round() -> None:
    offer = offer_tools([{**F, "strict": True}], Limits())
    assert read_calling("required", offer, first=False) == ToolCallPolicy(param="tools[0].strict")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "teleport"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "name": "lost"}, "tool_choice"),
        ({**F, "namespace": ["n"]}, "tool_choice.namespace"),
        ({**F, "namespace": "other"}, "tool_choice"),
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "mcp", "server_label": "other"}, "tool_choice.server_label"),
        (allowed("auto", {"type": "shell"}), "tool_choice.tools[0]"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("never", F), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "tools": [3]}, "tool_choice.allowed_tools.tools[0]"),
        (allowed("auto", *[F] * 513), "tool_choice.tools"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused_before_any_work(choice: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_choice(choice, BEFORE, Limits())
    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["required", MCP, {**MCP, "name": "read"}, allowed("required", MCP)])
def test_tools_that_a_server_has_yet_to_list_may_be_asked_for(choice: Any) -> None:
    check_choice(choice, offer_tools([MCP], Limits()), Limits())


def test_a_server_that_has_no_such_tool_cannot_be_asked_for_it() -> None:
    with pytest.raises(BadRequest):
        read_calling({**MCP, "name": "delete"}, OFFER, first=True)


def test_nothing_can_be_required_where_all_tools_are_hidden() -> None:
    offer: ModelTools = offer_tools([{"type": "web_search"}], Limits())
    with pytest.raises(BadRequest) as caught:
        check_choice("required", offer, Limits())
    assert caught.value.param == "tool_choice"
