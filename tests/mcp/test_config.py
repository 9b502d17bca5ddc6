"""The operator's file."""

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.errors import SettingsError
from dragoman.mcp import McpServerSpec
from dragoman.mcp.config import make_mcp_servers, read_config
from dragoman.settings import Settings
from tests.docs.support import blocks


def read(tmp_path: Path, content: Any, **environ: str) -> dict[str, McpServerSpec]:
    file = tmp_path / "servers.json"
    file.write_text(content if isinstance(content, str) else json.dumps({"mcpServers": content}))
    return read_config(str(file), environ)


def test_a_process(tmp_path: Path) -> None:
    entry = {"command": "npx", "args": ["-y", "files"], "env": {"KEY": "v"}, "cwd": "/tmp"}
    expected = McpServerSpec(
        label="files",
        command="npx",
        args=("-y", "files"),
        env={"KEY": "v"},
        cwd="/tmp",
        transport="stdio",
    )
    assert read(tmp_path, {"files": entry}) == {"files": expected}


@pytest.mark.parametrize(
    ("kind", "transport"),
    [(None, None), ("http", "http"), ("streamable-http", "http"), ("streamableHttp", "http"), ("sse", "sse")],
)
def test_an_address(tmp_path: Path, kind: str | None, transport: str | None) -> None:
    entry: dict[str, Any] = {"url": "https://example.com/mcp", "headers": {"X-Key": "k"}}
    spec = read(tmp_path, {"search": entry | ({"type": kind} if kind else {})})["search"]
    assert (spec.url, spec.headers, spec.transport) == (entry["url"], entry["headers"], transport)


def test_variables_of_the_environment(tmp_path: Path) -> None:
    servers = {
        "a": {"command": "${BIN:-run}", "args": ["--key=${KEY}"], "env": {"K": "x${KEY}y$KEY"}},
        "b": {"url": "https://${HOST}/mcp", "headers": {"Authorization": "Bearer ${KEY}"}},
    }
    fields = read(tmp_path, servers, KEY="1", HOST="example.com")
    assert (fields["a"].command, fields["a"].args, fields["a"].env) == ("run", ("--key=1",), {"K": "x1y$KEY"})
    assert (fields["b"].url, fields["b"].headers) == (
        "https://example.com/mcp",
        {"Authorization": "Bearer 1"},
    )


def test_a_server_that_is_switched_off(tmp_path: Path) -> None:
    assert read(tmp_path, {"off": {"command": "x", "disabled": True}}) == {}


def test_keys_of_other_programs(tmp_path: Path) -> None:
    assert read(tmp_path, '{"theme": "dark", "mcpServers": {}}') == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a valid file of MCP servers"),
        ("[]", "is not a valid file of MCP servers"),
        ("{}", "mcpServers"),
        ({"a": {}}, "mcpServers.a in .*: either `command` or `url`"),
        ({"a": {"command": "x", "url": "https://example.com"}}, "either `command` or `url`"),
        ({"a": {"command": "x", "headers": {"K": "v"}}}, "has no `headers`"),
        ({"a": {"command": "x", "type": "sse"}}, "is of type stdio"),
        ({"a": {"url": "https://example.com", "args": ["x"]}}, "has no `args`"),
        ({"a": {"url": "https://example.com", "type": "stdio"}}, "not of type stdio"),
        ({"a": {"url": "ftp://example.com"}}, "`url` must be http"),
        ({"a": {"url": "https://example.com", "headers": {"Host": "x"}}}, "name that may not be sent"),
        ({"a": {"url": "https://example.com", "type": "websocket"}}, "mcpServers.a in .*Invalid enum"),
        ({"a": {"comand": "x"}}, "mcpServers.a in .*unknown field `comand`"),
        ({"a": {"command": 5}}, "Expected `str.*command"),
        ({"a": {"command": "${MISSING}"}}, "mcpServers.a in .*: the variable MISSING is not set"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read(tmp_path, content)
    assert caught.value.message.startswith("`mcp_config`: ")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_config("/no/such/file", {})


def test_settings_say_which_servers_there_are(tmp_path: Path) -> None:
    read(tmp_path, {"files": {"command": "x"}})
    settings = Settings(mcp_config=str(tmp_path / "servers.json"), mcp_allow=["example.com"])
    servers = make_mcp_servers(settings)
    assert servers.configured() == ["files"]
    assert servers.resolve("any", "https://example.com/").url == "https://example.com/"
    assert make_mcp_servers(Settings()).configured() == []


def test_the_file_of_the_documentation(tmp_path: Path) -> None:
    (example,) = blocks("docs/mcp.md", "json")
    fields = read(tmp_path, example)
    assert fields["search"].headers == {"Authorization": "Bearer none"}
    assert fields["files"].args[1] == "@modelcontextprotocol/server-filesystem"
