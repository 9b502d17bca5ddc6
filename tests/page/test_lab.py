"""The dialect lab, in a real browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.conftest import RunningServer
from tests.http.test_parse_answer import TEMPLATE
from tests.page.browser import Tab, opened, violations
from tests.page.overflow import wider


@pytest.fixture
def page(browser: Browser, served: RunningServer) -> Iterator[Page]:
    with opened(browser) as tab:
        yield start(tab, served)


def start(tab: Tab, served: RunningServer, dialect: str = "qwen3_coder") -> Page:
    tab.page.goto(f"{served.url}/#lab/{dialect}")
    expect(tab.page.locator(".found-name")).to_have_text(dialect)
    return tab.page


def test_an_example_is_read_in_its_parts(page: Page) -> None:
    parts = page.locator(".raw .part")
    expect(parts).to_have_class(["part reasoning", "part text", "part call"])
    expect(parts.first.locator(".marker").first).to_have_text("<think>\n")
    expect(page.locator(".tab-panel code")).to_have_text("get_weather")
    expect(page.locator(".verdict")).to_contain_text("the same")


def test_what_is_typed_is_read(page: Page) -> None:
    page.get_by_label("Model output").fill("<think>One</think>Two")
    expect(page.locator(".raw .part")).to_have_text(["<think>One</think>", "Two"])
    page.get_by_label("Parse as").select_option("plain")
    expect(page.locator(".raw .part")).to_have_text(["<think>One</think>Two"])


def test_the_size_of_the_pieces_changes_the_events_and_not_the_answer(page: Page) -> None:
    page.get_by_role("tab", name="Events").click()
    few = page.locator(".events tbody tr").count()
    page.get_by_label("Chunk size").fill("0")
    expect(page.get_by_role("tab", name="Events")).not_to_have_text(f"Events ({few})")
    expect(page.locator(".events tbody tr").first).to_contain_text("reasoning")
    expect(page.locator(".verdict")).to_contain_text("the same")


def test_events_come_as_the_text_is_read(page: Page) -> None:
    page.get_by_role("tab", name="Events").click()
    page.get_by_label("Parsed so far").fill("0")
    expect(page.locator(".events tbody tr:visible")).to_have_count(0)
    page.get_by_role("button", name="Play").click()
    expect(page.locator(".raw .part.call")).to_be_visible()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_template_is_looked_at(page: Page) -> None:
    page.get_by_label("Parse as").select_option("A custom chat template")
    page.get_by_label("Chat template").fill(TEMPLATE)
    expect(page.locator(".found")).to_contain_text("the chat template has <tool_call>")
    expect(page.locator(".found")).to_contain_text("starts inside reasoning")
    page.get_by_role("tab", name="Prompt").click()
    expect(page.locator(".tab-panel pre")).to_contain_text("<|im_start|>user")
    page.get_by_label("Chat template").fill("{% for")
    expect(page.locator(".found .field-error")).to_contain_text("error in line 1")


def test_the_grammar_and_the_declaration_are_shown(page: Page) -> None:
    page.get_by_role("tab", name="Grammar").click()
    expect(page.locator(".tab-panel pre")).to_contain_text("start:")
    page.get_by_role("tab", name="Declaration").click()
    expect(page.locator(".tab-panel pre")).to_contain_text("TaggedCalls")


def test_tools_that_are_no_json_are_told_of(page: Page) -> None:
    page.get_by_text("Tools of the request").click()
    page.get_by_label("Tools, as JSON").fill("[")
    expect(page.get_by_role("alert")).to_contain_text("Not valid JSON")


@pytest.mark.parametrize(("size", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_it_is_for_everybody(browser: Browser, served: RunningServer, size: str, theme: str) -> None:
    with opened(browser, size, theme) as tab:  # type: ignore[arg-type]
        page = start(tab, served)
        assert not violations(page) + wider(page)
        page.get_by_role("tab", name="Events").click()
        assert not violations(page) + wider(page)
