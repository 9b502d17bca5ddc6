"""The table of `make clients` says what was not run, what fails, and what was refused in silence."""

import httpx

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.clients.__main__ import Outcome, find_refusals, page, read_cases
from tests.clients.cases import Case, SeenRequest, try_case
from tests.clients.model import model
from tests.clients.table import CLIENTS, Client

CLIENT = Client("some", ("some==1.0",), "with_some.py")


def test_a_client_that_was_not_run_has_not_passed() -> None:
    outcome = Outcome(CLIENT, not_run="no such package")
    table = page([outcome])
    assert not outcome.passed
    assert (table.title, table.rows[0][3]) == ("0 of 1 clients work", "NOT RUN")
    assert "- some was NOT RUN: no such package" in table.notes


def test_what_fails_is_named() -> None:
    def fails(url: str) -> None:
        raise ValueError("no\nanswer")

    outcome = Outcome(
        CLIENT, [SeenRequest("chat", "plain", None), try_case(Case("chat", "stream", fails), "")]
    )
    [row] = page([outcome]).rows
    assert not outcome.passed
    assert row == ["some", "1.0", "chat", "works", "FAILS", "-", "-", "-"]
    assert "- some, chat, stream: ValueError: no answer" in page([outcome]).notes


def test_refusals_are_seen() -> None:
    with background(model(), Settings(port=0)) as url:
        assert find_refusals(CLIENT, url) == []
        httpx.post(f"{url}/v1/chat/completions", json={"messages": []})
        [seen] = find_refusals(CLIENT, url)
    assert "/v1/chat/completions 400 (1 times)" in str(seen.failed)


def test_what_was_tried_is_told_of_a_program_that_does_not_end() -> None:
    data = b'talk\n{"api": "chat", "what": "plain", "failed": null}\n{"api": "chat", "wh'
    assert read_cases(data) == [SeenRequest("chat", "plain", None)]


def test_versions_are_pinned() -> None:
    assert all(client.version[0].isdigit() for client in CLIENTS)
    assert {client.registry for client in CLIENTS} == {"pip", "npm"}
