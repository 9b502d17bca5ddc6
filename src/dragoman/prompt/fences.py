"""Marks in messages, and where the answers of a conversation stand between them.

Fences are marks that are set before and behind what others than the model said: between two of them stands an
answer. Another mark tells where a message ends that the model is to go on with.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct

from dragoman.errors import FINAL_MESSAGE, BadRequest
from dragoman.prompt.encode import erase, escape_mark
from dragoman.prompt.short import Rendering

_STRUCTURE = re.compile(r"[<\[{(]|.*[>\]})]$", re.DOTALL)
"""Some templates look at how such texts begin or end, and a fence would be in their way."""


def _set_fences(message: dict[str, Any], fence: str, *, careful: bool) -> bool:
    """Marks where the words of a message begin and end, unless they are the model's."""
    if message["role"] == "assistant":
        return False
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content or []
    texts = [part for part in parts if part.get("type", "text") == "text" and part["text"].strip()]
    if not texts or (careful and any(_STRUCTURE.match(part["text"].strip()) for part in texts)):
        return False
    first, last = texts[0], texts[-1]
    # Space at the ends stays outside, where templates trim it.
    start = len(first["text"]) - len(first["text"].lstrip())
    first["text"] = first["text"][:start] + fence + first["text"][start:]
    end = len(last["text"].rstrip())
    last["text"] = last["text"][:end] + fence + last["text"][end:]
    if isinstance(content, str):
        message["content"] = first["text"]
    return True


def fence_messages(
    messages: Iterable[dict[str, Any]], fence: str, *, careful: bool
) -> tuple[tuple[str, bool], ...]:
    """Sets fences, and gives for each message its role and whether it has them."""
    order: list[tuple[str, bool]] = []
    begun = False
    for message in messages:
        # What the system says first is moved about by some templates.
        first = message["role"] in ("system", "developer") and not begun
        fenced = not first and _set_fences(message, fence, careful=careful)
        begun = begun or fenced
        order.append((message["role"], fenced))
    return tuple(order)


def find_marks(text: str, mark: str) -> tuple[list[int], list[int]]:
    """The places of marks in the text without them, and the characters that the first 0, 1, 2... take."""
    if escape_mark(mark) not in text:
        pieces = text.split(mark)
        return [*accumulate(map(len, pieces[:-1]))], [*range(len(pieces))]
    places, sizes = [], [0]
    for found in re.finditer(f"{mark}|{re.escape(escape_mark(mark))}", text):
        places.append(found.start() - sizes[-1])
        sizes.append(sizes[-1] + len(found.group()))
    return places, sizes


class Region(Struct, frozen=True):
    """Where an answer stands: between what others said before and after it."""

    start: int
    end: int
    alone: bool
    """Nothing else stands there."""
    after: int
    """How many messages of others the template is given after it."""


def _regions_between(places: Sequence[int], order: Sequence[tuple[str, bool]], end: int) -> Iterator[Region]:
    """`places` are those of the fences, two for each message that has them."""
    edges = iter((*places, end, end))
    left = sum(role != "assistant" for role, _ in order)
    start, waiting, others = 0, list[int](), 0
    """`waiting` are the answers that no fence has followed yet."""
    for role, fenced in (*order, ("", True)):
        if role == "assistant":
            waiting.append(left)
            continue
        left -= 1
        others += not fenced
        if fenced:
            behind = next(edges)
            alone = len(waiting) == 1 and not others
            yield from (Region(start, behind, alone, after) for after in waiting)
            start, waiting, others = next(edges), [], 0


def find_regions(text: str, mark: str, size: int, render: Callable[[bool], Rendering]) -> list[Region]:
    """Of each answer in a text of so many characters beside its marks; `render` sets fences carefully or not.

    None where fences change what the template writes.
    """
    for careful in (False, True):
        made = render(careful)
        fenced = 2 * sum(fenced for _, fenced in made.order)
        pieces = made.text.split(made.mark)
        if len(text) == size and len(pieces) == fenced + 1 and "".join(pieces) == text:
            # As it mostly is: there are no other marks, and these are written as they are.
            return list(_regions_between([*accumulate(map(len, pieces[:-1]))], made.order, size))
        places, _ = find_marks(erase(made.text, mark), made.mark)
        if erase(made.text, made.mark) == text and len(places) == fenced:
            return list(_regions_between(places, made.order, size))
    return []


LEAST_WORDS = 8
"""Characters by which a message may be found."""


def region_before(words: str, text: str, at: int, answer: str) -> Region | None:
    """Where the answer behind a place stands: up to the words of the next message, if these stand there once.

    As they are, or in JSON. It saves a rendering with fences.
    """
    for spelled in (words, json.dumps(words, ensure_ascii=False)[1:-1]) if len(words) >= LEAST_WORDS else ():
        end = text.find(spelled, at)
        if end > at and text.find(spelled, end + 1) < 0 and spelled not in answer:
            return Region(at, end, True, 0)
    return None


def find_suffix(pieces: Sequence[bytes], text: str, *, last: bool) -> tuple[int, int, int] | None:
    """As many of the last pieces as the text has: where, how many characters, and from which piece on."""
    written = text.encode()
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high) // 2
        if b"".join(pieces[middle:]) in written:
            high = middle
        else:
            low = middle + 1
    # A suffix may not begin within a character.
    while low < len(pieces) and pieces[low][:1] and 0x80 <= pieces[low][0] < 0xC0:
        low += 1
    suffix = b"".join(pieces[low:])
    if not suffix.strip():
        return None
    at = written.rfind(suffix) if last else written.find(suffix)
    return len(written[:at].decode()), len(suffix.decode("utf-8", "replace")), low


# A message that is to be gone on with


def tag_end(messages: list[dict[str, Any]], end: str) -> None:
    """Mark where the final message ends. The space shows whether the template trims what it writes."""
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = f"{content}{end} "
        return
    for part in reversed(content or []):
        if "text" in part:
            part["text"] = f"{part['text']}{end} "
            return
    raise BadRequest("The final message has no text that could be continued.", param=FINAL_MESSAGE)


def cut_at_tag(text: str, end: str) -> str:
    """`hi| <end>` becomes `hi`, where `|` is the tag: no end of turn follows a message to be continued."""
    kept, found, rest = text.rpartition(end)
    if not found:
        raise BadRequest("The chat template does not write the final message.", param=FINAL_MESSAGE)
    return kept if rest.startswith(" ") else kept.rstrip()
