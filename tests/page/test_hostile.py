"""What a model, a tool or a file says is text, whatever it looks like."""

import json

from playwright.sync_api import expect

from tests.http.conftest import RunningServer
from tests.page.browser import Tab

HIT = "window.hit=1"
CORPUS = [
    f"<script>{HIT}</script>",
    f"<img src=x onerror={HIT}>",
    f"<svg onload={HIT}><animate onbegin={HIT} attributeName=x dur=1s>",
    f"<iframe srcdoc='<script>parent.{HIT}</script>'></iframe>",
    f"<details open ontoggle={HIT}><summary>a</summary></details>",
    f"<body onload={HIT}><form action=javascript:{HIT}><button autofocus onfocus={HIT}>",
    "<style>@import 'http://evil.example/a.css';</style><link rel=stylesheet href=http://evil.example>",
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror={HIT}&gt;'>",
    f"[a](javascript:{HIT})",
    f"[a](JaVaScRiPt:{HIT})",
    f"[a](java\tscript:{HIT})",
    f"[a](data:text/html,<script>{HIT}</script>)",
    f"[a](vbscript:{HIT})",
    f"[a](&#106;avascript:{HIT})",
    f'[a](https://example.org"onmouseover={HIT})',
    f"<javascript:{HIT}>",
    f'![a](x"onerror="{HIT})',
    "![pixel](http://evil.example/pixel.png)",
    f'```html"onmouseover={HIT}\n<script>{HIT}</script>\n```',
    f"| <img src=x onerror={HIT}> |\n| --- |\n| [a](javascript:{HIT}) |",
    f"# <img src=x onerror={HIT}>",
    f"1. <b onclick={HIT}>b</b>\n   > <u>u</u>",
    f"`<img src=x onerror={HIT}>` **<i>i</i>** ~~<script>{HIT}</script>~~",
    "\u202e\u2066 a \u0000 b \ufffe \ud7ff",
    f"{{{{constructor.constructor('{HIT}')()}}}} ${{{HIT}}}",
]
FOREIGN = "script, img, iframe, object, embed, style, link, form[action], math, base, meta, [style*=url]"
STATE = f"""() => ({{
  hit: window.hit ?? null,
  foreign: [...document.querySelectorAll(".thread :is({FOREIGN})")].map((one) => one.outerHTML),
  handlers: [...document.querySelectorAll("*")].flatMap((one) =>
    one.getAttributeNames().filter((name) => name.startsWith("on"))),
  links: [...document.querySelectorAll(".thread a")].map((one) => one.getAttribute("href")),
}})"""


def check(tab: Tab) -> None:
    result = tab.page.evaluate(STATE)
    assert (result["hit"], result["foreign"], result["handlers"]) == (None, [], [])
    assert all(link.startswith(("https://", "http://", "mailto:")) for link in result["links"]), result[
        "links"
    ]


def test_answers_titles_and_history(tab: Tab) -> None:
    """All at once, as one conversation; the first is its title, too."""
    tab.say(CORPUS[0])
    for start in range(1, len(CORPUS), 6):
        tab.say("\n\n".join(CORPUS[start : start + 6]))
    for button in tab.page.locator("article :is(a, summary, pre):visible").all():
        button.hover()
    check(tab)
    tab.page.reload()
    expect(tab.answers).to_have_count(1 + -(-(len(CORPUS) - 1) // 6))
    expect(tab.page.locator(".chats a")).to_have_text(CORPUS[0])
    check(tab)


def test_reasoning_and_calls(tab: Tab) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tab.set_up("Tools")
    tab.page.get_by_label("Functions").fill(json.dumps(tools))
    hostile = json.dumps({"name": "f", "arguments": {one: one for one in CORPUS[:8]}})
    answer = tab.say(f"<think>\n{CORPUS[1]}\n</think>\n<tool_call>\n{hostile}\n</tool_call>")
    answer.get_by_label("Result of f").fill(CORPUS[1])
    answer.get_by_role("button", name="Send the result").click()
    expect(tab.answers.last).to_contain_text("The tool says")
    check(tab)


def test_names_of_tools_models_and_files(tab: Tab, served: RunningServer) -> None:
    """Of streams and lists that no server of ours would give."""
    name = CORPUS[1]
    chunks = [
        {
            "model": name,
            "choices": [
                {
                    "index": 0,
                    "delta": {
                        "tool_calls": [
                            {"index": 0, "id": name, "function": {"name": name, "arguments": name}}
                        ]
                    },
                }
            ],
        },
        {"model": name, "choices": [{"index": 0, "delta": {}, "finish_reason": name}]},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": name}, {"id": "b"}]}))
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events),
    )
    tab.page.reload()
    expect(tab.page.get_by_label("Model", exact=True).locator("option").first).to_have_text(name)
    tab.attach(f"{name}.txt", "text/plain", b"x")
    expect(tab.say("hi").locator(".call-head code")).to_have_text(name)
    check(tab)


def test_an_error_of_a_stranger(tab: Tab) -> None:
    tab.expected = {418}
    error = {"error": {"message": CORPUS[1], "code": CORPUS[1], "param": CORPUS[1]}}
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=418, json=error))
    expect(tab.say("hi").get_by_role("alert")).to_contain_text("<img src=x")
    check(tab)


LONG = (
    *("[" * 50_000, "*a" * 25_000, "**a _b" * 10_000, "`" * 20_001 + "a", "> " * 20_000, "- " * 20_000),
    *("[a](" * 15_000, "# a" + " " * 50_000 + "b", "|a" * 20_000 + "\n" + "|-" * 20_000, "\\" * 50_000),
    *("1. " * 15_000, "~~~" + "`" * 30_000, "http://" * 8_000, "![" * 20_000, "_a " * 20_000 + "_"),
    *(" " * 50_000 + "x", "- a\n" * 10_000, "~~a " * 15_000, "a\n|" * 10_000, "[a](b " * 10_000),
)
DRAW = """async (text) => {
  const { MarkdownView } = await import(new URL("page/markdown.js", location.href));
  const begun = performance.now();
  const view = new MarkdownView();
  view.update(text);
  view.update(text, true);
  return performance.now() - begun;
}"""


def test_no_text_takes_long_to_draw(tab: Tab) -> None:
    took = {text[:8]: tab.page.evaluate(DRAW, text) for text in LONG}
    assert max(took.values()) < 5000, took


def test_the_browser_reads_no_text_as_html_even_if_told_to(tab: Tab) -> None:
    """The policy of the page forbids it to scripts of its own, too."""
    refused = tab.page.evaluate(
        """() => {
        try { document.body.insertAdjacentHTML("beforeend", "<b>a</b>"); } catch { return true; }
        return false;
      }"""
    )
    tab.complaints = [one for one in tab.complaints if "TrustedHTML" not in one]
    assert refused
