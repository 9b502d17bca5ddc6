"""`python -m tests.torture.cuts`: a million random cuts, over all dialects. None may change an answer."""

import argparse
import random
import sys
import time

from dragoman.dialects.registry import get
from tests.support.dialects import NAMES, cut, read, soup, told

CUTS_OF_A_TEXT = 4


def failure(name: str, seed: int) -> str | None:
    """One text, cut some times. What went wrong, if anything did."""
    dialect, chance = get(name), random.Random(seed)
    text, starts = soup(dialect, chance), chance.random() < 0.3
    whole = told(read(dialect, [text], starts_in_reasoning=starts))
    for _ in range(CUTS_OF_A_TEXT):
        parts = cut(text, chance)
        if told(read(dialect, parts, starts_in_reasoning=starts)) != whole:
            return f"{name}, seed {seed}, starts_in_reasoning={starts}: {parts!r}"
    return None


def show(done: int, wanted: int, began: float) -> None:
    bar = "#" * (40 * done // wanted)
    print(f"\r[{bar:<40}] {done:>9,} of {wanted:,} cuts, {time.time() - began:.0f} s", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--dialect", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    names, began, done, failures = options.dialect or NAMES, time.time(), 0, []
    print(f"seed {options.seed}")
    while done < options.cuts:
        name, seed = names[done // CUTS_OF_A_TEXT % len(names)], options.seed + done
        failures += [found] if (found := failure(name, seed)) else []
        done += CUTS_OF_A_TEXT
        if done % 2000 == 0:
            show(done, options.cuts, began)
    show(done, options.cuts, began)
    print(f"\n{len(failures)} texts read otherwise when cut", *failures[:10], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
