"""Whether anything on the page is wider than where it stands, so that one would have to scroll sideways."""

from playwright.sync_api import Page

PLACES = "html, main, dialog, .view, .tab-panel, .operation, .lab-columns > div, .column"


def wider(page: Page) -> list[str]:
    texts: list[str] = page.evaluate(
        """(places) => [...document.querySelectorAll(places)]
        .filter((one) => one.scrollWidth > one.clientWidth + 1)
        .map((one) => `${one.tagName}.${one.className}`)""",
        PLACES,
    )
    return texts
