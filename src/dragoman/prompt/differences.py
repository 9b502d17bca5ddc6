"""What two texts have in common at their ends, in whole markers: half of a `<tag>` is never shared."""

import re
from collections.abc import Iterable

_SEGMENT = re.compile(r"<[|｜]?[^<>\s]{1,64}>|\[/?[A-Z][A-Z_ ]*\]|\s|\w+|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """`segments("a <b>\\n")` is `["a", " ", "<b>", "\\n"]`."""
    return _SEGMENT.findall(text)


def is_marker(part: str) -> bool:
    """Whether a segment is a tag of some kind."""
    return len(part) > 2 and part[0] in "<["


def shared_start(one: str, other: str) -> str:
    """`shared_start("x<a>1", "x<b>1")` is `"x"`, although both go on with `<`."""
    return "".join(_shared(segments(one), segments(other)))


def shared_end(one: str, other: str) -> str:
    """`shared_end("1<a>\\n", "2<a>\\n")` is `"<a>\\n"`."""
    return "".join(reversed(list(_shared(reversed(segments(one)), reversed(segments(other))))))


def _shared(one: Iterable[str], other: Iterable[str]) -> Iterable[str]:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left


def without_end(text: str, end: str) -> str:
    return text[: len(text) - len(end)]
