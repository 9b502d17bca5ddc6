"""What the command line says when something is wrong: one line, what to do about it, and an exit code."""

import os
import sys
import traceback

from dragoman.cli.terminal import visible
from dragoman.errors import BindingError, DragomanError, ModelFileError, SettingsError
from dragoman.logs import Paint

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
    paint = Paint(sys.stderr)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"{paint('red', 'error:')} {visible(error.message)}", file=sys.stderr)
    if hint := hint_of(error):
        print(f"{paint('dim', 'hint:')}  {hint}", file=sys.stderr)
    if isinstance(error, CommandError):
        return error.exit_code
    return USAGE if isinstance(error, SettingsError) else FAILED


def drop_stdout() -> None:
    """After a broken pipe, so that the interpreter's last flush does not complain of it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
