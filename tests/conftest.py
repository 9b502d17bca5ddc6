import gc

from hypothesis import settings

# Machines that run tests are noisy: a time limit would say more of them than of the code.
settings.register_profile("dragoman", deadline=None)
settings.load_profile("dragoman")


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: collecting would go through them all, in anyone's time."""
    gc.collect()
    gc.freeze()
