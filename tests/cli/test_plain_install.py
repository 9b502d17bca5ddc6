"""What `pip install dragoman` brings is enough: an environment in which nothing else is."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.own_server import address

ROOT = Path(__file__).parents[2]
# What the tests themselves run with must not be found from there.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
RUNNERS = ["auto", "llamacpp"]
if sys.platform == "linux" and platform.machine() == "x86_64":
    RUNNERS.append("openvino")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its commands."""
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, env=ENVIRONMENT)
    failed = pip(folder, "install", str(ROOT))
    if failed and pip(folder, "download", "--no-deps", "--dest", str(folder), "hatchling"):
        pytest.skip("THE PACKAGE INDEX CANNOT BE REACHED: nobody has seen that a plain install works")
    assert not failed, failed
    return folder / "bin"


def pip(folder: Path, *arguments: str) -> str:
    """What it says where it fails."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    ended = subprocess.run([*command, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    return ended.stdout + ended.stderr if ended.returncode else ""


@pytest.fixture(params=RUNNERS)
def url(request: pytest.FixtureRequest, installed: Path, tmp_path: Path) -> Iterator[str]:
    """A server with nothing but a runner named, and that only where it is not the default one."""
    log = tmp_path / "log"
    command = [str(installed / "dragoman"), "serve", "--port", "0", "--data-dir", str(tmp_path)]
    if request.param != "auto":
        command += ["--runner", request.param]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT, cwd=tmp_path) as process,
    ):
        try:
            yield address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, log.read_text()


def test_the_default_model_answers(url: str) -> None:
    asked = {"model": "any", "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    reply = httpx.post(f"{url}/v1/chat/completions", json=asked | {"model": model}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]


def test_nothing_is_imported_that_is_not_installed(installed: Path) -> None:
    """Of the optional parts it is said what to install, and nothing fails for want of them."""
    ended = subprocess.run(
        [installed / "dragoman", "doctor"], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert "ModuleNotFoundError" not in ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stdout + ended.stderr
