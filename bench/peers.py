"""The servers with a real model that are measured side by side, and how each is started."""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from bench.errors import BenchError

OURS = "dragoman"
OURS_LLAMA_CPP = "dragoman, runner llamacpp"
OURS_OPENVINO = "dragoman, runner openvino"
"""Measured only where it is asked for: mostly it is what dragoman takes."""
LLAMA_CPP = "llama.cpp server"
EXACT = frozenset({OURS, OURS_LLAMA_CPP, LLAMA_CPP})
"""These know `ignore_eos`, so an answer that is too short is an error and no chance."""


class Setup(Struct, frozen=True):
    """The same for all servers."""

    model: Path
    slots: int = 32
    context: int = 768
    threads: int = 2
    readers: int | None = None
    """Those that dragoman is told to expect; as many as there are slots, if nobody tells."""


def commands(setup: Setup, only: Collection[str] = ()) -> dict[str, list[str]]:
    """`python -m` and this starts each that is named, or all. A server that is not installed is not in it."""
    slots = ["--slots", str(setup.slots)]
    size = ["--context", str(setup.context), "--threads", str(setup.threads)]
    ours = ["dragoman", "serve", str(setup.model), *slots, *size, "--log-level", "warning"]
    if setup.readers is not None:
        ours += ["--readers", str(setup.readers)]
    fields = {
        OURS: ours,
        OURS_LLAMA_CPP: [*ours, "--runner", "llamacpp"],
        LLAMA_CPP: ["bench.servers.llamacpp", str(setup.model), *slots, *size],
    }
    if find_spec("llama_cpp") is not None:
        fields["llama-cpp-python server"] = _llama_cpp_python(setup)
    if OURS_OPENVINO in only:
        fields[OURS_OPENVINO] = [*ours, "--runner", "openvino"]
    if strange := set(only) - fields.keys():
        raise BenchError(f"There is no {min(strange)} here; there are: {'; '.join(fields)}.")
    return {name: command for name, command in fields.items() if not only or name in only}


def _llama_cpp_python(setup: Setup) -> list[str]:
    threads = str(setup.threads)
    size = ["--n_ctx", str(setup.context), "--n_threads", threads, "--n_threads_batch", threads]
    # It computes one answer at a time; by default a new request would break off the one that runs.
    return ["llama_cpp.server", "--model", str(setup.model), *size, "--interrupt_requests", "false"]
