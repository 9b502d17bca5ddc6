"""A million random cuts, over all dialects. None may change an answer."""

import random

from dragoman.dialects.registry import get_dialect
from tests.support.dialects import NAMES, cut, read, soup, told
from tests.torture.page import Row, progress, scaled

CUTS = 1_000_000
CUTS_OF_A_TEXT = 4


def failure(name: str, seed: int) -> str | None:
    """One text, cut some times. What went wrong, if anything did."""
    dialect, chance = get_dialect(name), random.Random(seed)
    text, starts = soup(dialect, chance), chance.random() < 0.3
    whole = told(read(dialect, [text], starts_in_reasoning=starts))
    for _ in range(CUTS_OF_A_TEXT):
        parts = cut(text, chance)
        if told(read(dialect, parts, starts_in_reasoning=starts)) != whole:
            return f"{name}, seed {seed}, starts_in_reasoning={starts}: {parts!r}"
    return None


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    texts, failures = scaled(CUTS // CUTS_OF_A_TEXT, scale), []
    for number in range(texts):
        failures += [text] if (text := failure(NAMES[number % len(NAMES)], seed + number)) else []
        progress(number + 1, texts, "texts")
    print(*failures[:10], sep="\n", end="\n" if failures else "")
    what = f"{texts * CUTS_OF_A_TEXT:,} random cuts in {len(NAMES)} dialects: texts read otherwise"
    return [Row(what, f"{len(failures)} of {texts:,}", "0", not failures)]
