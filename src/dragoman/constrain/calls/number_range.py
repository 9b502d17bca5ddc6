"""Whole numbers within bounds, as an expression over their digits."""

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

MOST_DIGITS = 30


def integer_range(schema: Mapping[str, Any]) -> str | None:
    """The expression of the integers that the schema allows; None where it takes more than an expression."""
    if "multipleOf" in schema:
        return None
    least, most = _bounds(schema)
    if any(bound is not None and len(str(abs(bound))) > MOST_DIGITS for bound in (least, most)):
        return None
    ways = []
    if least is None or least < 0:
        ways += [f"-{way}" for way in _positive(max(1, 1 if most is None else -most), least and -least)]
    if (least is None or least <= 0) and (most is None or most >= 0):
        ways.append("0")
    if most is None or most > 0:
        ways += _positive(max(1, least or 0), most)
    return f"(?:{'|'.join(ways)})" if ways else None


def _bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    least = [ceil(schema["minimum"])] if "minimum" in schema else []
    least += [floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    most = [floor(schema["maximum"])] if "maximum" in schema else []
    most += [ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(least, default=None), min(most, default=None)


def _positive(least: int, most: int | None) -> list[str]:
    """From 1 on: one way for each number of digits, and one for all above."""
    if most is not None and most < least:
        return []
    longest = len(str(least if most is None else most))
    ways = []
    for digits in range(len(str(least)), longest + 1):
        low, high = max(least, 10 ** (digits - 1)), 10**digits - 1
        ways += _alike(str(low), str(high if most is None else min(most, high)))
    return ways if most is not None else [*ways, f"[1-9][0-9]{{{longest},}}"]


def _alike(low: str, high: str) -> list[str]:
    """Both have the same number of digits."""
    if low == high:
        return [low]
    if low[0] == high[0]:
        return [low[0] + way for way in _alike(low[1:], high[1:])]
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    ways = []
    if int(low[1:] or 0) > 0:
        ways += [low[0] + way for way in _alike(low[1:], "9" * rest)]
        first += 1
    if int(high[1:] or 0) < 10**rest - 1:
        ways += [high[0] + way for way in _alike("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return ways
