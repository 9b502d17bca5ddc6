"""Prompts of conversations that go on: found turns are kept in their own ids, the rest is rendered."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import starts_in_reasoning
from dragoman.prompt.prompter import Prompter
from dragoman.prompt.special import erase
from dragoman.prompt.stitch import Seam, rest
from dragoman.types import Conversation, Traced


def continued(
    prompter: Prompter,
    conversation: Conversation,
    dialect: Dialect,
    ends: Sequence[str],
    find: Callable[[str], Sequence[Traced]],
) -> tuple[str, tuple[int, ...], Traced] | None:
    """The prompt as text and ids, and the turn that it goes on from; None where there is none.

    `find` gives the turns that began with a prompt.
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
    marked, mark = prompter.marked(conversation)
    now = erase(marked, mark)
    begun = starts_in_reasoning(dialect, before)
    for turn in turns:
        wrote = prompter.decode(turn.ids)
        new = rest(Seam(before, answered, now), wrote, ends, dialect, in_reasoning=begun)
        if new is not None:
            tail = prompter.encode_special(_last(marked, mark, len(new)), mark)
            return now, (*turn.all, *tail), turn
    return None


def _last_answer(conversation: Conversation) -> int | None:
    """The number of the last message that a model may have written, and that something follows."""
    numbers = range(len(conversation.messages) - 2, 0, -1)
    return next((number for number in numbers if conversation.messages[number].role == "assistant"), None)


def _last(marked: str, mark: str, count: int) -> str:
    """The end of a text with marks in it that has so many characters beside them."""
    start = len(marked)
    for piece in reversed(marked.split(mark)):
        if count <= len(piece):
            return marked[start - count :]
        count -= len(piece)
        start -= len(piece) + len(mark)
    return marked
