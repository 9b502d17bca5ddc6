"""Signals are handled where they were before, whatever OpenVINO does when it comes and goes."""

import threading
from pathlib import Path

import pytest

from dragoman.engines.local.openvino.compiled_graph import best_kv_cache, compile_graph, signal_stack
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from tests.support.tiny_gguf import write_tiny


def test_compiling_leaves_the_signal_stack_alone(tmp_path: Path) -> None:
    before = signal_stack()
    compiled = compile_graph(ensure_converted(write_tiny(tmp_path / "tiny.gguf")), threads=1, kv_cache="int8")
    assert signal_stack() == before
    # Another thread lets go of it, as happens when a server stops.
    held = [compiled]
    del compiled
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert signal_stack() == before


def test_asking_the_plugin_leaves_the_signal_stack_alone() -> None:
    before = signal_stack()
    assert best_kv_cache() in ("bf16", "f16", "int8")
    assert signal_stack() == before


def test_one_that_was_there_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `faulthandler`, where it is on; pytest has it on."""
    import faulthandler

    if faulthandler.is_enabled():
        assert signal_stack() is not None
