"""Programs of other people, which `make test` fetches into build/ as far as it can."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parent.parent.parent / "build"
NODE = BUILD / "node"
NEWEST = BUILD / "newest"


def node_program(name: str) -> str:
    """The path of a command of a Node.js package, or the test is skipped."""
    text = shutil.which(name, path=str(NODE / "node_modules" / ".bin"))
    if text is None or shutil.which("node") is None:
        pytest.skip(f"{name.upper()} WAS NOT TESTED: it needs Node.js and `make build/node`")
    return text


def run_module(source: Path, *arguments: str) -> str:
    """What a JavaScript module prints, run where it finds the packages of build/node."""
    if shutil.which("node") is None or not (NODE / "node_modules").exists():
        pytest.skip(f"{source.name.upper()} WAS NOT RUN: it needs Node.js and `make build/node`")
    command = ["node", "--input-type=module", "-", *arguments]
    done = subprocess.run(
        command, input=source.read_text(), cwd=NODE, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def bare_environment(home: Path, **more: str) -> dict[str, str]:
    """An environment in which a program finds nothing of the person who runs the tests."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), **more}
