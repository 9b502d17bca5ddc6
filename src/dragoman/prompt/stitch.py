"""A prompt that goes on from what the model itself wrote, in the very ids that it sampled.

The problem. A model samples ids, a client gets text, and the client's next request holds that text as a
message. If the whole conversation is rendered and tokenized again, the model's own words mostly come out as
other ids than those that it sampled: `" wea" "ther"` comes back as `" weather"`. The engine's cache of the
answer is lost then, and whoever trains on the conversation trains on ids that nobody sampled.

The cure. A turn that was answered is kept as it was, prompt ids and sampled ids, under the text of its prompt
(`turns/trails.py`). When a conversation comes back, its last answer is looked for there, and if it is found,
only what follows it is tokenized:

    what the template writes now      <user>hi<end><bot>Hello.<end>\\n<user>and?<end><bot>
                                      '----- before -----'
                                      '-------- answered ---------'
                                      '------------------------ now ----------------------'
    the ids of the prompt             [kept: the prompt's ids]  [kept: sampled]  [new: the rest]

`before` is rendered from the messages before the last answer, and is the key under which the turn is looked
for. `answered` is rendered with the answer, `now` with all that came since. A `Seam` is these three texts.

Where ids may be kept. Two things must hold, else `stitch_prompt` gives None and all is tokenized:

1. The texts are beginnings of each other. A template that writes history differently from how it was (most
   drop old reasoning once a user speaks again) shows the model another past than the one that it had.
2. What the template writes for the answer is what the model wrote. Mostly it is, character by character.
   If not, both are parsed: templates have their own way with spaces and with the JSON of calls, and answers
   that read alike are one. The client's text counts: an answer that it has edited is not the model's.

Where the rest begins. After the sampled text, if that is written as it is; else after the turn's end, which
the model has sampled itself (`<end>` is among its ids) unless it was cut short: then the end is the
template's, and belongs to the rest.

The rest is tokenized with the marks in it that keep a client's text from being a control token (encode.py).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import parse, starts_in_reasoning
from dragoman.prompt.encode import erase
from dragoman.prompt.prompter import Prompter
from dragoman.types import Answer, Conversation, Traced


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


def stitch_prompt(
    prompter: Prompter,
    conversation: Conversation,
    dialect: Dialect,
    ends: Sequence[str],
    find: Callable[[str], Sequence[Traced]],
) -> tuple[str, tuple[int, ...], Traced] | None:
    """The prompt as text and ids, and the turn that it goes on from; None where there is none.

    `ends` are the texts of the ids that end a turn; `find` gives the turns that began with a prompt.
    """
    last = _last_answer(conversation)
    if last is None:
        return None
    messages = conversation.messages
    plain = replace(conversation, response_prefix="", continue_final_message=False)
    before = prompter.text(replace(plain, messages=messages[:last], add_generation_prompt=True))
    turns = find(before)
    if not turns:
        return None
    answered = prompter.text(replace(plain, messages=messages[: last + 1], add_generation_prompt=False))
    marked, mark = prompter.render_marked(conversation)
    seam = Seam(before, answered, erase(marked, mark))
    begun = starts_in_reasoning(dialect, before)
    for turn in turns:
        rest = _rest(seam, prompter.decode(turn.ids), ends, dialect, in_reasoning=begun)
        if rest is not None:
            tail = prompter.encode_special(_marked_end(marked, mark, len(rest)), mark)
            return seam.now, (*turn.all, *tail), turn
    return None


def _last_answer(conversation: Conversation) -> int | None:
    """The number of the last message that a model may have written, and that something follows."""
    numbers = range(len(conversation.messages) - 2, 0, -1)
    return next((number for number in numbers if conversation.messages[number].role == "assistant"), None)


def _rest(seam: Seam, wrote: str, ends: Sequence[str], dialect: Dialect, *, in_reasoning: bool) -> str | None:
    """What follows the sampled ids, whose text is `wrote`, in the prompt; None where they cannot be kept."""
    written = seam.answer
    if written is None:
        return None
    after = seam.now[len(seam.answered) :]
    if written.startswith(wrote):
        return written[len(wrote) :] + after
    if not _are_alike(written, wrote, ends, dialect, in_reasoning=in_reasoning):
        return None
    end, tail = _find_end(written, ends)
    # The end of a turn that was cut short is the template's.
    return (tail if wrote.endswith(tuple(ends)) else written[end:]) + after


def _are_alike(
    written: str, wrote: str, ends: Sequence[str], dialect: Dialect, *, in_reasoning: bool
) -> bool:
    """Whether two texts are one answer: templates have their own way with spaces and JSON."""
    one, other = (
        parse(text[: _find_end(text, ends)[0]], dialect, starts_in_reasoning=in_reasoning)
        for text in (written, wrote)
    )
    return bool(_meaning(one) == _meaning(other))


def _find_end(text: str, ends: Sequence[str]) -> tuple[int, str]:
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


def _marked_end(marked: str, mark: str, count: int) -> str:
    """The end of a text with marks in it that has so many characters beside them."""
    start = len(marked)
    for piece in reversed(marked.split(mark)):
        if count <= len(piece):
            return marked[start - count :]
        count -= len(piece)
        start -= len(piece) + len(mark)
    return marked
