"""How a command ends: with an error and a hint, or by a signal."""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from dragoman.cli.terminal import visible
from dragoman.errors import BindingError, DragomanError, ModelFileError, SettingsError
from dragoman.logs import Colorizer, JsonLogStream

# Errors: one line, a hint, and an exit code.


FAILED = 1
USAGE = 2
INTERRUPTED = 130

HINTS: dict[type[DragomanError], str] = {
    SettingsError: "`dragoman serve --help` lists every setting, its default and its environment variable.",
    ModelFileError: (
        "`dragoman models FILE` shows what a file contains; without one the default model is used."
    ),
    BindingError: "`dragoman doctor` shows what is installed and what does not match.",
}


class CommandError(DragomanError):
    """An error that ends a command, with a hint for the user."""

    def __init__(self, message: str, hint: str = "", *, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def hint_of(error: DragomanError) -> str:
    if isinstance(error, CommandError):
        return error.hint
    return _hint_on_servers(error) or next(
        (hint for kind, hint in HINTS.items() if isinstance(error, kind)), ""
    )


def _hint_on_servers(error: DragomanError) -> str:
    # Imported only after an error: the client would slow every start down.
    from dragoman.client import (
        AddressError,
        BrokenStreamError,
        ConnectionFailed,
        FileFormatError,
        StatusError,
    )

    if isinstance(error, StatusError) and error.context.status in (401, 403):
        return "Set the server's key with --api-key."
    if isinstance(error, FileFormatError):
        return "`dragoman.Client(..., failures=FOLDER)` saves what fails in FOLDER."
    if isinstance(error, ConnectionFailed | AddressError | BrokenStreamError):
        return "`dragoman serve` starts a server; --url selects another one."
    return ""


def report(error: DragomanError, *, debug: bool = False) -> int:
    """Print `error` to stderr and return the process's exit code."""
    paint, hint = Colorizer(sys.stderr), hint_of(error)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(sys.stderr, JsonLogStream):
        sys.stderr.say(visible(error.message), logging.ERROR, hint)
    else:
        print(f"{paint('red', 'error:')} {visible(error.message)}", file=sys.stderr)
        if hint:
            print(f"{paint('dim', 'hint:')}  {hint}", file=sys.stderr)
    if isinstance(error, CommandError):
        return error.exit_code
    return USAGE if isinstance(error, SettingsError) else FAILED


def drop_stdout() -> None:
    """Redirect stdout after a broken pipe, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Signals. Native code cannot be interrupted: once it starts loading a model, it loads all of it. The model is
# therefore loaded in a thread, and a signal does not wait for that thread. The interpreter must not finalize
# while such a thread runs, because the thread would return from native code into a finalized interpreter;
# `leave` ends the process instead.


T = TypeVar("T")
OPENS = "dragoman-open"
NATIVE = (OPENS, "dragoman-engine", "dragoman-store")
"""Prefixes of the names of threads that run native code."""


class StoppedBySignal(KeyboardInterrupt):
    """A signal ended the command, which is not a failure."""


@contextmanager
def stopped_by_signals(last: bool = False) -> Iterator[None]:
    """Raise Stopped in the block on a stop signal; a server in the block installs its own handlers.

    If the block is the `last` thing the process does, signals are ignored after it: a second one during the
    interpreter's shutdown would make an orderly end look like a failure.
    """
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise StoppedBySignal

    before = {number: signal.getsignal(number) for number in _signals()}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except Exception:
        if asked:
            # The error is a consequence of the interruption.
            raise StoppedBySignal from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)


def _signals() -> list[signal.Signals]:
    """Return the stop signals that are not ignored: `nohup` ignores SIGHUP, a shell SIGINT for background
    jobs.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    wanted = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]


def load_interruptibly(open: Callable[[], T]) -> T:
    """Call `open()` in a thread, so that a signal ends the wait at once."""
    opened: Future[T] = Future()

    def run() -> None:
        try:
            opened.set_result(open())
        except BaseException as error:
            opened.set_exception(error)

    thread = threading.Thread(target=run, name=OPENS, daemon=True)
    thread.start()
    type_var_type = opened.result()
    thread.join()
    return type_var_type


def leave(code: int) -> None:
    """End the process here if a thread still runs native code; otherwise return to the interpreter."""
    if not any(thread.name.startswith(NATIVE) for thread in threading.enumerate()):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if isinstance(stream, JsonLogStream):
                stream.end()
            stream.flush()
    os._exit(code)
