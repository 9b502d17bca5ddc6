"""The files in deploy/, and the programs that read them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def program(name: str, package: str) -> str:
    """The path of a program, or the test is skipped."""
    text = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if text is None:
        pytest.skip(f"{name.upper()} WAS NOT ASKED: it comes with Debian's package {package}")
    return text


def run(*command: str | Path) -> str:
    """What a program says of a file that it finds to be right."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text


def documents(*parts: str) -> list[dict[str, Any]]:
    """Those of a file of YAML."""
    return list(yaml.safe_load_all(DEPLOY.joinpath(*parts).read_text()))
