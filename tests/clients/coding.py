"""Coding agents are commands. Each is asked for a word, and told to write a file, by its shell."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.clients import cases
from tests.docs.support import blocks


class Done(NamedTuple):
    said: str
    why: str
    """The end of what it said of itself."""
    written: str


Ask: TypeAlias = Callable[[str], Done]


def run(name: str, *words: str, folder: str, **environment: str) -> Done:
    """A command of the client, in a folder that it may write to."""
    done = subprocess.run(
        [str(Path(os.environ["CLIENT_BIN"], name)), *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    out = Path(folder, "out.txt")
    return Done(done.stdout, done.stderr[-300:], out.read_text() if out.exists() else "")


def from_page(name: str, language: str, url: str) -> str:
    """The configuration that a client's page tells its readers, for this server."""
    [text] = blocks(f"docs/clients/{name}.md", language)
    return localised(text, url)


def variables_from_page(name: str, url: str) -> dict[str, str]:
    """What a client's page has its readers export."""
    matches = re.findall(r"([A-Z_]+)=(\S+)", from_page(name, "console", url))
    return dict(matches)


def localised(text: str, url: str) -> str:
    """For a server at this address, which ends with /v1, and its model."""
    usual = "http://127.0.0.1:8000"
    return re.sub(r"\bMODEL\b", cases.MODEL, text.replace(usual, url.removesuffix("/v1")))


def stream(ask: Ask) -> None:
    done = ask(cases.NAME_A_COLOUR)
    assert cases.COLOUR in done.said, done.why


def tools(ask: Ask) -> None:
    done = ask(cases.WRITE_A_FILE)
    assert done.written.strip() == cases.FILE, done.why
    assert cases.WRITTEN in done.said, done.why


def reasoning(ask: Ask) -> None:
    done = ask(cases.THINK_OF_A_COLOUR)
    assert cases.THOUGHT in done.said, done.why
    assert cases.COLOUR in done.said, done.why
