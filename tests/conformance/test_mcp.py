"""The client scenarios of the official MCP conformance suite, which runs under node and is fetched by npx.

Left out are those for what this client does not do: OAuth (a server is given a token; nobody is there to log
in), questions to a person in the middle of a call, and skills.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
# The suite needs a newer node than many machines have.
NPX = ["npx", "--yes", "-p", "node@22", "-p", SUITE, "-c"]
CLIENT = Path(__file__).parent / "mcp_client.py"
SCENARIOS = (
    "initialize",
    "tools_call",
    "sse-retry",
    "request-metadata",
    "http-standard-headers",
    "http-custom-headers",
    "http-invalid-tool-headers",
    "json-schema-ref-no-deref",
    "json-schema-2020-12-preservation",
)
ABOUT_TIME = "client-sse-retry-timing"
"""Says more of the machine than of the client."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite's findings, a folder for each scenario; all run at once."""
    if shutil.which("npx") is None:
        pytest.skip("MCP CONFORMANCE WAS NOT TESTED: npx is missing")
    fetched = subprocess.run([*NPX, "conformance --version"], capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"MCP CONFORMANCE WAS NOT TESTED: npx cannot fetch the suite: {fetched.stderr[-300:]}")
    folder = tmp_path_factory.mktemp("conformance")
    command = f"conformance client --timeout 120000 --command '{sys.executable} {CLIENT}'"
    runs = [f"{command} -o {folder / one} --scenario {one} &" for one in SCENARIOS]
    subprocess.run([*NPX, f"{' '.join(runs)} wait"], capture_output=True, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_client_scenario(scenario: str, results: Path) -> None:
    (path,) = results.joinpath(scenario).glob("*/checks.json")
    checks: list[dict[str, Any]] = json.loads(path.read_text())
    counted = [check for check in checks if check["id"] != ABOUT_TIME]
    assert [check for check in counted if check["status"] == "FAILURE"] == []
    assert any(check["status"] == "SUCCESS" for check in counted)
