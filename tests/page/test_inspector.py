"""The inspector, in a real browser: how an answer of the chat came about."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.conftest import RunningServer
from tests.page.browser import Tab, opened, violations
from tests.page.model import THOUGHT
from tests.page.overflow import wider


@pytest.fixture
def page(tab: Tab) -> Iterator[Page]:
    yield inspected(tab)


def inspected(tab: Tab, text: str = "think") -> Page:
    tab.say(text).get_by_role("button", name="Inspect").click()
    expect(tab.page.locator(".tokens .token").first).to_be_visible()
    return tab.page


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("dialog").get_by_role("tab", name=name).click()


def test_the_answer_is_shown_token_by_token(page: Page) -> None:
    tokens = page.locator(".tokens .token")
    text = "".join(tokens.evaluate_all("all => all.map(one => one.textContent.replace('↵', ''))"))
    assert text.startswith(f"<think>\n{THOUGHT}\n</think>\nDone.")
    expect(tokens.last).to_have_class("token special")


def test_alternatives_come_with_the_pointer_and_the_keys(page: Page) -> None:
    tokens, detail = page.locator(".tokens .token"), page.locator(".token-detail")
    tokens.nth(4).hover()
    expect(detail.locator(".big")).to_have_text("n")
    expect(detail.locator(".chances tr[data-chosen]")).to_contain_text("%")
    assert detail.locator(".chances tr").count() > 1
    tokens.nth(4).press("ArrowRight")
    expect(tokens.nth(5)).to_be_focused()
    expect(detail.locator(".big")).to_have_text("k")
    page.keyboard.press("End")
    expect(detail).to_contain_text("a special token")


def test_the_prompt_is_shown_with_its_special_tokens(page: Page) -> None:
    open_tab(page, "Prompt")
    special = page.locator(".tokens .token.special")
    expect(special.first).to_have_text("<|im_start|>")
    expect(page.locator(".tab-panel").first).to_contain_text("ids that the model received")


def test_parts_of_the_raw_text_are_marked(page: Page) -> None:
    open_tab(page, "Raw text")
    expect(page.locator("dialog .raw .part.reasoning")).to_contain_text(THOUGHT)
    expect(page.locator("dialog .raw .part.text")).to_have_text("Done.")
    page.get_by_role("link", name="Open in the lab").click()
    expect(page.get_by_label("Model output")).to_have_value(f"<think>\n{THOUGHT}\n</think>\nDone.<|im_end|>")


def test_times_are_those_of_the_server_too(page: Page) -> None:
    open_tab(page, "Timings")
    table = page.locator("dialog table")
    expect(table).to_contain_text("queue")
    expect(table).to_contain_text("until this page received it")


def test_the_request_is_code(page: Page, served: RunningServer) -> None:
    open_tab(page, "Request")
    expect(page.locator("dialog .code-block pre")).to_contain_text(f"{served.url}/v1/chat/completions")


@pytest.mark.parametrize(
    "name",
    [
        "Chat Completions",
        "Responses",
        "Messages (Anthropic)",
        "Completions (token ids)",
        "Ollama",
    ],
)
def test_the_same_is_sent_through_another_api(page: Page, name: str) -> None:
    open_tab(page, "Resend")
    page.get_by_label("Through").select_option(name)
    page.get_by_role("dialog").get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_label("New answer")).to_contain_text("Done.")
    same = "The text differs" if name.startswith("Completions") else "The text is the same"
    expect(page.locator("dialog .verdict")).to_contain_text(same)


def test_an_answer_without_a_record_can_be_asked_for_again(tab: Tab) -> None:
    tab.say("think")
    tab.page.reload()
    tab.answers.last.get_by_role("button", name="Inspect").click()
    expect(tab.page.get_by_role("dialog")).to_contain_text("No token ids were recorded")


@pytest.mark.parametrize(("size", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_it_is_for_everybody(browser: Browser, served: RunningServer, size: str, theme: str) -> None:
    with opened(browser, size, theme) as tab:  # type: ignore[arg-type]
        tab.open(served.url)
        page = inspected(tab)
        assert not violations(page) + wider(page)
        for name in ("Prompt", "Raw text", "Request", "Resend"):
            open_tab(page, name)
            page.wait_for_timeout(200)
            assert not violations(page) + wider(page), name
