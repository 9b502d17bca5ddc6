"""How a command ends: with an error and what to do about it, or because a signal says stop."""

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
from dragoman.logs import JsonStream, Paint

# Errors: one line, what to do about it, and an exit code.


FAILED = 1
USAGE = 2
INTERRUPTED = 130

HINTS: dict[type[DragomanError], str] = {
    SettingsError: "`dragoman serve --help` lists every setting, its default and its environment variable.",
    ModelFileError: "`dragoman models FILE` tells what a file holds; without one the default is used.",
    BindingError: "`dragoman doctor` tells what is installed and what does not fit.",
}


class CommandError(DragomanError):
    """A command that cannot go on, with what the person may do next."""

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
    # Not before there is an error: the client brings what makes a start slow.
    from dragoman.client import BadAddress, BadFile, BrokenStream, CannotConnect, Refused

    if isinstance(error, Refused) and error.where.status in (401, 403):
        return "Give its key with --api-key."
    if isinstance(error, BadFile):
        return "`dragoman.Client(..., failures=FOLDER)` saves what fails in FOLDER."
    if isinstance(error, CannotConnect | BadAddress | BrokenStream):
        return "`dragoman serve` starts a server; --url says where another one is."
    return ""


def report(error: DragomanError, *, debug: bool = False) -> int:
    """Tell of `error` on stderr; the answer is the process's exit code."""
    paint, hint = Paint(sys.stderr), hint_of(error)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(sys.stderr, JsonStream):
        sys.stderr.say(visible(error.message), logging.ERROR, hint)
    else:
        print(f"{paint('red', 'error:')} {visible(error.message)}", file=sys.stderr)
        if hint:
            print(f"{paint('dim', 'hint:')}  {hint}", file=sys.stderr)
    if isinstance(error, CommandError):
        return error.exit_code
    return USAGE if isinstance(error, SettingsError) else FAILED


def drop_stdout() -> None:
    """After a broken pipe, so that the interpreter's last flush does not complain of it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Signals, whatever is being done just then. Native code cannot be interrupted: a model that is being loaded
# is loaded to its end. So it is loaded in a thread, and who is told to stop does not wait for that. Python
# must not take itself down beside such a thread, which would come back from native code into an interpreter
# that is gone. So `leave` ends the process without.


T = TypeVar("T")
OPENS = "dragoman-open"
NATIVE = (OPENS, "dragoman-engine", "dragoman-store")
"""What the names of threads begin with that spend their time in native code."""


class Stopped(KeyboardInterrupt):
    """A signal said stop. Nobody asked for what was being done any more, so it has not failed."""


@contextmanager
def stopped_by_signals(last: bool = False) -> Iterator[None]:
    """Raises Stopped in the block when a signal says stop; a server in it takes them over while it runs.

    If the block is the `last` thing that the process does, signals change nothing after it: else one that
    comes again while the interpreter ends would make an orderly end look like another.
    """
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise Stopped

    before = {number: signal.getsignal(number) for number in _signals()}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except Exception:
        if asked:
            # Of what others were told as well, or of what was left half done.
            raise Stopped from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)


def _signals() -> list[signal.Signals]:
    """Those that are not ignored: `nohup` has SIGHUP ignored, and a shell SIGINT for its background jobs."""
    if threading.current_thread() is not threading.main_thread():
        return []
    wanted = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]


def load_interruptibly(open: Callable[[], T]) -> T:
    """`open()`, in a thread: a signal ends the wait for it at once."""
    opened: Future[T] = Future()

    def run() -> None:
        try:
            opened.set_result(open())
        except BaseException as error:
            opened.set_exception(error)

    thread = threading.Thread(target=run, name=OPENS, daemon=True)
    thread.start()
    made = opened.result()
    thread.join()
    return made


def leave(code: int) -> None:
    """Ends the process here if a thread is still in native code, or stuck there; else the interpreter may."""
    if not any(thread.name.startswith(NATIVE) for thread in threading.enumerate()):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if isinstance(stream, JsonStream):
                stream.end()
            stream.flush()
    os._exit(code)
