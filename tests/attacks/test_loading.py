"""No request reaches a file, a process or the model's loading. Rows 61, 64 to 73.

Tampered GGUF headers are in `test_gguf_headers.py`, ports in `test_doors.py` and `test_engine_life.py`.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dragoman.engines.hf_tokenizer import HfTokenizer
from tests.attacks.audit import ASKS, STARTS, AuditLog
from tests.attacks.bodies import GENERATING, GOOD, OVER, good
from tests.attacks.fields import TYPES, readers
from tests.attacks.frame import LOAD, AttackedServer, Frame, attacked
from tests.attacks.test_source import TREES
from tests.support.tokenizers import byte_level, saved
from tests.support.wait import becomes

CANARY = "canary-0c1d"
TRAVERSALS = [
    f"../../../../tmp/{CANARY}",
    f"/tmp/{CANARY}",
    f"file:///tmp/{CANARY}",
    f"..\\..\\{CANARY}",
    f"....//....//{CANARY}",
    f"%2e%2e%2f{CANARY}",
    f"parrot/../{CANARY}",
    f"parrot\0/{CANARY}",
    f"~/{CANARY}",
    f"hf.co/{CANARY}/{CANARY}",
    f"sha256:{CANARY}",
    f"$(touch {CANARY})",
    f"{CANARY}/../" * 20,
]
NAMED = [
    route
    for name, routes in TYPES.items()
    if "model" in readers()[name].decoder.type.__struct_fields__
    for route in routes
    if route not in OVER
]
"""The routes whose requests name a model."""
KEEPING = ("/v1/uploads", "/v1/batches", "/v1/messages/batches")
"""Routes that keep files, in the server's own folder."""
HTML = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> AuditLog:
    return AuditLog(tmp_path_factory.mktemp("audit") / "log")


@pytest.fixture(scope="module")
def watched(log: AuditLog) -> Iterator[AttackedServer]:
    """A server whose every step outside of itself is written down, from after its first requests on."""
    with attacked(audit=str(log.file), model_alias=[HTML]) as server:
        for route in GOOD:
            server.send(route, good(route))
        # Batches are worked on in the background, and write down how far they are.
        assert becomes(lambda: _is_over(server))
        # What is imported or opened once has been by now, and the log is known to hold it.
        assert any(line.startswith("open ") for line in log.news())
        yield server


def _is_over(server: AttackedServer) -> bool:
    batches = server.client.get("/v1/batches").json()["data"]
    result = server.client.get("/v1/messages/batches").json()["data"]
    states = {batch["status"] for batch in batches} | {batch["processing_status"] for batch in result}
    return states <= {"completed", "failed", "cancelled", "ended"}


@pytest.mark.parametrize("route", NAMED)
def test_the_name_of_a_model_is_no_path(watched: AttackedServer, log: AuditLog, route: str) -> None:
    frame = Frame(watched)
    log.news()
    for name in TRAVERSALS:
        assert frame.refused(route, {**good(route), "model": name}, status=(404,))["param"] == "model"
    assert log.news() == []


def test_the_path_of_a_model_is_no_path(watched: AttackedServer, log: AuditLog) -> None:
    log.news()
    for name in TRAVERSALS:
        assert watched.client.get(f"/v1/models/{quote(name, safe='')}").status_code in (400, 404)
    assert log.news() == []


@pytest.mark.parametrize("route", GENERATING)
def test_the_name_of_an_adapter_is_no_path(watched: AttackedServer, log: AuditLog, route: str) -> None:
    frame = Frame(watched)
    log.news()
    for name in TRAVERSALS:
        for lora in (name, [{"name": name}]):
            frame.refused(route, {**good(route), "lora": lora}, status=(400, 404))
    assert log.news() == []


def test_an_adapter_is_loaded_from_its_folder_only(watched: AttackedServer, log: AuditLog) -> None:
    frame = Frame(watched)
    log.news()
    for path in (*TRAVERSALS, "/etc/passwd", "../__init__.py", "/proc/self/mem", "."):
        body = {**good(LOAD), "lora_path": path}
        assert frame.refused(LOAD, body, status=(400,))["param"] == "lora_path"
    assert log.news() == []


@pytest.mark.parametrize("route", [route for route in GOOD if not route.startswith(KEEPING)])
def test_no_route_starts_a_process_or_asks_anybody(
    watched: AttackedServer, log: AuditLog, route: str
) -> None:
    log.news()
    watched.send(route, good(route))
    news = log.news()
    assert not {line.partition(" ")[0] for line in news} & (
        STARTS | ASKS | {"socket.bind", "sqlite3.connect"}
    )
    # An adapter is read by the route that loads it, and no other file is.
    adapter = repr(str(Path(__file__).with_name(str(GOOD[LOAD]["lora_path"]))))
    opened = [line for line in news if line.startswith("open ")]
    assert all("lora_adapter" in route and line.startswith(f"open ({adapter}, 'r'") for line in opened)


STARTERS: dict[str, dict[str, Any]] = {
    "command": {"command": "touch", "args": [f"/tmp/{CANARY}"]},
    "stdio": {"server_url": f"stdio://touch?/tmp/{CANARY}"},
    "file": {"server_url": f"file:///tmp/{CANARY}"},
    "transport": {"transport": "stdio", "server_url": "http://127.0.0.1/"},
    "env": {"server_url": "http://127.0.0.1/", "env": {"LD_PRELOAD": f"/tmp/{CANARY}"}},
    "label": {"server_label": f"../{CANARY}"},
}


@pytest.mark.parametrize("name", STARTERS)
def test_no_tool_of_a_request_starts_a_process(watched: AttackedServer, log: AuditLog, name: str) -> None:
    frame = Frame(watched)
    log.news()
    tool = {"type": "mcp", "server_label": "a", "require_approval": "never", **STARTERS[name]}
    for route in ("/v1/responses", "/v1/chat/completions"):
        frame.refused(route, {**good(route), "tools": [tool]}, status=(400,))
    assert log.news() == []


@pytest.mark.parametrize(
    "path",
    ["/slots/0?action=save", "/slots/0?action=restore",
     "/update_weights", "/load_weights", "/collective_rpc", "/invocations", "/prompts/test", "/shutdown",
     "/props"],
)  # fmt: skip
def test_there_is_no_way_to_load_or_save(watched: AttackedServer, log: AuditLog, path: str) -> None:
    log.news()
    for method in ("POST", "PUT", "GET", "DELETE"):
        body = {"filename": f"../{CANARY}", "path": f"/tmp/{CANARY}", "model": f"/tmp/{CANARY}"}
        reply = watched.client.request(method, path, json=body)
        assert reply.status_code == 404
    assert log.news() == []


# Code that comes with a model


def test_the_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path)
    mark = tmp_path / "ran"
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    assert HfTokenizer(str(tmp_path)).encode("a")
    assert not mark.exists()


def test_whoever_loads_says_that_no_code_is_to_be_run() -> None:
    calls = [
        (name, node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert len(calls) >= 3
    for name, node in calls:
        fields = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert fields.get("trust_remote_code") == "False", name


# What a browser makes of a model's name


def test_a_name_that_is_markup_stays_a_name(watched: AttackedServer) -> None:
    body = {**good("/v1/chat/completions"), "model": HTML}
    replies = [watched.client.get("/v1/models"), watched.client.post("/v1/chat/completions", json=body)]
    replies.append(watched.client.post("/v1/chat/completions", json={**body, "model": HTML + "x"}))
    for reply in replies:
        assert HTML in reply.text
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_page_takes_nothing_for_markup(watched: AttackedServer) -> None:
    page, script = watched.client.get("/docs").text, watched.client.get("/docs.js").text
    assert "onerror" not in page
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in script
    assert "script-src 'self'" in watched.client.get("/docs").headers["content-security-policy"]
