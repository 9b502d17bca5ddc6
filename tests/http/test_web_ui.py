"""The files of the page, as browsers get them. What the page does is in `tests/page/`."""

import re
from pathlib import Path

import pytest

import dragoman.http
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.routes.web_ui import FIRST, find_files
from tests.http.conftest import Serve
from tests.support.http import get, send

STATIC = Path(dragoman.http.__file__).parent / "static"
MOST_BYTES = 300_000
NAMES = sorted(find_files())
# Ways to have a text read as HTML or as a program, each of which would make an attack of what a model says.
READS_TEXT_AS_MORE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    r"|createContextualFragment|setHTML|srcdoc|\bimport\(\s*[^\"']|set(Timeout|Interval)\(\s*[\"']"
)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_needs_no_key(serve: Serve, path: str) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["k"])
    page = get(url, path)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name in re.findall(r'(?:href|src)="page/([^"]+)"', page.text):
        assert get(url, f"/page/{name}").status_code == 200


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_its_type_and_is_asked_for_again(greeter: str, name: str) -> None:
    reply = get(greeter, f"/page/{name}")
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    assert reply.headers["content-type"].startswith(types[name.rpartition(".")[2]])
    assert reply.headers["cache-control"] == "no-cache"
    again = get(greeter, f"/page/{name}", **{"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "docs.html", "app.js%00"]
)
def test_there_are_no_other_files(greeter: str, name: str) -> None:
    assert send("GET", greeter, f"/page/{name}").status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs", "/page/app.js", "/page/style.css"])
def test_the_page_runs_its_own_scripts_only_and_is_framed_by_nobody(greeter: str, path: str) -> None:
    headers = get(greeter, path).headers
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert (
        rules["default-src"]
        == rules["frame-ancestors"]
        == rules["base-uri"]
        == rules["form-action"]
        == "'none'"
    )
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["trusted-types"] == "'none'"
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_is_inline() -> None:
    page = (STATIC / FIRST).read_text()
    assert "<style" not in page
    assert not re.findall(r"<script(?![^>]*\bsrc=)", page)
    assert not re.findall(r"\s(?:style|on\w+)=", page)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere_and_no_text_is_read_as_more(name: str) -> None:
    text = (STATIC / name).read_text()
    assert not re.findall(r"(?:src|href|url\(|import|from|fetch\()\s*=?\s*[\"'(]?(?:https?:)?//\w", text)
    assert not READS_TEXT_AS_MORE.findall(text)


def test_the_page_is_small() -> None:
    assert sum((STATIC / name).stat().st_size for name in NAMES) <= MOST_BYTES
