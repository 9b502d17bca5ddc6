"""A command that is told to stop, whatever it is doing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.cli.exits import StoppedBySignal, leave, load_interruptibly, stopped_by_signals
from dragoman.errors import EngineFailed
from dragoman.settings import Settings
from tests.support.own_server import address
from tests.support.tiny_gguf import write_tiny

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def as_at_a_terminal() -> Iterator[None]:
    """A shell's background jobs are begun with signals ignored, and that is respected."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_while_a_model_is_loaded_ends_the_wait_and_is_no_failure(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def served_engine(settings: Settings) -> None:
        os.kill(os.getpid(), number)
        go.wait()

    monkeypatch.setattr("dragoman.cli.engine.make_served_engine", served_engine)
    assert main(["serve", "my.gguf", "--port", "0"]) == 0
    go.set()
    assert signal.getsignal(number) is signal.default_int_handler


def test_what_breaks_because_all_were_told_to_stop_is_no_failure_either() -> None:
    """A signal to a group of processes reaches the engine's too, and it may be the first to go."""
    with pytest.raises(StoppedBySignal), stopped_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        except StoppedBySignal:
            raise EngineFailed("The engine's process was ended by SIGTERM.") from None


def test_signals_that_are_ignored_stay_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_after_the_last_block_signals_change_nothing() -> None:
    with stopped_by_signals(last=True):
        pass
    signal.raise_signal(signal.SIGTERM)


def test_what_is_loaded_in_a_thread_is_handed_over_and_so_is_its_error() -> None:
    assert load_interruptibly(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        load_interruptibly(lambda: 1 // 0)
    assert not any(thread.name == "dragoman-open" for thread in threading.enumerate())


def test_beside_a_thread_of_ours_the_process_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, go = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    leave(3)
    assert codes == []
    stuck = threading.Thread(target=go.wait, name="dragoman-engine", daemon=True)
    stuck.start()
    leave(3)
    go.set()
    assert codes == [3]
    stuck.join()


@pytest.mark.parametrize("runner", ["llamacpp", "openvino"])
def test_a_server_that_is_told_to_stop_ends_with_status_0(runner: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OPENVINO IS NOT INSTALLED, so nothing of its runner is tested")
    model, log = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "log"
    environ = {**os.environ, "DRAGOMAN_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "dragoman", "serve", str(model), "--runner", runner, "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--store", "none"], stdout=file, stderr=file, env=environ)
    address(process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()
