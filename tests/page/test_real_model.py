"""One conversation with the model that everybody has."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.media.samples import picture
from tests.page.browser import opened
from tests.support.tiny_projectors import write_projector


def test_the_default_model(browser: Browser) -> None:
    options = LocalOptions(runner="llamacpp", name="smollm2", context=1024, slots=2, threads=1)
    engine = LocalEngine.open(default_model(), options)
    with background(engine, Settings(port=0, store="memory")) as url, opened(browser) as tab:
        page = tab.open(url)
        tab.set_up("Sampling")
        page.get_by_label("Max tokens").fill("12")
        page.get_by_label("Temperature").fill("0")
        answer = tab.say("What is the capital of France?")
        expect(answer.locator(".markdown")).not_to_be_empty()
        expect(answer.locator(".facts")).to_contain_text("smollm2")


def test_a_picture_for_the_default_model(browser: Browser, tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", "plain", width=576)
    options = LocalOptions(
        runner="llamacpp", name="smollm2", context=1024, slots=2, threads=1, mmproj=str(projector)
    )
    engine = LocalEngine.open(default_model(), options)
    with background(engine, Settings(port=0, store="memory")) as url, opened(browser) as tab:
        page = tab.open(url)
        tab.set_up("Sampling")
        page.get_by_label("Max tokens").fill("12")
        tab.attach("cat.png", "image/png", picture("png", 64, 48))
        answer = tab.say("What is this?")
        expect(answer.locator(".markdown")).not_to_be_empty()
        expect(page.locator("img.picture")).to_have_js_property("naturalWidth", 64)
        assert engine._pictures is not None and engine._pictures.encoded == 1
