"""Chromium, driven over its own protocol, and a page in it whose every complaint is heard."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, FilePayload, Locator, Page, Request, sync_playwright

AXE = Path("build/node/node_modules/axe-core/axe.min.js")
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WAIT_MS = 30_000
"""Ten times what anything takes on a machine that is busy."""
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """Ends with its event loop, so that tests which have one of their own may follow."""
    path = find_browser()
    if path is None:
        pytest.skip("THE PAGE WAS NOT TESTED: there is no Chromium; `apt-get install chromium` brings one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


class Tab:
    """A page, what it complained about, and where it asked."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.expected: set[int] = set()
        """Statuses of replies that the browser may complain about."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        status = re.search(r"status of (\d+)", message.text)
        if message.type == "error" and not (status and int(status[1]) in self.expected):
            self.complaints.append(message.text)

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob"):
            self.hosts.add(parts.netloc)

    def open(self, url: str) -> Page:
        self.page.goto(url)
        self.page.get_by_label("The model is ready").wait_for()
        return self.page

    @property
    def input(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def answers(self) -> Locator:
        return self.page.locator("article.assistant")

    def attach(self, name: str, kind: str, data: bytes) -> None:
        self.page.locator("input[type=file]").set_input_files(
            FilePayload(name=name, mimeType=kind, buffer=data)
        )

    def set_up(self, section: str) -> None:
        """Shows a section of the settings."""
        if not self.page.locator(".settings").count():
            self.page.get_by_role("button", name="Settings").click()
        self.page.locator(".settings summary", has_text=section).evaluate(
            "(one) => { one.parentElement.open = true; }"
        )

    def say(self, text: str) -> Locator:
        """Sends a message; its answer, once it is over."""
        before = self.answers.count()
        self.input.fill(text)
        self.input.press("Enter")
        self.page.locator("article.assistant:not(.live)").nth(before).wait_for()
        return self.answers.last


@contextmanager
def opened(
    browser: Browser, size: str = "desktop", theme: Literal["light", "dark"] = "light", **more: Any
) -> Iterator[Tab]:
    """Nothing is kept from one to the next, and none may end with a complaint or have asked elsewhere."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, has_touch=size == "phone", **more
    )
    context.set_default_timeout(WAIT_MS)
    tab = Tab(context.new_page())
    try:
        yield tab
        assert not tab.complaints, tab.complaints
        assert all(host.startswith("127.0.0.1:") for host in tab.hosts), tab.hosts
    finally:
        context.close()


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with what is shown."""
    if not AXE.exists():
        pytest.skip("ACCESSIBILITY WAS NOT TESTED: axe-core comes with `make build/node`")
    page.evaluate(AXE.read_text())
    # What is still fading in has another contrast than in a moment.
    page.evaluate(
        "document.getAnimations().forEach((one) => { try { one.finish(); } catch { one.cancel(); } })"
    )
    result = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes']][:3]}" for one in result]
