"""A prompt that goes on from what the model itself wrote, in the very ids that it sampled.

To tokenize a model's own text again gives other ids than those that it sampled, and another prompt than the
one its next answer is trained on. So the ids of the last turn are kept as they are, and only what follows is
tokenized. A template that writes history differently from how it was (it drops old reasoning, say) is told
from one that does not: then nothing is kept.
"""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import parse
from dragoman.types import Answer


class Seam(Struct, frozen=True):
    """Three views of one conversation, as its template writes them."""

    before: str
    """Up to where the model began its last answer."""
    answered: str
    """With that answer."""
    now: str
    """With all that came since."""

    @property
    def answer(self) -> str | None:
        """The answer as it is written now; None where the template has changed what was before or in it."""
        kept = self.answered.startswith(self.before) and self.now.startswith(self.answered)
        return self.answered[len(self.before) :] if kept else None


def rest(seam: Seam, wrote: str, ends: Sequence[str], dialect: Dialect, *, in_reasoning: bool) -> str | None:
    """What follows the sampled ids in the prompt, as text; None where they cannot be kept.

    `wrote` is their text, `ends` are the texts of the ids that end a turn.
    """
    written = seam.answer
    if written is None:
        return None
    after = seam.now[len(seam.answered) :]
    if written.startswith(wrote):
        return written[len(wrote) :] + after
    if not _same(written, wrote, ends, dialect, in_reasoning=in_reasoning):
        return None
    _, tail = _cut(written, ends)
    ended = wrote.endswith(tuple(ends))
    # The end of a turn that was cut short is the template's.
    return (tail if ended else written[_cut(written, ends)[0] :]) + after


def _same(written: str, wrote: str, ends: Sequence[str], dialect: Dialect, *, in_reasoning: bool) -> bool:
    """Whether two texts are one answer: templates have their own way with spaces and JSON."""
    one, other = (
        parse(text[: _cut(text, ends)[0]], dialect, starts_in_reasoning=in_reasoning)
        for text in (written, wrote)
    )
    return bool(_meaning(one) == _meaning(other))


def _cut(text: str, ends: Sequence[str]) -> tuple[int, str]:
    """Where the last end of a turn stands in the text, and what follows it."""
    found = [(text.rfind(end), end) for end in ends if end and end in text]
    if not found:
        return len(text), ""
    at, end = max(found)
    return at, text[at + len(end) :]


def _meaning(answer: Answer) -> Any:
    calls = [(call.name, _value(call.arguments)) for call in answer.calls]
    return answer.text.strip(), answer.reasoning.strip(), calls


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
