"""A long conversation made short: a summary that the model writes, sealed, and what is kept as it was."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.responses.output import ItemPlace
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.responses.response import usage
from dragoman.errors import BadRequest
from dragoman.types import Usage

TRIGGER = "compaction_trigger"
PREFIX = "cmp_"
_ASK = (
    "Write a summary of our conversation so far, for yourself to go on from when you have nothing else of"
    " it. Keep every fact, decision, name, number, file, open question and next step that may matter. Write"
    " nothing but the summary."
)


class Compacted(Struct, frozen=True):
    item: dict[str, Any]
    """The summary."""
    kept: list[dict[str, Any]]
    """What stays as it was, and follows the summary."""

    @property
    def items(self) -> list[dict[str, Any]]:
        return [self.item, *self.kept]


def triggered(inputs: Sequence[dict[str, Any]]) -> bool:
    """Whether the client wants what was said to be made short, and nothing else."""
    found = [number for number, item in enumerate(inputs) if item.get("type") == TRIGGER]
    if found and found[0] != len(inputs) - 1:
        place = f"input[{found[0]}]"
        raise BadRequest(f"A {TRIGGER} must be the last item.", param=place, code="invalid_value")
    return bool(found)


def to_summarise(items: Sequence[dict[str, Any]], id_: str) -> list[dict[str, Any]]:
    """The conversation with the question for its summary at the end."""
    asked = {"id": id_, "type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASK}]}
    return [*(item for item in items if item.get("type") != TRIGGER), asked]


def for_summary(request: ResponseRequest) -> ResponseRequest:
    """The request without what would make a summary anything else than text."""
    return ResponseRequest(
        model=request.model, instructions=request.instructions, reasoning=request.reasoning, input=""
    )


def compacted(items: Sequence[dict[str, Any]], sealed: str, id_: str) -> Compacted:
    """System messages are kept, and the last exchange if it still waits for its answer."""
    item = {"id": id_, "type": "compaction", "encrypted_content": sealed}
    heads = ("system", "developer")
    kept = [one for one in items if one.get("role") in heads]
    users = [number for number, one in enumerate(items) if one.get("role") == "user"]
    last = items[-1] if items else {}
    waits = last.get("role") == "user" or str(last.get("type")).endswith("_output")
    if waits and users:
        rest = (one for one in items[users[-1] :] if one.get("role") not in heads)
        kept += [one for one in rest if one.get("type") != TRIGGER]
    return Compacted(item, kept)


def compaction_events(place: ItemPlace, item: dict[str, Any]) -> bytes:
    return place.added({**item, "encrypted_content": ""}) + place.done(item)


def compaction_body(id_: str, created_at: int, made: Compacted, used: Usage) -> dict[str, Any]:
    return {
        "id": id_,
        "object": "response.compaction",
        "created_at": created_at,
        "output": made.items,
        "usage": usage(used),
    }
