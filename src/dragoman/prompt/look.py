"""How an answer is read, before one's eyes: which dialect and why, what came when, and what stands where.

Run by itself (`python -m dragoman.prompt.look`) it is the process that looks at a template which somebody
has sent: a program of a stranger's. It gets the template and what is to be read, and nothing else, and what
it may take is bounded before the template is touched. What it says is what `look_at` says, as JSON.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.constrain.calls.answer_grammar import CallMode, answer_grammar
from dragoman.dialects.declare import Dialect, begins_inside, starts_in_reasoning
from dragoman.dialects.describe import (
    AnswerPart,
    Told,
    describe_dialect,
    describe_marks,
    read_parts,
    spell_answer,
    spell_event,
)
from dragoman.dialects.parser import PIECE, Parser
from dragoman.errors import DragomanError, TemplateError
from dragoman.media.child import allow, bound, receive, send
from dragoman.prompt.find import FoundDialect, find_dialect
from dragoman.prompt.template import ChatTemplate
from dragoman.types import Fold

MOST_TOLD = 10_000
"""Events, and parts. What is beyond is only counted."""
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
"""What a template is shown with."""
MOST_PROMPT = 64 * 1024
WARMING = ("{% for", "{{ messages[0].content ~ '\\n\\u00e4' }}", "{{ 1 / 0 }}", "{{ raise_exception('x') }}")
"""Templates that go wrong in every way, and one that does not."""
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_S = 10


class Looked(Struct, kw_only=True):
    """What is to be looked at."""

    text: str = ""
    template: str | None = None
    """Which is looked at in a process of its own."""
    tools: tuple[dict[str, Any], ...] = ()
    starts_in_reasoning: bool | None = None
    """None: what the template, or else the text, speaks for."""
    chunk: int | None = None
    """Characters that come at once."""
    grammar: bool = False


def look_at(looked: Looked, found: FoundDialect) -> dict[str, Any]:
    dialect, text = found.dialect, looked.text
    inside = looked.starts_in_reasoning
    if inside is None:
        inside = begins_inside(dialect, text)
    size = looked.chunk or PIECE
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    told, parts = read_parts(Parser(dialect, looked.tools, inside), pieces)
    return {
        **tell_reading(found, told, parts, inside=inside),
        **(_grammar(dialect, looked.tools, inside) if looked.grammar else {}),
    }


def tell_reading(
    found: FoundDialect, told: Told, parts: Sequence[AnswerPart], *, inside: bool
) -> dict[str, Any]:
    """What is said of an answer that was read, whether it was text or ids."""
    folded = Fold()
    folded.add([event for _, event in told])
    return {
        "object": "parsed_answer",
        "dialect": {
            **describe_dialect(found.dialect),
            "how": found.how,
            "declares": describe_marks(found.dialect),
        },
        "starts_in_reasoning": inside,
        "message": spell_answer(folded.done()[0]),
        "parts": [msgspec.to_builtins(part) for part in parts[:MOST_TOLD]],
        "events": [{"at": at, **spell_event(event)} for at, event in told[:MOST_TOLD]],
        "left_out": max(0, len(parts) - MOST_TOLD) + max(0, len(told) - MOST_TOLD),
    }


def _grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]], inside: bool) -> dict[str, Any]:
    """Of all that an answer may be, as the engine is held to it."""
    mode: CallMode = "auto" if tools and dialect.has_calls else "none"
    try:
        made = answer_grammar(dialect, tools, choice=mode, starts_in_reasoning=inside)
    except DragomanError as error:
        return {"grammar": None, "grammar_error": error.message}
    return {"grammar": made.grammar}


def look_with_template(looked: Looked) -> dict[str, Any]:
    """The dialect that the template speaks for, a prompt that it writes, and the answer as it is read so."""
    source = looked.template or ""
    found = find_dialect(template=source)
    told: dict[str, Any] = {"prompt": None}
    try:
        prompt = ChatTemplate(source).render(
            {"messages": QUESTION, "tools": list(looked.tools) or None, "add_generation_prompt": True}
        )
        told["prompt"] = prompt[:MOST_PROMPT]
        if looked.starts_in_reasoning is None:
            looked.starts_in_reasoning = starts_in_reasoning(found.dialect, prompt)
    except TemplateError as error:
        told["template_error"] = error.message
    return {**look_at(looked, found), **told}


def _bound() -> None:
    """From here on: no more memory than this, no more time, no file, no socket, no process."""
    # Whatever is imported at its first use is imported now: later no file can be opened.
    for source in WARMING:
        look_with_template(
            Looked(template=source, text="x", tools=({"function": {"name": "f"}},), grammar=True)
        )
    bound(MEMORY_BYTES)
    allow(CPU_S)


if __name__ == "__main__":
    _bound()
    link = socket.socket(fileno=0)
    if (frame := receive(link)) is not None:
        asked = msgspec.json.decode(frame[1], type=Looked)
        send(link, {}, msgspec.json.encode(look_with_template(asked)))
