"""Fences: marks in messages that show where the answers of a conversation are in the rendered text.

Fences are marks before and after texts that the model did not write: an answer is between two of them.
Another mark shows where a message ends that the model is to continue.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct

from dragoman.errors import FINAL_MESSAGE, BadRequest
from dragoman.prompt.abridged import Rendering
from dragoman.prompt.encode import escape_mark, strip_mark

_STRUCTURE = re.compile(r"[<\[{(]|.*[>\]})]$", re.DOTALL)
"""Some templates inspect how such texts begin or end; a fence would change the result."""


def _set_fences(message: dict[str, Any], fence: str, *, careful: bool) -> bool:
    """Mark where the text of a message begins and ends, unless the model wrote it."""
    if message["role"] == "assistant":
        return False
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content or []
    texts = [part for part in parts if part.get("type", "text") == "text" and part["text"].strip()]
    if not texts or (careful and any(_STRUCTURE.match(part["text"].strip()) for part in texts)):
        return False
    first, last = texts[0], texts[-1]
    # Whitespace at the ends stays outside, where templates trim it.
    start = len(first["text"]) - len(first["text"].lstrip())
    first["text"] = first["text"][:start] + fence + first["text"][start:]
    end = len(last["text"].rstrip())
    last["text"] = last["text"][:end] + fence + last["text"][end:]
    if isinstance(content, str):
        message["content"] = first["text"]
    return True


def mark_boundaries(
    messages: Iterable[dict[str, Any]], fence: str, *, careful: bool
) -> tuple[tuple[str, bool], ...]:
    """Set fences, and return for each message its role and whether it has fences."""
    order: list[tuple[str, bool]] = []
    begun = False
    for message in messages:
        # Some templates move the first system message.
        first = message["role"] in ("system", "developer") and not begun
        fenced = not first and _set_fences(message, fence, careful=careful)
        begun = begun or fenced
        order.append((message["role"], fenced))
    return tuple(order)


def find_marks(text: str, mark: str) -> tuple[list[int], list[int]]:
    """Return the offsets of marks in the text without them, and the total characters of the first 0, 1, 2...
    marks.
    """
    if escape_mark(mark) not in text:
        pieces = text.split(mark)
        return [*accumulate(map(len, pieces[:-1]))], [*range(len(pieces))]
    offsets, sizes = [], [0]
    for match in re.finditer(f"{mark}|{re.escape(escape_mark(mark))}", text):
        offsets.append(match.start() - sizes[-1])
        sizes.append(sizes[-1] + len(match.group()))
    return offsets, sizes


class AnswerRegion(Struct, frozen=True):
    """Range of an answer: between the texts before and after it that the model did not write."""

    start: int
    end: int
    alone: bool
    """Whether nothing else is in the range."""
    after: int
    """Number of messages after it that are not the model's."""


def _regions_between(
    offsets: Sequence[int], order: Sequence[tuple[str, bool]], end: int
) -> Iterator[AnswerRegion]:
    """Yield regions. `places` are the offsets of the fences, two for each message that has them."""
    edges = iter((*offsets, end, end))
    left = sum(role != "assistant" for role, _ in order)
    start, waiting, others = 0, list[int](), 0
    """`waiting` are the answers not yet followed by a fence."""
    for role, fenced in (*order, ("", True)):
        if role == "assistant":
            waiting.append(left)
            continue
        left -= 1
        others += not fenced
        if fenced:
            behind = next(edges)
            alone = len(waiting) == 1 and not others
            yield from (AnswerRegion(start, behind, alone, after) for after in waiting)
            start, waiting, others = next(edges), [], 0


def find_regions(text: str, mark: str, size: int, render: Callable[[bool], Rendering]) -> list[AnswerRegion]:
    """Return the region of each answer in a text of `size` characters without marks; `render` sets fences,
    carefully or not.

    The list is empty if fences change what the template writes.
    """
    for careful in (False, True):
        rendering = render(careful)
        fenced = 2 * sum(fenced for _, fenced in rendering.order)
        pieces = rendering.text.split(rendering.mark)
        if len(text) == size and len(pieces) == fenced + 1 and "".join(pieces) == text:
            # The common case: there are no other marks, and fences are written unescaped.
            return list(_regions_between([*accumulate(map(len, pieces[:-1]))], rendering.order, size))
        offsets, _ = find_marks(strip_mark(rendering.text, mark), rendering.mark)
        if strip_mark(rendering.text, rendering.mark) == text and len(offsets) == fenced:
            return list(_regions_between(offsets, rendering.order, size))
    return []


LEAST_WORDS = 8
"""Minimum number of characters by which a message is searched for."""


def region_before(words: str, text: str, at: int, answer: str) -> AnswerRegion | None:
    """Return the range of the answer after an offset: up to the text of the next message, if it occurs
    exactly once.

    The text may be plain or in JSON. This saves a rendering with fences.
    """
    for spelled in (words, json.dumps(words, ensure_ascii=False)[1:-1]) if len(words) >= LEAST_WORDS else ():
        end = text.find(spelled, at)
        if end > at and text.find(spelled, end + 1) < 0 and spelled not in answer:
            return AnswerRegion(at, end, True, 0)
    return None


def find_suffix(pieces: Sequence[bytes], text: str, *, last: bool) -> tuple[int, int, int] | None:
    """Find the longest suffix of the pieces in the text: return offset, characters, and the index of its
    first piece.
    """
    written = text.encode()
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high) // 2
        if b"".join(pieces[middle:]) in written:
            high = middle
        else:
            low = middle + 1
    # A suffix must not begin inside a character.
    while low < len(pieces) and pieces[low][:1] and 0x80 <= pieces[low][0] < 0xC0:
        low += 1
    suffix = b"".join(pieces[low:])
    if not suffix.strip():
        return None
    at = written.rfind(suffix) if last else written.find(suffix)
    return len(written[:at].decode()), len(suffix.decode("utf-8", "replace")), low


# Continuing a message


def tag_end(messages: list[dict[str, Any]], end: str) -> None:
    """Mark where the final message ends. The added space shows whether the template trims it."""
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = f"{content}{end} "
        return
    for part in reversed(content or []):
        if "text" in part:
            part["text"] = f"{part['text']}{end} "
            return
    raise BadRequest("The final message has no text to continue.", param=FINAL_MESSAGE)


def cut_at_tag(text: str, end: str) -> str:
    """Cut the text at the tag: `hi| <end>` becomes `hi`, where `|` is the tag. No end of turn follows a
    message to be continued.
    """
    kept, value, rest = text.rpartition(end)
    if not value:
        raise BadRequest(
            "The chat template does not write the final message, so it cannot be continued.",
            param=FINAL_MESSAGE,
        )
    return kept if rest.startswith(" ") else kept.rstrip()
