"""An environment for each client, under build/clients, so that none is held to what another needs."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.table import Client
from tests.support.outside import BUILD, bare_environment

ROOT = BUILD.parent
PROGRAMS = Path(__file__).parent / "programs"
INSTALL_SECONDS, RUN_SECONDS = 1200, 300


class NotInstalled(Exception):
    pass


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no word why"]
        raise NotInstalled(next((line for line in lines if "error" in line.lower()), lines[-1]))


def folder_of(client: Client) -> Path:
    return BUILD / "clients" / client.name


def install(client: Client) -> None:
    """Does nothing where these very versions are there already."""
    folder = folder_of(client)
    stamp, wanted = folder / ".installed", "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.registry == "npm":
        _run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", ".", *client.packages],
            folder,
        )
    elif shutil.which("uv"):
        # Seconds, where pip takes minutes.
        _run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, "."], folder)
        _run(["uv", "pip", "install", "--quiet", "--python", "bin/python", *client.packages], folder)
    else:
        _run([sys.executable, "-m", "venv", "."], folder)
        quiet = ["--quiet", "--disable-pip-version-check"]
        _run(["bin/python", "-m", "pip", "install", *quiet, *client.packages], folder)
    stamp.write_text(wanted)


def command_of(client: Client, url: str) -> list[str]:
    """What runs the client's program. A module of Node.js finds packages beside itself only; a program in
    Python that runs a command of Node.js needs nothing but the standard library."""
    folder = folder_of(client)
    if client.program.endswith(".mjs"):
        for file in ("cases.mjs", client.program):
            shutil.copy(PROGRAMS / file, folder)
        return ["node", str(folder / client.program), url]
    python = sys.executable if client.registry == "npm" else str(folder / "bin" / "python")
    return [python, "-m", f"tests.clients.programs.{Path(client.program).stem}", url]


def run(client: Client, url: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """The program has a home of its own, and finds nothing of the person who runs it."""
    bin_ = folder_of(client) / ("node_modules/.bin" if client.registry == "npm" else "bin")
    environment = bare_environment(home, PYTHONPATH=str(ROOT), CLIENT_BIN=str(bin_))
    return subprocess.run(
        command_of(client, url),
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
