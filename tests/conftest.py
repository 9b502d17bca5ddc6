import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from dragoman.engines.local import calibrated

pytest_plugins = ["tests.support.laws"]

# Nothing that a test stores ends up among what a person has stored.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="dragoman-tests-")

# Machines that run tests are noisy: a time limit would say more of them than of the code.
# The same examples every time, so that a new failure comes from a change; `make torture` draws others.
settings.register_profile("dragoman", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("dragoman")


@pytest.fixture(scope="session", autouse=True)
def no_runner_is_measured() -> Iterator[None]:
    """It takes seconds, and may end either way. Those who test it say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "_SMALL", 1 << 62)
        yield


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: collecting would go through them all, in anyone's time."""
    gc.collect()
    gc.freeze()
