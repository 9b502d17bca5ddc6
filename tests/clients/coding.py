"""Coding agents are commands. Each is asked for a word, and told to write a file, by its shell."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.clients import cases


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
