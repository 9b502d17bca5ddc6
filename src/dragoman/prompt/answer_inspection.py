"""Inspection of how an answer is parsed: which dialect and why, the events, and the range of each part.

Run as a program (`python -m dragoman.prompt.answer_inspection`) it is the subprocess that inspects a template
sent by a client, which is untrusted code. It gets only the template and the input, and its resources are
limited before the template is touched. Its output is that of `inspect_answer`, as JSON.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.constrain.calls.answer_grammar import CallMode, answer_constraint
from dragoman.dialects.declarations import Dialect, prompt_opened_reasoning, starts_in_reasoning
from dragoman.dialects.describe import (
    AnswerPart,
    TimedEvents,
    answer_json,
    describe_dialect,
    describe_syntax,
    event_json,
    read_parts,
)
from dragoman.dialects.parser import PIECE, Parser
from dragoman.errors import DragomanError, TemplateError
from dragoman.media.sandbox import limit_cpu, receive, restrict_process, send
from dragoman.prompt.find import FoundDialect, find_dialect
from dragoman.prompt.template import ChatTemplate
from dragoman.types import EventFold

MOST_TOLD = 10_000
"""Maximum number of events and of parts that are returned; the rest is only counted."""
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
"""Messages with which a template is rendered."""
MOST_PROMPT = 64 * 1024
WARMING = ("{% for", "{{ messages[0].content ~ '\\n\\u00e4' }}", "{{ 1 / 0 }}", "{{ raise_exception('x') }}")
"""Templates that fail in every way, and one that does not."""
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_S = 10


class InspectionRequest(Struct, kw_only=True):
    """Input of an inspection."""

    text: str = ""
    template: str | None = None
    """Chat template; it is inspected in a separate process."""
    tools: tuple[dict[str, Any], ...] = ()
    starts_in_reasoning: bool | None = None
    """None: decided by the template, or else by the text."""
    chunk: int | None = None
    """Number of characters in each chunk."""
    grammar: bool = False


def inspect_answer(looked: InspectionRequest, found_dialect: FoundDialect) -> dict[str, Any]:
    dialect, text = found_dialect.dialect, looked.text
    inside = looked.starts_in_reasoning
    if inside is None:
        inside = prompt_opened_reasoning(dialect, text)
    size = looked.chunk or PIECE
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    events, parts = read_parts(Parser(dialect, looked.tools, inside), pieces)
    return {
        **tell_reading(found_dialect, events, parts, inside=inside),
        **(_grammar(dialect, looked.tools, inside) if looked.grammar else {}),
    }


def tell_reading(
    dialect: FoundDialect, items: TimedEvents, parts: Sequence[AnswerPart], *, inside: bool
) -> dict[str, Any]:
    """Describe an answer that was parsed from text or ids."""
    folded = EventFold()
    folded.add([event for _, event in items])
    return {
        "object": "parsed_answer",
        "dialect": {
            **describe_dialect(dialect.dialect),
            "how": dialect.how,
            "declares": describe_syntax(dialect.dialect),
        },
        "starts_in_reasoning": inside,
        "message": answer_json(folded.done()[0]),
        "parts": [msgspec.to_builtins(part) for part in parts[:MOST_TOLD]],
        "events": [{"at": at, **event_json(event)} for at, event in items[:MOST_TOLD]],
        "left_out": max(0, len(parts) - MOST_TOLD) + max(0, len(items) - MOST_TOLD),
    }


def _grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]], inside: bool) -> dict[str, Any]:
    """Return the grammar of answers that the engine enforces, or the error."""
    mode: CallMode = "auto" if tools and dialect.has_calls else "none"
    try:
        constraint = answer_constraint(dialect, tools, choice=mode, starts_in_reasoning=inside)
    except DragomanError as error:
        return {"grammar": None, "grammar_error": error.message}
    return {"grammar": constraint.grammar}


def look_with_template(looked: InspectionRequest) -> dict[str, Any]:
    """Return the dialect of a template, a prompt that it writes, and the parsed answer."""
    source = looked.template or ""
    dialect = find_dialect(template=source)
    details: dict[str, Any] = {"prompt": None}
    try:
        prompt = ChatTemplate(source).render(
            {"messages": QUESTION, "tools": list(looked.tools) or None, "add_generation_prompt": True}
        )
        details["prompt"] = prompt[:MOST_PROMPT]
        if looked.starts_in_reasoning is None:
            looked.starts_in_reasoning = starts_in_reasoning(dialect.dialect, prompt)
    except TemplateError as error:
        details["template_error"] = error.message
    return {**inspect_answer(looked, dialect), **details}


def _bound() -> None:
    """Limit this process from here on: memory, time, no files, no sockets, no processes."""
    # Import everything that is imported on first use: later no file can be opened.
    for source in WARMING:
        look_with_template(
            InspectionRequest(template=source, text="x", tools=({"function": {"name": "f"}},), grammar=True)
        )
    restrict_process(MEMORY_BYTES)
    limit_cpu(CPU_S)


if __name__ == "__main__":
    _bound()
    link = socket.socket(fileno=0)
    if (frame := receive(link)) is not None:
        request = msgspec.json.decode(frame[1], type=InspectionRequest)
        send(link, {}, msgspec.json.encode(look_with_template(request)))
