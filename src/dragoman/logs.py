"""Log lines: one per request, as text or as JSON.

No line contains a prompt, an answer or a key. Numbers pass; text passes only in the fields of `TEXT_FIELDS`;
the message of a foreign exception never passes, because it may quote what a client sent.
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
log_context: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 (never mutated)
"""The ids of the current request and its trace, which JSON log lines include."""
LONGEST = 500
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
LEVEL_STYLES = {"DEBUG": "dim", "INFO": "cyan", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class Colorizer:
    """Colors for terminals: `Colorizer(sys.stderr)("red", "no")` is red on a terminal, and plain `no`
    elsewhere.
    """

    def __init__(self, stream: TextIO) -> None:
        # https://no-color.org: any value that is not empty turns colors off.
        self.on = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.on and text else text


def setup(level: str, json: bool, stream: TextIO | None = None) -> None:
    """Send the log lines of dragoman and uvicorn to one stream. A second call replaces the first setup."""
    stream = sys.stderr if stream is None else stream
    stream = stream.raw if isinstance(stream, JsonLogStream) else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LINES if json else TextFormatter(Colorizer(stream)))
    _route("dragoman", level.upper(), handler)
    # uvicorn logs its start and stop at "info"; the banner says the same more clearly.
    _route("uvicorn", "DEBUG" if level == "debug" else "WARNING", handler)
    _inherit("uvicorn.error")
    # OpenTelemetry logs collectors that do not answer, among other failures.
    _route("opentelemetry", "WARNING", handler)
    # Each request already has our own access line, which includes token counts.
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
    """Put text on one line of bounded length: a path with a newline in it must not forge a second line.

    >>> clean("/a\\nb")
    '/a\\\\nb'
    """
    if not isinstance(value, str):
        return value
    if not value.isprintable():
        value = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return value if len(value) <= LONGEST else value[:LONGEST] + "…"


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a request that may be logged; empty for records about anything else."""
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


def exception_summary(record: logging.LogRecord) -> tuple[str, list[str]]:
    """Describe a record's exception without its own message, and list the code lines it passed through."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return "", []
    frames = traceback.extract_tb(error.__traceback__)
    params = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return safe_message(error), params


def safe_message(error: BaseException) -> str:
    """Describe an error safely: `ValueError("secret")` is `ValueError`; our own and the system's messages
    stay.
    """
    name = type(error).__name__
    if isinstance(error, DragomanError):
        return f"{name}: {clean(error.message)}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name}: {os.strerror(error.errno)}"
    return name


class JsonFormatter(logging.Formatter):
    """One JSON object per line. The request's fields stand beside `time`, `level` and `logger`."""

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
        sentence, params = exception_summary(record)
        if sentence:
            line |= {"exception": sentence, "at": params}
        return {**line, **log_context.get(), **request}


LINES = JsonFormatter()


# JSON for everything else that the process writes: prints, warnings and uncaught exceptions.


class JsonLogStream(io.TextIOBase):
    """Replaces stdout or stderr and turns every line written to it into a JSON object."""

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
        """Write the last line even if it has no newline."""
        self.write("\n")

    def say(self, line: str, level: int = logging.INFO, hint: str = "") -> None:
        if line.strip():
            record = logging.LogRecord(self._name, level, "", 0, line.strip(), None, None)
            mapping = LINES.describe(record) | ({"hint": hint} if hint else {})
            self.raw.write(msgspec.json.encode(mapping).decode() + "\n")
            self.raw.flush()

    def flush(self) -> None:
        self.raw.flush()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def stdio_as_json() -> None:
    """Turn everything this process writes into JSON lines, third-party output included. Idempotent."""
    if isinstance(sys.stderr, JsonLogStream):
        return
    sys.stdout, sys.stderr = JsonLogStream(sys.stdout, "stdout"), JsonLogStream(sys.stderr, "stderr")
    for stream in (sys.stdout, sys.stderr):
        atexit.register(stream.end)
    handler = logging.StreamHandler(sys.stderr.raw)
    handler.setFormatter(LINES)
    # Handles loggers without a handler of their own: those of other packages.
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)
    logger = logging.getLogger("dragoman")
    sys.excepthook = lambda kind, error, trace: logger.critical(
        "Process terminated by an exception", exc_info=error
    )
    threading.excepthook = lambda parts: logger.error(
        "Thread terminated by an exception", exc_info=parts.exc_value
    )
    sys.unraisablehook = lambda item: logger.error("Unraisable exception", exc_info=item.exc_value)


class TextFormatter(logging.Formatter):
    """Formats lines for people, such as:

    `12:00:01 POST /v1/chat/completions 200  31+128 tok  cached 24  118 tok/s  first 35 ms  stop  req_1`
    """

    def __init__(self, paint: Colorizer) -> None:
        super().__init__()
        self.paint = paint

    def format(self, record: logging.LogRecord) -> str:
        clock = self.paint("dim", time.strftime("%H:%M:%S", time.localtime(record.created)))
        request = fields(record)
        line = f"{clock} {self._request(request) if request else self._message(record)}"
        sentence, params = exception_summary(record)
        if sentence:
            line += "".join(f"\n    {param}" for param in [sentence, *params])
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
    """Format the numbers of a request, the most useful first."""
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
