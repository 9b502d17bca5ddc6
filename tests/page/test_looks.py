"""The page by axe-core: no violation, dark and light, on a phone and on a desk."""

from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.conftest import RunningServer
from tests.page.browser import Tab, opened, violations

VIEWS = ("lab", "operations", "api")


def see_conversation(tab: Tab) -> None:
    tab.say("Merge two sorted lists in Python.")
    tab.set_up("Tools")
    tab.page.get_by_role("button", name="Example").last.click()
    tab.set_up("Sampling")
    assert violations(tab.page) == []
    tab.page.get_by_role("button", name="Close settings").click()
    tab.say("What is the weather in Lisbon?")
    tab.say("BREAK")
    tab.answers.first.get_by_text("Reasoning").click()
    assert violations(tab.page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_chat(
    browser: Browser, served: RunningServer, size: str, theme: Literal["light", "dark"]
) -> None:
    with opened(browser, size, theme) as tab:
        tab.open(served.url)
        assert violations(tab.page) == []
        see_conversation(tab)
        tab.page.keyboard.press("Control+k")
        tab.page.get_by_role("dialog").wait_for()
        assert violations(tab.page) == []


@pytest.mark.parametrize("view", VIEWS)
def test_the_other_views(browser: Browser, served: RunningServer, view: str) -> None:
    for theme in ("light", "dark"):
        with opened(browser, "desktop", theme) as tab:
            tab.page.goto(f"{served.url}/#{view}")
            settle(tab.page, view)
            assert violations(tab.page) == []


def settle(page: Page, view: str) -> None:
    expect(page.locator(f".{view}-view > *").first).to_be_visible()
    page.wait_for_load_state("networkidle") if view == "api" else page.wait_for_timeout(200)


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(browser: Browser, served: RunningServer, size: str) -> None:
    with opened(browser, size) as tab:
        tab.open(served.url)
        tab.say("tour")
        tab.say("a" * 300 + "\n```\n" + "b" * 300 + "\n```\n|" + "c" * 300 + "|\n|-|\n|1|")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        wide = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).length"
        assert tab.page.locator("article").evaluate_all(wide) == 0


def test_who_hears_the_page_is_told(tab: Tab) -> None:
    tab.say("hello")
    expect(tab.page.locator("#announcer")).to_contain_text("The answer is complete. hello")
