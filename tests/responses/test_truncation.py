"""What does not fit is left out, and to find out how much is work about what fits."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import ContextOverflow
from dragoman.responses.context import fit_items

LONG = 4096


def item(number: int, role: str) -> dict[str, Any]:
    return {"id": f"m{number}", "type": "message", "role": role, "content": []}


class Trials:
    """A model that takes so many items."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.sizes: list[int] = []

    async def planned(self, items: Sequence[dict[str, Any]]) -> list[str]:
        self.sizes.append(len(items))
        if len(items) > self._most:
            raise ContextOverflow("Too long.")
        return [each["id"] for each in items]


@given(
    st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=40), st.integers(1, 40)
)
def test_as_many_exchanges_as_fit_are_kept(roles: list[str], most: int) -> None:
    items = [item(number, role) for number, role in enumerate(roles)]
    heads = [each for each in items if each["role"] == "system"]
    begins = [number for number, role in enumerate(roles) if role == "user"]
    options = [items] + [
        [*heads, *(each for each in items[begin:] if each["role"] != "system")] for begin in begins[1:]
    ]
    fit = [[each["id"] for each in option] for option in options if len(option) <= most]
    if fit:
        assert asyncio.run(fit_items(items, Trials(most).planned)) == fit[0]
    else:
        with pytest.raises(ContextOverflow):
            asyncio.run(fit_items(items, Trials(most).planned))


def test_trials_are_about_what_fits() -> None:
    items = [item(number, "user") for number in range(LONG)]
    trials = Trials(32)
    assert len(asyncio.run(fit_items(items, trials.planned))) == 32
    assert trials.sizes[0] == LONG
    assert sum(trials.sizes[1:]) < LONG // 8
