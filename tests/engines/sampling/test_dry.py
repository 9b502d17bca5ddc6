"""DRY, beside the plainest way to say what it is."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.sampling.logits_processors import apply, penalize_loops
from dragoman.types import ExtraSamplers

VOCABULARY = 6
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)


def penalties(prompt: Sequence[int], output: Sequence[int], asked: ExtraSamplers) -> list[float]:
    """What each id loses, after a run that heard of the output id by id."""
    edit = penalize_loops(asked, np.array(prompt, np.int32))
    row = np.zeros(VOCABULARY, np.float32)
    for length in range(len(output) + 1):
        row[:] = 0
        apply(row, edit(output[:length]))
    return [round(float(-value), 3) for value in row]


def expected(all_ids: Sequence[int], asked: ExtraSamplers) -> list[float]:
    seen = list(all_ids[-asked.dry_range :] if asked.dry_range else all_ids)
    lost = [0.0] * VOCABULARY
    for at in range(len(seen) - 1):
        length = 0
        while length <= at and seen[at - length] == seen[-1 - length]:
            if seen[at - length] in asked.dry_breakers:
                break
            length += 1
        following = seen[at + 1]
        if length >= asked.dry_allowed_length and following not in asked.dry_breakers:
            penalty = asked.dry_multiplier * asked.dry_base ** (length - asked.dry_allowed_length)
            lost[following] = max(lost[following], penalty)
    return [round(float(np.float32(value)), 3) for value in lost]


@given(ids, ids, st.integers(1, 4), st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2))
def test_it_is_what_a_search_finds(
    prompt: list[int], output: list[int], allowed: int, breakers: frozenset[int]
) -> None:
    asked = ExtraSamplers(dry_multiplier=1, dry_base=1.1, dry_allowed_length=allowed, dry_breakers=breakers)
    assert penalties(prompt, output, asked) == expected([*prompt, *output], asked)


@given(ids, ids)
def test_where_the_prompt_ends_changes_nothing(prompt: list[int], output: list[int]) -> None:
    asked = ExtraSamplers(dry_multiplier=1, dry_base=1.1, dry_allowed_length=1)
    assert penalties(prompt, output, asked) == penalties([*prompt, *output], [], asked)


@given(ids, st.integers(2, 8))
def test_what_is_out_of_range_is_forgotten(prompt: list[int], range_: int) -> None:
    asked = ExtraSamplers(dry_multiplier=1, dry_base=1.1, dry_allowed_length=1, dry_range=range_)
    assert penalties(prompt, [], asked) == expected(prompt, asked)


def test_a_long_loop_is_forbidden_and_still_a_number() -> None:
    asked = ExtraSamplers(dry_multiplier=1, dry_base=2)
    row = np.zeros(VOCABULARY, np.float32)
    apply(row, penalize_loops(asked, np.ones(4000, np.int32))([]))
    assert np.isfinite(row).all()
    assert row[1] < -1e30


@pytest.mark.parametrize("prompt", [[], [1]])
def test_nothing_repeats_at_the_beginning(prompt: list[int]) -> None:
    assert penalties(prompt, [], ExtraSamplers(dry_multiplier=1, dry_allowed_length=1)) == [0.0] * VOCABULARY
