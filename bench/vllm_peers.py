"""Servers that stand before the same vLLM with the same model, and how each is started."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from bench.errors import BenchError
from bench.process import ROOT

OURS = "dragoman"
PYTHON_FRONTEND = "vllm serve"
RUST_FRONTEND = "vllm serve, Rust frontend"
MODEL = ROOT / "build" / "tiny_llama"
SLOTS, CONTEXT = 128, 1024
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One process and one thread for the model: the frontend and the client share what is left.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}


class Peer(Struct, frozen=True):
    module: list[str]
    environ: Mapping[str, str] = field(default_factory=dict)


def python() -> str:
    """The Python that has vLLM."""
    text = os.environ.get("DRAGOMAN_VLLM_PYTHON") or str(ROOT / "build" / "vllm" / "bin" / "python")
    if not Path(text).exists():
        raise BenchError("There is no vLLM: `make vllm` fetches it; DRAGOMAN_VLLM_PYTHON names another.")
    return text


def peers(rust: str | None) -> dict[str, Peer]:
    """`rust` is the path of vLLM's frontend in Rust, which only some builds bring."""
    shared = {"enforce_eager": True, "distributed_executor_backend": "uni"}
    size = ["--context", str(CONTEXT), "--slots", str(SLOTS)]
    ours = ["dragoman", "serve", "--engine", "vllm", "--model", str(MODEL), *size]
    theirs = ["bench.servers.vllm_serve", str(MODEL), "--served-model-name", MODEL.name, "--enforce-eager"]
    theirs += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--disable-log-stats"]
    theirs += ["--distributed-executor-backend", "uni", "--disable-uvicorn-access-log"]
    quiet = ["--store", "none", "--log-level", "warning"]
    fields = {
        OURS: Peer([*ours, *quiet, "--engine-args", json.dumps(shared)], ENVIRONMENT),
        PYTHON_FRONTEND: Peer(theirs, ENVIRONMENT),
    }
    if rust:
        chosen = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": rust}
        fields[RUST_FRONTEND] = Peer(theirs, ENVIRONMENT | chosen)
    return fields


def make_model() -> None:
    if not (MODEL / "model.safetensors").exists():
        print("engines: making the model", flush=True)
        maker = [python(), "-m", "bench.servers.tiny_llama", str(MODEL)]
        subprocess.run(maker, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True)
