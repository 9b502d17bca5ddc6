import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman import logs
from dragoman.errors import BadRequest

REQUEST = {
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "request_id": "req_ab12",
    "model": "m",
    "prompt_tokens": 31,
    "completion_tokens": 128,
    "cached_tokens": 24,
    "finish": "stop",
    "ttft_ms": 35.2,
    "duration_ms": 1120.0,
    "tokens_per_s": 118.3,
}
LOGGERS = ("dragoman", "uvicorn", "uvicorn.error", "uvicorn.access", "opentelemetry")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Handlers are the process's; other tests should find them as they were."""
    before = {n: (lo.handlers[:], lo.level, lo.propagate) for n in LOGGERS for lo in [logging.getLogger(n)]}
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def line(request: dict[str, Any], *, json: bool = False, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    logs.setup("info", json, stream)
    logging.getLogger(logs.ACCESS).info("request", extra={"request": request})
    return stream.getvalue()


def test_a_request_is_one_line_for_people() -> None:
    clock, _, rest = line(REQUEST).partition(" ")
    assert len(clock) == len("12:00:01")
    assert rest == (
        "POST /v1/chat/completions 200  31+128 tok  cached 24  118 tok/s  first 35 ms  stop  req_ab12\n"
    )


def test_a_simple_route_shows_its_time() -> None:
    request = {"method": "GET", "path": "/health", "status": 200, "duration_ms": 2.1}
    assert line(request).split(" ", 1)[1] == "GET /health 200  2 ms\n"


def test_an_error_is_told() -> None:
    request = {"method": "POST", "path": "/v1/x", "status": 400, "error": "no such field", "request_id": "r"}
    text = line(request)
    assert text.endswith("POST /v1/x 400  no such field  r\n")


@pytest.mark.parametrize(("status", "colour"), [(200, 32), (404, 33), (500, 31)])
def test_colour_follows_the_status_on_a_terminal(
    status: int, colour: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert f"\x1b[{colour}m{status}\x1b[0m" in line(REQUEST | {"status": status}, stream=Tty())


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in line(REQUEST, stream=Tty())


def test_json_has_every_field() -> None:
    result = json.loads(line(REQUEST, json=True))
    assert {name: result[name] for name in REQUEST} == REQUEST
    assert (result["level"], result["logger"]) == ("info", "dragoman.access")
    assert result["time"].endswith("Z")


@pytest.mark.parametrize("as_json", [False, True])
def test_contents_and_keys_do_not_pass(as_json: bool) -> None:
    secrets = {"prompt": "SECRET", "messages": ["SECRET"], "api_key": "SECRET", "path": "/v1/x?key=SECRET"}
    assert "SECRET" not in line(REQUEST | secrets, json=as_json)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_cannot_forge_a_line(as_json: bool) -> None:
    text = line(REQUEST | {"path": "/a\n12:00:00 GET /b 200\x1b[2J"}, json=as_json)
    assert text.count("\n") == 1
    assert "\x1b" not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_the_text_of_a_foreign_exception_does_not_pass(as_json: bool) -> None:
    stream = io.StringIO()
    logs.setup("info", as_json, stream)
    for error in (ValueError("SECRET"), BadRequest("Ours is safe.")):
        try:
            raise error
        except Exception:
            logging.getLogger("dragoman.http").exception("a turn failed")
    assert "SECRET" not in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert "BadRequest: Ours is safe." in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


def test_the_system_says_what_it_means() -> None:
    text = logs.safe_message(FileNotFoundError(2, "SECRET", "SECRET"))
    assert text == "FileNotFoundError: No such file or directory"


def test_levels_and_other_loggers() -> None:
    stream = io.StringIO()
    logs.setup("warning", False, stream)
    logging.getLogger(logs.ACCESS).info("request", extra={"request": REQUEST})
    logging.getLogger("dragoman.engines").warning("slow\ndisk")
    assert stream.getvalue().split(" ", 1)[1] == "warning slow\\ndisk\n"


def test_uvicorn_is_heard_once_and_only_when_something_is_wrong() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler(stream))
    logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler(stream))
    logs.setup("info", False, stream)
    logs.setup("info", False, stream)
    logging.getLogger("uvicorn.access").warning("GET / 200")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").error("it broke")
    assert stream.getvalue().count("\n") == 1
    assert "error it broke" in stream.getvalue()
