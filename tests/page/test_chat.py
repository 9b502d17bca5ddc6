"""What a person does in the chat, in a real browser."""

import json
import re
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer
from tests.mcp.support import SERVERS
from tests.media import samples
from tests.page.browser import Tab, opened
from tests.page.model import THOUGHT, TOUR, make_model
from tests.support.parrot import messages_of
from tests.support.wait import becomes


def test_an_answer_is_drawn_and_kept(tab: Tab) -> None:
    answer = tab.say("tour")
    expect(answer.get_by_role("heading", name="Two sorted lists")).to_be_visible()
    expect(answer.locator("pre code")).to_contain_text("return out + a + b")
    expect(answer.locator("td").last).to_have_text("19 ms")
    expect(answer.locator("li li").first).to_have_text("copy them first")
    expect(answer.get_by_role("link", name="the manual")).to_have_attribute(
        "rel", "noopener noreferrer nofollow"
    )
    expect(answer.locator(".facts")).to_contain_text("tokens")
    expect(tab.page.locator(".chats a")).to_have_text("tour")
    tab.page.reload()
    expect(tab.answers.get_by_role("heading").last).to_have_text("Two sorted lists")


GROWING = """# One

two **three** `four` | five
--- | ---
1 | 2

- six
  - seven

  eight
- nine

- ten

1. eleven

2. twelve

```js
const a = `b`;

// c
```
> d
e

---
f\x20\x20
g
1. h
2) i
~~~
open"""
HEADINGS = "### a\n# b\n#### c\n###### d\n## e\n> # f\n\ng"
DRAWN_IN_PIECES = """async (text) => {
  const { MarkdownView, render } = await import(new URL("page/markdown.js", location.href));
  const whole = render(text);
  return [1, 2, 3, 7, 29].filter((step) => {
    const view = new MarkdownView();
    for (let end = step; end < text.length; end += step) view.update(text.slice(0, end));
    view.update(text, true);
    return !view.element.isEqualNode(whole);
  });
}"""


def test_a_text_that_grows_is_drawn_as_one_that_is_there(tab: Tab) -> None:
    """The same elements come of it, wherever it is cut."""
    for text in (GROWING, TOUR, HEADINGS):
        assert tab.page.evaluate(DRAWN_IN_PIECES, text) == []


def test_reasoning_is_folded_away(tab: Tab) -> None:
    answer = tab.say("think")
    expect(answer.locator(".markdown")).to_have_text("Done.")
    expect(answer.get_by_text(THOUGHT)).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.get_by_text(THOUGHT)).to_be_visible()


def test_a_call_is_drawn_and_its_result_given_by_hand(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Call a tool").click()
    answer = tab.say("What is the weather in Lisbon?")
    expect(answer.locator(".call code").first).to_have_text("get_weather")
    expect(answer.locator(".call pre").first).to_contain_text('"city": "Lisbon"')
    answer.get_by_label("Result of get_weather").fill('{"degrees": 21}')
    answer.get_by_role("button", name="Send the result").click()
    expect(tab.answers.last).to_contain_text("It is 21 °C in Lisbon")
    expect(tab.page.locator("article.tool pre")).to_have_text('{"degrees": 21}')


def test_esc_stops_and_the_answer_can_be_made_again(tab: Tab, served: RunningServer) -> None:
    tab.input.fill("beginning HANG")
    tab.input.press("Enter")
    expect(tab.answers.last).to_contain_text("beginning")
    expect(tab.page.get_by_role("button", name="Stop")).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.answers.last.locator(".facts")).to_contain_text("stopped")
    assert becomes(lambda: served.engine.live == 0)
    tab.answers.last.get_by_role("button", name="Regenerate").click()
    expect(tab.answers.last.locator(".ways")).to_contain_text("2 / 2")
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.page.get_by_role("button", name="Send")).to_be_visible()


def test_an_answer_that_is_left_is_stopped_and_kept(tab: Tab, served: RunningServer) -> None:
    tab.input.fill("beginning HANG")
    tab.input.press("Enter")
    expect(tab.answers.last).to_contain_text("beginning")
    tab.page.get_by_role("button", name="New chat", exact=True).click()
    assert becomes(lambda: served.engine.live == 0)
    expect(tab.say("another").locator(".markdown")).to_have_text("another")
    tab.page.get_by_role("link", name="beginning HANG").click()
    expect(tab.answers.last.locator(".facts")).to_contain_text("stopped")


def test_an_edited_message_is_a_branch_and_the_other_is_not_lost(tab: Tab) -> None:
    tab.say("one")
    tab.say("two")
    first = tab.page.locator("article.user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    tab.page.get_by_role("textbox", name="Edit").fill("three")
    tab.page.get_by_role("button", name="Send").first.click()
    expect(tab.answers.last.locator(".markdown")).to_have_text("three")
    expect(tab.answers).to_have_count(1)
    tab.page.get_by_role("button", name="Previous version").click()
    expect(tab.answers).to_have_count(2)
    expect(tab.answers.last.locator(".markdown")).to_have_text("two")


def test_an_answer_may_be_edited_and_branched_off(tab: Tab, served: RunningServer) -> None:
    answer = tab.say("one")
    answer.get_by_role("button", name="Edit").click()
    tab.page.get_by_role("textbox", name="Edit").fill("another")
    tab.page.get_by_role("button", name="Save").click()
    expect(tab.answers.last.locator(".markdown")).to_have_text("another")
    tab.answers.last.get_by_role("button", name="Continue in a new chat").click()
    expect(tab.page.locator(".chats a")).to_have_count(2)
    tab.say("more")
    assert [text for _, text in messages_of(served.engine.jobs[-1])] == ["one", "another", "more"]


def test_settings_are_what_is_asked(tab: Tab, served: RunningServer) -> None:
    page = tab.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    tab.set_up("Sampling")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Seed").fill("7")
    answer = tab.say("abcdef")
    expect(answer.locator(".markdown")).to_have_text("abc")
    expect(answer.locator(".facts")).to_contain_text("cut off at the token limit")
    job = served.engine.jobs[-1]
    assert (job.sampling.temperature, job.sampling.max_tokens, job.sampling.seed) == (0.5, 3, 7)
    assert messages_of(job)[0] == ("system", "Be brief.")


def test_a_schema_is_checked_as_one_types(tab: Tab) -> None:
    page = tab.page
    tab.set_up("Response format")
    page.get_by_label("Response format").select_option("schema")
    field, locator = page.get_by_label("JSON Schema"), page.locator("#set-schema-said")
    field.fill('{"type": "object",}')
    expect(locator).to_contain_text("Line 1, column 19: remove the comma")
    field.fill('{"type": "text"}')
    expect(locator).to_contain_text('"text" is not a valid type')
    field.fill('{"type": "object", "properties": {"a": {"not": {"type": "string"}}}}')
    # Only the server knows that.
    expect(locator).to_contain_text("#/properties/a/not")
    field.fill('{"type": "object"}')
    expect(locator).to_have_text("Valid.")


def test_files_go_along_and_pictures_are_refused_with_a_reason(tab: Tab, served: RunningServer) -> None:
    tab.attach("notes.txt", "text/plain", b"Ship it.")
    expect(tab.page.locator(".attached")).to_contain_text("notes.txt")
    tab.attach("cat.png", "image/png", b"\x89PNG")
    expect(tab.page.get_by_role("alert")).to_contain_text("takes only text")
    tab.say("look")
    assert "Ship it." in messages_of(served.engine.jobs[-1])[-1][1]


def test_a_model_that_sees_is_shown_pictures(browser: Browser) -> None:
    engine = ScriptedEngine(say("Red."), modalities=("image",))
    with background(engine, Settings(port=0, store="memory")) as url, opened(browser) as tab:
        tab.open(url)
        tab.attach("cat.png", "image/png", samples.picture("png"))
        tab.say("What is this?")
        expect(tab.page.locator("img.picture")).to_have_js_property("naturalWidth", 6)
        assert [span.media.data for span in engine.jobs[-1].media] == [samples.picture("png")]


def test_the_inspector_tells_of_pictures_without_their_data(browser: Browser) -> None:
    engine = ScriptedEngine(say("Red."), modalities=("image",))
    with background(engine, Settings(port=0, store="memory")) as url, opened(browser) as tab:
        tab.open(url)
        tab.attach("cat.png", "image/png", samples.picture("png", 256, 256))
        tab.say("What is this?").get_by_role("button", name="Inspect").click()
        tab.page.get_by_role("dialog").get_by_role("tab", name="Request").click()
        shown = tab.page.get_by_role("dialog").get_by_label("command", exact=True)
        expect(shown).to_contain_text(re.compile(r"base64,iVBORw0KGgoAAAAN… \(\d KiB\)"))


def test_servers_of_tools_are_asked_by_the_server(browser: Browser, tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": [str(SERVERS / "tools.py"), "stdio"]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"sums": entry}}))
    settings = Settings(port=0, store="memory", mcp_config=str(config))
    with background(make_model(), settings) as url, opened(browser) as tab:
        tab.open(url)
        tab.set_up("Tools")
        tab.page.get_by_label("sums").check()
        answer = tab.say("add")
        expect(answer.locator(".call .badge")).to_have_text("sums: done")
        expect(answer.locator(".call pre").last).to_have_text("3")
        expect(answer.locator(".markdown")).to_have_text("The tool says: 3")
        expect(answer.get_by_role("button", name="Send the result")).to_have_count(0)
        expect(tab.say("and now?").locator(".markdown")).to_have_text("and now?")


def test_export(tab: Tab) -> None:
    tab.say("think")
    for kind in ("Markdown", "JSON"):
        tab.page.get_by_role("button", name="Export").click()
        with tab.page.expect_download() as download:
            tab.page.get_by_role("button", name=kind).click()
        text = Path(download.value.path()).read_text()
        if kind == "JSON":
            assert [node["role"] for node in json.loads(text)["nodes"]] == ["user", "assistant"]
        else:
            assert text.startswith("# think\n")
            assert THOUGHT in text


def test_keys(tab: Tab) -> None:
    page = tab.page
    tab.input.fill("a")
    tab.input.press("Shift+Enter")
    tab.input.press_sequentially("b")
    expect(tab.input).to_have_value("a\nb")
    tab.input.press("Enter")
    expect(tab.answers.last).to_contain_text("a")
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Command").fill("new chat")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="What would you like to ask?")).to_be_visible()
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Command").fill("chat: a")
    page.keyboard.press("Enter")
    expect(tab.answers).to_have_count(1)


def test_a_chat_is_deleted(tab: Tab) -> None:
    tab.say("gone")
    tab.page.locator(".chats li").hover()
    tab.page.get_by_role("button", name="Delete gone").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(tab.page.locator(".chats li")).to_have_count(0)
    expect(tab.page.get_by_role("heading", name="What would you like to ask?")).to_be_visible()


def test_the_theme_is_switched_and_stays(browser: Browser, served: RunningServer) -> None:
    with opened(browser, theme="dark") as tab:
        page = tab.open(served.url)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("button", name="Switch to light").click()
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light != dark
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
