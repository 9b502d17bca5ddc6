"""Operations whose result can be larger than their operands together, and how large it would be.

One row each: the operation's name, and a function of its operands. The number it gives is spent before the
operation runs, so `'a' * 10**9` ends in an error and not in a gigabyte. Methods and filters that share a
name share a row.
"""

import re
from collections.abc import Callable, Sized
from typing import Any

from dragoman.prompt.budget import MAX_INT_BITS, Exhausted

# A width of five digits or more, or one that is taken from an operand.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")
_TOO_MUCH = 1 << 62


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def number(value: Any) -> int:
    """A width or a count; a string stands for its own length."""
    if isinstance(value, (int, float)):
        return int(min(abs(value), _TOO_MUCH))
    return _length(value)


def _widest(*args: Any, **kwargs: Any) -> int:
    return max(map(number, (*args[1:], *kwargs.values())), default=1)


def _per_line(value: Any, *args: Any, **kwargs: Any) -> int:
    return (str(value).count("\n") + 2) * _widest(value, *args, **kwargs)


def _per_tab(value: Any, *args: Any, **kwargs: Any) -> int:
    return str(value).count("\t") * _widest(value, *args, **kwargs)


def _replace(value: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    text = str(value)
    return len(text) + text.count(str(old)) * len(str(new))


def _join(value: Any, d: Any = "", attribute: Any = None) -> int:
    return _length(value) * len(str(d))


def _wordwrap(value: Any, *args: Any, **kwargs: Any) -> int:
    return _length(value) * max(map(_length, (*args, *kwargs.values())), default=1)


def _format(value: Any, *_: Any, **__: Any) -> int:
    return _TOO_MUCH if _FORMAT_WIDTH.search(value) else 1


def percent(value: Any, *_: Any, **__: Any) -> int:
    return _TOO_MUCH if isinstance(value, str) and _PERCENT_WIDTH.search(value) else 1


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    # Adding lists copies again what was added before.
    return _length(value) ** 2 // 32 if isinstance(start, (list, tuple)) else 1


METHODS: dict[str, Callable[..., int]] = {
    "center": _widest,
    "expandtabs": _per_tab,
    "format": _format,
    "format_map": _format,
    "join": lambda separator, parts=(): _join(parts, separator),
    "ljust": _widest,
    "replace": _replace,
    "rjust": _widest,
    "zfill": _widest,
}

FILTERS: dict[str, Callable[..., int]] = {
    "batch": _widest,
    "center": _widest,
    "format": percent,
    "indent": _per_line,
    "join": _join,
    "replace": _replace,
    "round": _widest,
    "slice": _widest,
    "sum": _sum,
    "wordwrap": _wordwrap,
}


def times(left: Any, right: Any, weigh: Callable[[Any], int]) -> int:
    """`times('ab', 3, weigh)` is 9."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return weigh(sequence) * max(0, count)
    return 1


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise Exhausted("the chat template makes a number that is too large")
