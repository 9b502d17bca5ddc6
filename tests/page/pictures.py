"""Pictures of the page, for README.md and docs/page.md: `python -m tests.page.pictures`, or `make pictures`.

What is on them is said by a model of the tests, so that they change only when the page does.
"""

from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.page.browser import Tab, launched, opened
from tests.page.model import make_model

FOLDER = Path("docs/pictures")
QUESTION = "Merge two sorted lists in Python."
WEATHER = "What is the weather in Lisbon?"


def take(tab: Tab, name: str) -> None:
    tab.page.wait_for_timeout(300)
    tab.page.screenshot(path=FOLDER / f"{name}.png")


def talk(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Call a tool").click()
    answer = tab.say(WEATHER)
    answer.get_by_label("Result of get_weather").fill('{"degrees": 21, "sky": "clear"}')
    answer.get_by_role("button", name="Send the result").click()
    tab.answers.nth(1).locator(".facts").wait_for()
    tab.say(QUESTION)


def draw(browser: Browser, url: str, size: str, theme: Literal["light", "dark"]) -> None:
    with opened(browser, size, theme) as tab:
        tab.open(url)
        if size == "desktop" and theme == "light":
            take(tab, "welcome")
        talk(tab)
        take(tab, f"chat-{size}-{theme}")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    # A pace that a person can follow, and figures below the answers as a small model has them.
    engine = make_model(interval=0.002)
    engine.card.name = "demo"
    with background(engine, Settings(port=0, store="memory")) as url, launched() as browser:
        draw(browser, url, "desktop", "light")
        draw(browser, url, "desktop", "dark")
        draw(browser, url, "phone", "dark")


if __name__ == "__main__":
    main()
