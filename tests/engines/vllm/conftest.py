"""Real vLLM, in an environment of its own: that of `make vllm`, or of DRAGOMAN_VLLM_PYTHON."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from dragoman.engines.default_weights import default_model
from dragoman.errors import ModelFileError

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build"
START_S = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One process computes, on one thread: tests share the machine with whatever else runs.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
ENGINE_ARGS = {"enforce_eager": True, "distributed_executor_backend": "uni", "block_size": 32}


class RunningServer(Struct):
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def core(self) -> int:
        """The process in which vLLM computes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(
            int(pid) for pid in children if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )


def environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT


@pytest.fixture(scope="session")
def vllm_python() -> str:
    named = os.environ.get("DRAGOMAN_VLLM_PYTHON")
    # What is installed last tells whether all of it is there.
    if named is None and not (BUILD / "vllm" / "bin" / "dragoman").exists():
        pytest.skip("THERE IS NO VLLM, so nothing of it is tested: `make vllm` fetches it")
    return named or str(BUILD / "vllm" / "bin" / "python")


@pytest.fixture(scope="session")
def models(vllm_python: str) -> Path:
    folder = BUILD / "vllm_models"
    if not (folder / "hearer" / "golden.json").exists():
        try:
            weights = default_model()
        except ModelFileError as error:
            pytest.skip(f"THE DEFAULT WEIGHTS CANNOT BE FETCHED, so nothing of vLLM is tested: {error}")
        folder.mkdir(parents=True, exist_ok=True)
        maker = [vllm_python, "-m", "tests.engines.vllm.models", str(weights), str(folder)]
        subprocess.run(maker, cwd=ROOT, env=environment(), check=True)
    return folder


@contextmanager
def served(python: str, log: Path, *flags: str, **engine_args: Any) -> Iterator[RunningServer]:
    """`dragoman serve --engine vllm` with these flags, from its first good answer to the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    args = json.dumps(ENGINE_ARGS | engine_args)
    command = [python, "-m", "dragoman", "serve", "--engine", "vllm", "--store", "none", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--engine-args", args],
            cwd=log.parent,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        server = RunningServer(f"http://127.0.0.1:{port}", process, log)
        _wait_for(server)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(server: RunningServer) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            if httpx.get(server.url + "/ready", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"vLLM did not start; its last words:\n{server.log.read_text(errors='replace')[-3000:]}")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def real(vllm_python: str, models: Path, logs: Path) -> Iterator[RunningServer]:
    """The default weights, computed as exactly as transformers computes them."""
    flags = ("--model", str(models / "smollm2"), "--context", "1024", "--slots", "4")
    with served(vllm_python, logs / "real.log", *flags, dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def tiny(vllm_python: str, models: Path, logs: Path) -> Iterator[RunningServer]:
    """A small model of random weights and an adapter for it; two answers at a time, the others wait."""
    adapter = ("--lora", f"poet={models / 'poet'}", "--lora-dir", str(models))
    flags = ("--model", str(models / "tiny"), "--context", "4096", "--slots", "2", *adapter)
    with served(vllm_python, logs / "tiny.log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def pooling(vllm_python: str, models: Path, logs: Path) -> Iterator[RunningServer]:
    """The small model as one that embeds."""
    flags = ("--model", str(models / "tiny"), "--context", "1024")
    with served(vllm_python, logs / "pooling.log", *flags, runner="pooling") as server:
        yield server
