"""Every character there is, cut in every way: it comes out whole, or not yet."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import msgspec

from dragoman.api.reply import event
from dragoman.turns.choice_reader import Detokenizer, TokenTable
from tests.torture.page import Row, progress, scaled

SURROGATES = range(0xD800, 0xE000)
SCALARS = [point for point in range(0x110000) if point not in SURROGATES]
BLOCK = 4096
REPLACEMENT = "\ufffd"


@cache
def cuts(length: int) -> tuple[tuple[slice, ...], ...]:
    """All ways to cut so many bytes into parts."""
    items = []
    for count in range(2 ** (length - 1)):
        at = [0, *(offset for offset in range(1, length) if count >> (offset - 1) & 1), length]
        items.append(tuple(slice(*ends) for ends in pairwise(at)))
    return tuple(items)


def wrong_cuts(character: str) -> Iterator[Sequence[bytes]]:
    """The ways to cut it in which it does not come out of the last part, alone and whole."""
    data = character.encode()
    for parts in cuts(len(data)):
        pieces = [data[part] for part in parts]
        reader = Detokenizer(TokenTable(pieces), skip_special=False)
        texts = [reader.feed(id_) for id_ in range(len(pieces))]
        if texts != [""] * (len(pieces) - 1) + [character] or reader.flush():
            yield pieces


def broken_off(character: str) -> bool:
    """Whether a character that is not finished becomes anything but replacements, at each place."""
    data = character.encode()
    for end in range(1, len(data)):
        text = TokenTable([data[:end]]).text([0])
        if set(text) != {REPLACEMENT}:
            return True
    return False


def changed_by_an_event(text: str) -> bool:
    """Whether a client reads something else than was written, or reads two events."""
    written = event(text)
    lines = written.decode().split("\n")
    return len(lines) != 3 or msgspec.json.decode(lines[0].removeprefix("data: ")) != text


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    count = scaled(len(SCALARS), scale)
    step = len(SCALARS) // count
    wrong = unfinished = events = ways = 0
    for at in range(0, len(SCALARS), BLOCK * step):
        block = [chr(point) for point in SCALARS[at : at + BLOCK * step : step]]
        ways += sum(len(cuts(len(character.encode()))) for character in block)
        wrong += sum(1 for character in block for _ in wrong_cuts(character))
        unfinished += sum(map(broken_off, block))
        events += sum(map(changed_by_an_event, block))
        progress(min(at + BLOCK * step, len(SCALARS)), len(SCALARS), "characters")
    what = f"{len(SCALARS[::step]):,} characters"
    return [
        Row(f"{what}, cut in {ways:,} ways: not whole", f"{wrong}", "0", not wrong),
        Row(f"{what}, broken off: no replacement", f"{unfinished}", "0", not unfinished),
        Row(f"{what}, as events: changed", f"{events}", "0", not events),
    ]
