"""Keys, errors, streams that break, a server that is not ready: what the page says then."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer
from tests.page.browser import Tab, opened
from tests.page.model import make_model

KEY = "sk-right-0123456789"
BEGUN = 'data: {"choices": [{"index": 0, "delta": {"content": "begun"}}]}\n\n'


def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(browser: Browser) -> None:
    with (
        background(make_model(), Settings(port=0, store="memory", api_key=[KEY])) as url,
        opened(browser) as tab,
    ):
        tab.expected = {401}
        page = tab.page
        page.goto(url)
        page.get_by_label("API key", exact=True).and_(page.locator("input")).fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("key")
        page.locator("#key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_label("The model is ready")).to_be_visible()
        tab.say("hello")
        page.reload()
        expect(page.get_by_label("The model is ready")).to_be_visible()
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        assert KEY not in page.content()


def test_who_gives_no_key_can_give_it_later(browser: Browser) -> None:
    with (
        background(make_model(), Settings(port=0, store="memory", api_key=[KEY])) as url,
        opened(browser) as tab,
    ):
        tab.expected = {401}
        tab.page.goto(url)
        tab.page.get_by_role("dialog").wait_for()
        tab.page.keyboard.press("Escape")
        tab.page.get_by_role("button", name="Enter it").click()
        tab.page.locator("#key").fill(KEY)
        tab.page.keyboard.press("Enter")
        expect(tab.say("hello").locator(".markdown")).to_have_text("hello")


def test_an_engine_that_fails_in_the_middle(tab: Tab) -> None:
    answer = tab.say("half BREAK")
    expect(answer.locator(".markdown")).to_contain_text("half")
    expect(answer.get_by_role("alert")).to_be_visible()
    answer.get_by_role("button", name="Try again").click()
    expect(tab.answers.last.locator(".ways")).to_contain_text("2 / 2")


@pytest.mark.parametrize("cut", [BEGUN, BEGUN + 'data: {"choi'], ids=["between events", "within an event"])
def test_a_stream_that_is_cut_off(tab: Tab, cut: str) -> None:
    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=cut)

    tab.page.route("**/v1/chat/completions", answer)
    locator = tab.say("hello")
    expect(locator.locator(".markdown")).to_have_text("begun")
    expect(locator.get_by_role("alert")).to_contain_text("The stream ended")


def test_a_server_that_is_gone(browser: Browser) -> None:
    with opened(browser) as tab:
        with background(make_model(), Settings(port=0, store="memory")) as url:
            tab.open(url)
        tab.input.fill("anybody?")
        tab.input.press("Enter")
        expect(tab.page.get_by_role("alert")).to_contain_text("Cannot reach")
        expect(tab.page.get_by_text("Cannot reach the server.").first).to_be_visible()
        assert all("ERR_CONNECTION_REFUSED" in one for one in tab.complaints)
        tab.complaints.clear()


def test_what_the_server_refuses_is_said_in_its_words(tab: Tab) -> None:
    tab.expected = {400}
    tab.set_up("Response format")
    tab.page.get_by_label("Response format").select_option("schema")
    tab.page.get_by_label("JSON Schema").fill('{"properties": {"a": {"not": {"type": "string"}}}}')
    expect(tab.say("hi").get_by_role("alert")).to_contain_text("cannot be enforced")


def test_a_model_that_is_being_loaded(tab: Tab, served: RunningServer) -> None:
    state: dict[str, Any] = {"value": "loading", "progress": 0.42}

    def models(route: Route) -> None:
        listed = {"object": "list", "data": [{"id": "parrot", "object": "model", "status": state}]}
        route.fulfill(json=listed)

    tab.page.route("**/v1/models", models)
    tab.page.reload()
    expect(tab.page.locator(".model-state")).to_contain_text("is being loaded, 42 %")
    expect(tab.page.get_by_role("progressbar")).to_have_attribute("value", "42")
    state.update(value="loaded")
    expect(tab.page.get_by_label("The model is ready")).to_be_visible()


def test_a_server_whose_first_model_is_being_loaded(browser: Browser, served: RunningServer) -> None:
    asked = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) < 3:
            error = {"message": "'parrot' is being loaded (10%); try again soon.", "code": "loading"}
            route.fulfill(status=503, json={"error": error})
        else:
            route.continue_()

    with opened(browser) as tab:
        tab.expected = {503}
        tab.page.route("**/v1/models", answer)
        tab.page.goto(served.url)
        expect(tab.page.locator(".model-state")).to_contain_text("is being loaded, 10 %")
        expect(tab.page.get_by_label("The model is ready")).to_be_visible()


def test_a_slow_stream_is_drawn_as_it_comes(browser: Browser) -> None:
    slow = make_model(interval=0.02)
    with background(slow, Settings(port=0, store="memory")) as url, opened(browser) as tab:
        tab.open(url)
        tab.page.get_by_role("button", name="Call a tool").click()
        tab.input.press("Enter")
        live = tab.page.locator("article.live")
        expect(live.locator(".call-head code")).to_have_text("get_weather")
        expect(live.locator(".call pre").first).to_contain_text('{"ci')
        tab.page.keyboard.press("Escape")
        expect(tab.answers.last.locator(".facts")).to_contain_text("stopped")


def test_an_engine_without_token_ids_answers_all_the_same(tab: Tab) -> None:
    """The inspector shows less then."""
    tab.expected = {400}

    def answer(route: Route) -> None:
        if '"logprobs":true' in (route.request.post_data or ""):
            error = {"message": "There are no token ids.", "code": "unsupported_field", "param": "logprobs"}
            route.fulfill(status=400, json={"error": error})
        else:
            route.continue_()

    tab.page.route("**/v1/chat/completions", answer)
    expect(tab.say("hello").locator(".markdown")).to_have_text("hello")
