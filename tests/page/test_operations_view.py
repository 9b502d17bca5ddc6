"""What the server is doing, drawn as it happens, in a real browser."""

import pytest
from playwright.sync_api import Browser, expect

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer
from tests.http.test_operations import answering, slow
from tests.page.browser import opened, violations
from tests.page.overflow import wider
from tests.support.http import HELLO, post


def test_answers_under_way_are_drawn(browser: Browser) -> None:
    with background(slow(), Settings(port=0, store="memory")) as url, opened(browser) as tab:
        page = tab.page
        page.goto(f"{url}/#operations")
        with answering(url):
            expect(page.get_by_label("Answers", exact=True)).to_contain_text("1 running")
            expect(page.get_by_label("Active answers").locator("tbody tr")).to_contain_text("running")
            expect(page.get_by_label("Generated tokens").locator(".line")).to_have_count(1)
        expect(page.get_by_text("No active answers.")).to_be_visible()
        expect(page.get_by_label("Recent requests").locator("tbody tr").first).to_contain_text("disconnect")


def test_a_key_sees_its_share(browser: Browser) -> None:
    settings = Settings(port=0, store="memory", api_key=["one", "two"])
    with background(slow(), settings) as url, opened(browser) as tab, answering(url, "one"):
        tab.expected = {401}
        tab.page.goto(f"{url}/#operations")
        tab.page.get_by_role("textbox", name="API key").fill("one")
        tab.page.get_by_role("button", name="Use this key").click()
        row = tab.page.get_by_label("Keys").locator("tbody tr")
        expect(row).to_contain_text("you")


def test_a_server_that_tells_nothing_is_said_to(browser: Browser) -> None:
    with background(slow(), Settings(port=0, store="memory", metrics="off")) as url, opened(browser) as tab:
        tab.expected = {404}
        tab.page.goto(f"{url}/#operations")
        expect(tab.page.get_by_role("alert")).to_contain_text("--metrics off")


@pytest.mark.parametrize(("size", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_it_is_for_everybody(browser: Browser, served: RunningServer, size: str, theme: str) -> None:
    post(served.url, "/v1/chat/completions", {**HELLO, "max_tokens": 4})
    with opened(browser, size, theme) as tab:  # type: ignore[arg-type]
        tab.page.goto(f"{served.url}/#operations")
        expect(tab.page.get_by_label("Recent requests").locator("tbody tr").first).to_be_visible()
        assert not violations(tab.page) + wider(tab.page)
