"""One browser and one server for all tests of the page; a tab for each."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer
from tests.page.browser import WAIT_MS, Tab, launched, opened
from tests.page.model import make_model

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with launched() as result:
        yield result


@pytest.fixture(scope="package")
def served() -> Iterator[RunningServer]:
    engine = make_model()
    with background(engine, Settings(port=0, store="memory")) as url:
        yield RunningServer(engine, url)


@pytest.fixture
def tab(browser: Browser, served: RunningServer) -> Iterator[Tab]:
    with opened(browser) as tab:
        tab.open(served.url)
        yield tab
