"""The page in Chromium: the first paint, a thousand tokens a second, and a conversation of 2,000 messages."""

import statistics

from playwright.sync_api import Browser, Page

from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.page.browser import Tab, launched, opened
from tests.page.model import TOUR
from tests.support.parrot import parrot
from tests.torture.page import Row, scaled

PAINT_MS, FRAME_MS, DRAWN_MS = 200, 50, 1000
TOKENS, PACE_S, BURST = 6000, 0.008, 10
"""Ten tokens in eight milliseconds, and a little: more than a thousand a second."""
MESSAGES = 2000
WORDS = [
    " the",
    " quick",
    " brown",
    " fox",
    "\n\n",
    "- item",
    "\n",
    " `code`",
    " **bold**",
    "\n```\n",
    "|",
    " 42",
]
FIRST_ID = END_ID + 1
# Frames are timed by the page itself: how long after one the next came, while an answer is drawn.
WATCH = """() => {
  window.frames_ = [];
  let last = performance.now();
  const next = (now) => {
    window.frames_.push(now - last);
    last = now;
    window.frame_ = requestAnimationFrame(next);
  };
  window.frame_ = requestAnimationFrame(next);
}"""
SEEN = "() => { cancelAnimationFrame(window.frame_); return window.frames_.slice(2); }"
PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0"""
# As the page keeps them, so that it opens them as it opens those of a person.
KEEP = """async ([count, text]) => {
  const { BrowserHistory } = await import(new URL("page/history.js", location.href));
  const { Tree } = await import(new URL("page/tree.js", location.href));
  const tree = new Tree();
  let parent;
  for (let at = 0; at < count; at += 1) {
    const answer = { role: "assistant", content: text, reasoning: "", calls: [] };
    parent = tree.add(parent, at % 2 ? answer : { role: "user", content: `${at}` }).id;
  }
  tree.title = "long";
  await new BrowserHistory().save(tree);
  return tree.id;
}"""
SCROLL = """async () => {
  const scroller = document.querySelector(".scroller");
  for (let at = 0; at < 120; at += 1) {
    scroller.scrollTop -= 150;
    await new Promise(requestAnimationFrame);
  }
}"""


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    settings = Settings(port=0, store="memory")
    with launched() as browser:
        with background(_fast_model(scaled(TOKENS, scale, 500)), settings) as url:
            rows = [_paint(browser, url, scaled(10, scale, 3)), *_stream(browser, url)]
        with background(parrot(), settings) as url:
            return [*rows, *_long(browser, url, scaled(MESSAGES, scale, 200))]


def _fast_model(tokens: int) -> ScriptedEngine:
    """Each word is one token, and what they make up is Markdown of all kinds."""
    ids = [FIRST_ID + (number * 7 + number // 5) % len(WORDS) for number in range(tokens)]

    def answer(job: Job) -> Script:
        return Script([*ids, END_ID], BURST)

    return _with_words(parrot(context=200_000, interval=PACE_S, answer=answer))


def _with_words(engine: ScriptedEngine) -> ScriptedEngine:
    engine.tokenizer = ByteTokenizer(WORDS)
    return engine


def _paint(browser: Browser, url: str, times: int) -> Row:
    """Of a browser that has nothing of the page yet; the median of several."""
    seen = []
    for _ in range(times):
        with opened(browser) as tab:
            tab.open(url)
            seen.append(tab.page.evaluate(PAINT))
    median = statistics.median(seen)
    return Row(
        "the first paint of the page on loopback",
        f"{median:.0f} ms",
        f"under {PAINT_MS} ms",
        0 < median < PAINT_MS,
    )


def _stream(browser: Browser, url: str) -> list[Row]:
    with opened(browser) as tab:
        tab.open(url)
        tab.page.evaluate(WATCH)
        tab.say("go")
        frames = tab.page.evaluate(SEEN)
        facts = tab.answers.last.locator(".facts").inner_text()
        rate = int(facts.split(" tokens/s")[0].rpartition(" ")[2])
        tokens = facts.split(" tokens")[0].rpartition(" ")[2]
    return [
        _frames(f"frames while {tokens} tokens are drawn, {rate} a second", frames),
        Row("tokens that are drawn in a second", f"{rate}", "1,000 at least", rate >= 1000),
    ]


def _frames(what: str, frames: list[float]) -> Row:
    late = sum(one > FRAME_MS for one in frames)
    seen = f"the longest {max(frames):.0f} ms, {late} of {len(frames)} above {FRAME_MS} ms"
    return Row(what, seen, f"none above {FRAME_MS} ms", not late)


def _long(browser: Browser, url: str, messages: int) -> list[Row]:
    with opened(browser) as tab:
        tab.open(url)
        position = tab.page.evaluate(KEEP, [messages, TOUR])
        shown = _open(tab, url, position)
        tab.page.wait_for_timeout(500)
        tab.page.evaluate(WATCH)
        tab.page.evaluate(SCROLL)
        frames = tab.page.evaluate(SEEN)
    return [
        Row(
            f"a conversation of {messages:,} messages is there",
            f"after {shown:.0f} ms",
            f"under {DRAWN_MS} ms",
            shown < DRAWN_MS,
        ),
        _frames(f"frames while {messages:,} messages are scrolled through", frames),
    ]


def _open(tab: Tab, url: str, param: str) -> float:
    """Milliseconds until the last message is drawn."""
    page: Page = tab.page
    page.goto("about:blank")
    page.goto(f"{url}/#chat/{param}")
    page.locator("article.assistant .markdown h3").last.wait_for()
    shown: float = page.evaluate("performance.now()")
    return shown
