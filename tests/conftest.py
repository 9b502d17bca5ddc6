import gc
import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

from dragoman.engines.local import engine_thread, runner_choice
from dragoman.http import upkeep

pytest_plugins = ["tests.support.laws"]

# Nothing that a test stores ends up among what a person has stored.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="dragoman-tests-")

# Machines that run tests are noisy: a time limit would say more of them than of the code.
# The same examples every time, so that a new failure comes from a change; `make torture` draws others.
settings.register_profile("dragoman", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("dragoman")


GROWN_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="session", autouse=True)
def no_runner_is_measured() -> Iterator[None]:
    """It takes seconds, and may end either way. Those who test it say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_choice, "_SMALL", 1 << 62)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_pages_are_put_together() -> Iterator[None]:
    """An engine does that with all memory of its process, which here is that of thousands of tests: each
    engine would be busy for seconds whenever it has nothing else to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_thread, "use_large_pages", lambda: iter(()))
        yield


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: collecting would go through them all, in anyone's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def collected_tests_stay_frozen() -> Iterator[None]:
    """A server looks through everything when it starts, and unfreezes everything when it ends: with so many
    objects that are none of its own, each of the thousand servers of all tests would take seconds for it."""
    idle = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upkeep, "gc", SimpleNamespace(**{**vars(gc), **idle}))
        yield


@pytest.fixture(scope="module", autouse=True)
def memory_stays_bounded(collected_tests_stay_frozen: None) -> Iterator[None]:
    """What servers would have collected goes between files of tests, where there is much of it."""
    before = upkeep.resident()
    yield
    if upkeep.resident() - before > GROWN_BYTES:
        gc.collect()
