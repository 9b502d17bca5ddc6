"""Servers made with the SDK, over each of the transports."""

import asyncio

import pytest

from dragoman.mcp import McpServerSpec, McpSession
from tests.mcp.support import RawServer, process, with_session

EVERY = ("stdio", "http", "sse")


@pytest.fixture(params=EVERY)
def spec(request: pytest.FixtureRequest) -> McpServerSpec:
    """The transport of an address is not said: it has to be found."""
    if request.param == "stdio":
        return process("tools.py", "stdio")
    return McpServerSpec(label=request.param, url=request.getfixturevalue(f"{request.param}_url"))


def test_tools_are_listed_and_called(spec: McpServerSpec) -> None:
    async def use(session: McpSession) -> None:
        add, *_ = await session.list_tools()
        assert (add.name, add.description, add.read_only) == ("add", "Add two numbers.", True)
        assert set(add.input_schema["properties"]) == {"a", "b"}
        assert add.annotations == {"readOnlyHint": True}
        sums = await asyncio.gather(*(session.call("add", {"a": one, "b": 1}) for one in range(20)))
        assert [one.text for one in sums] == [str(one + 1) for one in range(20)]

    with_session(spec, use)


@pytest.mark.parametrize("kind", ["http", "sse"])
def test_a_transport_may_be_named(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    spec = McpServerSpec(label=kind, url=url, transport="sse" if kind == "sse" else "http")
    assert with_session(spec, lambda session: session.call("add", {"a": 2, "b": 2})).text == "4"


def test_a_tool_that_fails_is_not_a_failure(http_url: str) -> None:
    spec = McpServerSpec(label="good", url=http_url)
    result = with_session(spec, lambda session: session.call("fail", {}))
    assert (result.text, result.is_error) == ("it cannot be done", True)


def test_parts_that_are_not_text_are_described(http_url: str) -> None:
    spec = McpServerSpec(label="good", url=http_url)
    assert with_session(spec, lambda session: session.call("parts", {})).text.splitlines() == [
        "first",
        "[image image/png, 2 KiB]",
        "[audio audio/wav, 2 KiB]",
        "[resource page: https://example.com/page]",
        "inside",
        "[resource file:///b, 2 KiB]",
    ]


def test_structured_content_stands_in_for_text(http_url: str) -> None:
    spec = McpServerSpec(label="good", url=http_url)
    assert with_session(spec, lambda session: session.call("structured", {})).text == '{"degrees":21}'


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_older_revisions(revision: str, raw: RawServer, raw_spec: McpServerSpec) -> None:
    raw.revision = revision
    assert with_session(raw_spec, lambda session: session.call("say", {})).text == "say was called"
    assert "initialize" in raw.asked
    assert raw.headers[-1]["mcp-protocol-version"] == revision
