"""Completion in the shells themselves. Where one is not installed, its tests are skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman import settings
from dragoman.cli import COMMANDS, main
from tests.support.hub import COMMIT
from tests.support.terminal import terminal

Capture = pytest.CaptureFixture[str]
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
LINES = {
    "dragoman comple": "completion ",
    "dragoman serve --log-lev": "--log-level",
    "dragoman serve --log-level war": "warning",
    "dragoman parse --dialect=herm": "hermes",
    "dragoman store vac": "vacuum",
    "dragoman serve ./wei": "./weights.gguf",
    "dragoman show hf:org/re": "hf:org/repo:Q4_K_M",
}
"""What is typed, and how it goes on once tab was pressed."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our command in the path, a model in the cache, a file in the folder."""
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "dragoman"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dragoman "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--org--repo"
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "repo.Q4_K_M.gguf").touch()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (tmp_path / "weights.gguf").touch()
    return tmp_path


def script(shell: str, folder: Path, capsys: Capture) -> Path:
    assert main(["completion", shell]) == 0
    file = folder / f"_dragoman.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes(shell: str, machine: Path, capsys: Capture) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    file = script(shell, machine, capsys)
    before = "autoload -Uz compinit && compinit -u -D; " if shell == "zsh" else ""
    with terminal(SHELLS[shell], {"PS1": "$ ", "INPUTRC": "/dev/null"}) as person:
        person.press(f"{before}source {file}; echo read''y\r")
        person.see("ready")
        for typed, completed in LINES.items():
            person.press(f"{typed}\t")
            person.see(completed.strip())
            person.press("\x15")


def test_fish_completes(machine: Path, capsys: Capture) -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    file = script("fish", machine, capsys)
    asked = "; ".join(f"echo '# {typed}'; complete -C '{typed}'" for typed in LINES)
    completed = subprocess.run(
        ["fish", "-N", "-c", f"source {file}; {asked}"], capture_output=True, text=True
    )
    assert not completed.stderr
    for typed, part in zip(LINES, completed.stdout.split("# ")[1:], strict=True):
        assert LINES[typed].strip() in part.partition("\n")[2], part


def test_all_commands_and_flags_are_there(capsys: Capture) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(command in text for command in COMMANDS)
        assert all(option.flag.lstrip("-") in text for option in settings.options())
