"""The list of operations, in a real browser: each of them can be tried with one click."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer
from tests.http.test_doc_examples import MANAGING, make_able_engine
from tests.page.browser import Tab, opened, violations
from tests.page.overflow import wider

STREAMED = "post /v1/chat/completions"
APART = {"post /v1/engine/pause", "ws /v1/responses", *MANAGING}
"""The engine would do nothing any more; and a socket has no status."""


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "poet").mkdir()
    engine = make_able_engine()
    settings = Settings(port=0, store="memory", lora_dir=str(folder), files_dir=str(folder / "files"))
    with background(engine, settings) as url:
        yield RunningServer(engine, url)


@pytest.fixture
def tab(browser: Browser, able: RunningServer) -> Iterator[Tab]:
    with opened(browser) as tab:
        tab.page.goto(f"{able.url}/docs")
        tab.page.locator(".operation form").wait_for()
        yield tab


def choose(page: Page, name: str) -> None:
    """The operation, as a click on its link does."""
    page.evaluate("name => { location.hash = `api/${encodeURIComponent(name)}`; }", name)
    method, path = name.split(" ")
    expect(page.locator(".operation-head code")).to_have_text(path)
    expect(page.locator(".operation-head .method")).to_have_class(f"method {method}")


TRY_ALL = """async (apart) => {
  const failed = [];
  const until = async (test) => {
    const most = performance.now() + 15000;
    while (!test() && performance.now() < most) await new Promise((done) => setTimeout(done, 4));
  };
  const find = (what) => document.querySelector(what);
  for (const link of document.querySelectorAll(".operation-link")) {
    const name = decodeURIComponent(link.hash.slice(5));
    if (apart.includes(name)) continue;
    const shown = find(".operation form");
    link.click();
    await until(() => find(".operation form") !== shown);
    find(".operation button[type=submit]").click();
    await until(() => find(".reply-head .badge, .reply .field-error") && find(".operation button[type=submit]").textContent === "Send");
    if (!find(".reply-head .badge")?.textContent.startsWith("200")) failed.push(`${name}: ${find(".reply").textContent}`);
  }
  return failed;
}"""  # noqa: E501


def test_every_operation_answers_to_one_click(tab: Tab) -> None:
    assert tab.page.locator(".operation-link").count() > 85
    assert not tab.page.evaluate(TRY_ALL, sorted(APART))


def test_a_stream_is_text_and_its_events_can_be_seen(tab: Tab) -> None:
    page = tab.page
    choose(page, STREAMED)
    page.locator(".operation button[type=submit]").click()
    expect(page.get_by_label("Answer as text")).to_have_text("Red.")
    page.get_by_role("tab", name="Events").click()
    expect(page.get_by_label("Raw events")).to_contain_text("[DONE]")


def test_the_operations_can_be_filtered(tab: Tab) -> None:
    page = tab.page
    page.get_by_label("Filter operations").fill("rerank")
    expect(page.locator(".operation-link")).to_have_count(2)
    expect(page.get_by_role("status").first).to_contain_text("2 of")
    page.locator(".operation-link").first.press("Enter")
    expect(page.locator(".operation-head code")).to_have_text("/v1/rerank")


def test_a_body_that_is_no_json_is_not_sent(tab: Tab, able: RunningServer) -> None:
    page = tab.page
    choose(page, STREAMED)
    before = len(able.engine.jobs)
    page.get_by_label("Body").fill('{"messages": [')
    page.get_by_label("Body").press("Control+Enter")
    expect(page.get_by_role("alert")).to_contain_text("Not valid JSON")
    assert len(able.engine.jobs) == before
    page.get_by_role("button", name="Example").click()
    page.get_by_label("Body").press("Control+Enter")
    expect(page.get_by_label("Answer as text")).to_have_text("Red.")


def test_what_is_refused_is_shown_as_it_is(tab: Tab) -> None:
    page = tab.page
    tab.expected = {400, 404}
    choose(page, STREAMED)
    page.get_by_label("Body").fill('{"messages": 5}')
    page.locator(".operation button[type=submit]").click()
    expect(page.locator(".reply-head .badge.danger")).to_contain_text("400")
    expect(page.locator(".reply .json")).to_contain_text('"param": "messages"')
    choose(page, "get /v1/responses/{id}")
    page.get_by_label("id in the path").fill("resp_nobody")
    page.locator(".operation button[type=submit]").click()
    expect(page.locator(".reply-head .badge.danger")).to_contain_text("404")


def test_a_request_is_code_in_three_languages(tab: Tab, able: RunningServer) -> None:
    page = tab.page
    choose(page, STREAMED)
    page.get_by_text("As code").click()
    code = page.locator(".as-code pre")
    expect(code).to_contain_text(f"curl -N '{able.url}/v1/chat/completions'")
    page.get_by_role("tab", name="Python").click()
    expect(code).to_contain_text("client.chat.completions.create(")
    expect(code).to_contain_text("stream=True")
    page.get_by_role("tab", name="JavaScript").click()
    expect(code).to_contain_text("await fetch(")


def test_a_file_of_mine_is_sent(tab: Tab) -> None:
    page = tab.page
    choose(page, "post /v1/files")
    chosen = {"name": "mine.txt", "mimeType": "text/plain", "buffer": b"mine"}
    page.locator(".operation input[type=file]").set_input_files(chosen)  # type: ignore[arg-type]
    page.locator(".operation button[type=submit]").click()
    expect(page.locator(".reply .json")).to_contain_text('"filename": "mine.txt"')


def test_a_socket_is_tried(tab: Tab) -> None:
    page = tab.page
    choose(page, "ws /v1/responses")
    page.get_by_role("button", name="Connect and send").click()
    expect(page.get_by_label("Answer as text")).to_have_text("Red.")


def test_a_server_with_keys_asks_for_one(browser: Browser) -> None:
    with (
        background(ScriptedEngine(say("hi")), Settings(port=0, api_key=["k"])) as url,
        opened(browser) as tab,
    ):
        tab.expected = {401}
        page = tab.page
        page.goto(f"{url}/docs#api/{'get%20%2Fv1%2Fmodels'}")
        page.get_by_role("textbox", name="API key").fill("k")
        page.get_by_role("button", name="Use this key").click()
        page.locator(".operation button[type=submit]").click()
        expect(page.locator(".reply-head .badge")).to_contain_text("200")


@pytest.mark.parametrize(("size", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_it_is_for_everybody(browser: Browser, able: RunningServer, size: str, theme: str) -> None:
    with opened(browser, size, theme) as tab:  # type: ignore[arg-type]
        tab.page.goto(f"{able.url}/docs")
        tab.page.locator(".operation button[type=submit]").click()
        expect(tab.page.get_by_label("Answer as text")).to_have_text("Red.")
        tab.page.get_by_text("As code").click()
        assert not violations(tab.page) + wider(tab.page)
