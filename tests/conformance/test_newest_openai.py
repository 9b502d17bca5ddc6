"""The newest `openai` and `openai-agents` go through the tests that the installed ones go through.

Other clients hold the environment of the tests to an older generation, so these two live in build/newest.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import NEWEST

HERE = Path(__file__).parent
FILES = (
    "test_responses_openai.py",
    "test_responses_state.py",
    "test_responses_websocket.py",
    "test_responses_mcp.py",
    "test_responses_reasoning.py",
    "test_agents.py",
)


def test_newest() -> None:
    if not (NEWEST / "openai").exists():
        pytest.skip("THE NEWEST OPENAI WAS NOT TESTED: it needs `make build/newest`")
    # One runner will do: what the client says and reads is the same with both.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "not llamacpp",
        *(str(HERE / name) for name in FILES),
    ]
    environment = {**os.environ, "PYTHONPATH": str(NEWEST)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
