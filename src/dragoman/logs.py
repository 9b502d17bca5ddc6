"""Log lines: one per request, for people or as JSON.

Rules of this file: a prompt, an answer or a key never reaches a line. Numbers pass; text passes only under a
known name; the text of a foreign exception does not pass at all, because it may quote what a client sent.
"""

import atexit
import io
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TextIO

import msgspec

from dragoman.errors import DragomanError

ACCESS = "dragoman.access"
TEXT_FIELDS = frozenset({"method", "path", "request_id", "model", "finish", "error", "code"})
about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 (nobody changes it)
"""What is done just now: the ids of a request and of its trace, which lines as JSON say as well."""
LONGEST = 500
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
LEVEL_STYLES = {"DEBUG": "dim", "INFO": "cyan", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class Paint:
    """`Paint(sys.stderr)("red", "no")` is `no` in red on a terminal, and `no` anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        # https://no-color.org: any value that is not empty means no colour.
        self.on = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.on and text else text


def setup(level: str, json: bool, stream: TextIO | None = None) -> None:
    """Send the lines of dragoman and uvicorn to one place. Calling it again replaces the former setup."""
    stream = sys.stderr if stream is None else stream
    stream = stream.raw if isinstance(stream, JsonStream) else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LINES if json else HumanLines(Paint(stream)))
    _route("dragoman", level.upper(), handler)
    # uvicorn tells of its start and stop at "info", which the banner says better.
    _route("uvicorn", "DEBUG" if level == "debug" else "WARNING", handler)
    _inherit("uvicorn.error")
    # It tells of collectors that do not answer, among others.
    _route("opentelemetry", "WARNING", handler)
    # Each request has one line already: ours, which knows of tokens.
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False


def _route(name: str, level: str, handler: logging.Handler) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _inherit(name: str) -> None:
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def clean(value: Any) -> Any:
    """Text on one line, of bounded length: a path with a newline in it must not forge a second line.

    >>> clean("/a\\nb")
    '/a\\\\nb'
    """
    if not isinstance(value, str):
        return value
    if not value.isprintable():
        value = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return value if len(value) <= LONGEST else value[:LONGEST] + "…"


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What may be said of the request that a record tells of; empty for other records."""
    request = getattr(record, "request", None)
    if not isinstance(request, Mapping):
        return {}
    kept = {
        name: clean(value)
        for name, value in request.items()
        if isinstance(value, int | float) or (isinstance(value, str) and name in TEXT_FIELDS)
    }
    if "path" in kept:
        kept["path"] = kept["path"].partition("?")[0]
    return kept


def trouble(record: logging.LogRecord) -> tuple[str, list[str]]:
    """The exception of a record as a safe sentence, and the places it came through."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return "", []
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return describe(error), places


def describe(error: BaseException) -> str:
    """`describe(ValueError("secret"))` is `ValueError`; our messages and the system's are safe."""
    name = type(error).__name__
    if isinstance(error, DragomanError):
        return f"{name}: {clean(error.message)}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name}: {os.strerror(error.errno)}"
    return name


class JsonLines(logging.Formatter):
    """One object per line. The request's fields stand beside `time`, `level` and `logger`."""

    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(self.describe(record)).decode()

    def describe(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = fields(record)
        if not request:
            line["message"] = clean(record.getMessage())
        sentence, places = trouble(record)
        if sentence:
            line |= {"exception": sentence, "at": places}
        return {**line, **about.get(), **request}


LINES = JsonLines()


# Where all that a process says is to be JSON: what others print, warn of, or fail with.


class JsonStream(io.TextIOBase):
    """In the place of stdout or stderr: a line that somebody writes becomes an object."""

    def __init__(self, raw: TextIO, name: str) -> None:
        self.raw = raw
        self._name = name
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            self.say(line)
        return len(text)

    def end(self) -> None:
        """What has no end yet is a line as well."""
        self.write("\n")

    def say(self, line: str, level: int = logging.INFO, hint: str = "") -> None:
        if line.strip():
            record = logging.LogRecord(self._name, level, "", 0, line.strip(), None, None)
            told = LINES.describe(record) | ({"hint": hint} if hint else {})
            self.raw.write(msgspec.json.encode(told).decode() + "\n")
            self.raw.flush()

    def flush(self) -> None:
        self.raw.flush()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def speak_json() -> None:
    """Everything that this process says from now on is lines of JSON, whoever says it. Idempotent."""
    if isinstance(sys.stderr, JsonStream):
        return
    sys.stdout, sys.stderr = JsonStream(sys.stdout, "stdout"), JsonStream(sys.stderr, "stderr")
    for stream in (sys.stdout, sys.stderr):
        atexit.register(stream.end)
    handler = logging.StreamHandler(sys.stderr.raw)
    handler.setFormatter(LINES)
    # Of those who have no place of their own: other packages.
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)
    logger = logging.getLogger("dragoman")
    sys.excepthook = lambda kind, error, trace: logger.critical("The process ends", exc_info=error)
    threading.excepthook = lambda told: logger.error("A thread has ended", exc_info=told.exc_value)
    sys.unraisablehook = lambda told: logger.error("Something failed unheard", exc_info=told.exc_value)


class HumanLines(logging.Formatter):
    """`12:00:01 POST /v1/chat/completions 200  31+128 tok  cached 24  118 tok/s  first 35 ms  stop  req_1`"""

    def __init__(self, paint: Paint) -> None:
        super().__init__()
        self.paint = paint

    def format(self, record: logging.LogRecord) -> str:
        clock = self.paint("dim", time.strftime("%H:%M:%S", time.localtime(record.created)))
        request = fields(record)
        line = f"{clock} {self._request(request) if request else self._message(record)}"
        sentence, places = trouble(record)
        if sentence:
            line += "".join(f"\n    {place}" for place in [sentence, *places])
        return line

    def _message(self, record: logging.LogRecord) -> str:
        level = self.paint(LEVEL_STYLES.get(record.levelname, "dim"), record.levelname.lower())
        return f"{level} {clean(record.getMessage())}"

    def _request(self, request: Mapping[str, Any]) -> str:
        status = int(request.get("status", 0))
        style = "green" if status < 400 else "yellow" if status < 500 else "red"
        head = f"{request.get('method', '?')} {request.get('path', '?')} {self.paint(style, str(status))}"
        parts = [head, *figures(request)]
        if request.get("error"):
            parts.append(self.paint(style, request["error"]))
        if request.get("request_id"):
            parts.append(self.paint("dim", request["request_id"]))
        return "  ".join(parts)


def figures(request: Mapping[str, Any]) -> list[str]:
    """The numbers of a request, in the order in which people ask for them."""
    if "completion_tokens" not in request:
        return [f"{request['duration_ms']:.0f} ms"] if "duration_ms" in request else []
    parts = [f"{request.get('prompt_tokens', 0)}+{request['completion_tokens']} tok"]
    if request.get("cached_tokens"):
        parts.append(f"cached {request['cached_tokens']}")
    if "tokens_per_s" in request:
        parts.append(f"{request['tokens_per_s']:.0f} tok/s")
    if "ttft_ms" in request:
        parts.append(f"first {request['ttft_ms']:.0f} ms")
    if request.get("finish"):
        parts.append(request["finish"])
    return parts
