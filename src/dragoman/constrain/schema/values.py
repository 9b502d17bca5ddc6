"""Numbers and values that llguidance can hold exactly."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

EXACT = 2**53
"""Above this, a bound is rounded to the nearest number that fits into 64 bits of floating point."""
_MOST_STATES = 10_000

_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that JSON writes with \\u only, which is not allowed here; and halves of pairs."""

Refuse = Callable[[str], None]


def check_number(value: Any, refuse: Refuse) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse("must be a number")
    elif abs(value) > EXACT:
        refuse("may be at most 2^53 in size: larger numbers are not exact")


def check_multiple(value: Any, refuse: Refuse) -> None:
    """A large divisor has as many states as it is large."""
    check_number(value, refuse)
    if value <= 0:
        refuse("must be above 0")
        return
    exact = Decimal(str(value))
    decimals = max(0, -int(exact.normalize().as_tuple().exponent))
    if decimals > 9 or exact.scaleb(decimals) > _MOST_STATES:
        refuse(f"may be at most {_MOST_STATES}, not counting the decimal point")


def check_value(value: Any, refuse: Refuse) -> None:
    """A value of `enum` or `const`, however nested."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and _UNWRITTEN.search(one):
            refuse("holds a control character that cannot be written")
            return
        elif isinstance(one, int | float) and abs(one) > EXACT:
            refuse("holds a number above 2^53 in size, which is not exact")
            return
