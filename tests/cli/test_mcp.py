import json
import sys
from pathlib import Path

import pytest

from dragoman.cli import main
from tests.mcp.support import SERVERS

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    good = {"command": sys.executable, "args": [str(SERVERS / "raw.py")]}
    servers = {"good": good, "nobody": {"url": "http://127.0.0.1:1/mcp"}}
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return str(file)


def test_servers_with_their_tools_or_what_is_wrong(capfd: Capture, config: str) -> None:
    assert main(["mcp", "list", "--mcp-config", config]) == 1
    good, nobody = capfd.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in good.splitlines()] == ["good", "tool", "say"]
    assert nobody.splitlines() == ["nobody", "The MCP server nobody could not be reached."]


def test_json(capfd: Capture, config: str) -> None:
    assert main(["mcp", "list", "--json", "--mcp-config", config]) == 1
    result = json.loads(capfd.readouterr().out)
    assert [tool["name"] for tool in result["good"]["tools"]] == ["say"]
    assert result["nobody"] == {"error": "The MCP server nobody could not be reached."}


def test_without_servers(capfd: Capture) -> None:
    assert main(["mcp", "list"]) == 2
    assert "No MCP server is configured." in capfd.readouterr().err
