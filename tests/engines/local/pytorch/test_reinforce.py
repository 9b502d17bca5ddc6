"""The example of reinforcement learning, for as long as it takes to see where it goes."""

import statistics

import pytest

pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from examples.reinforce import Options, run


def test_the_reward_goes_up() -> None:
    items = run(Options(steps=50, rate=1e-2))
    first, last = (statistics.mean(each.reward for each in part) for part in (items[:10], items[-10:]))
    assert last > first + 0.05
    assert max(each.apart for each in items) < 1e-3, "the log probabilities are those of the same weights"
