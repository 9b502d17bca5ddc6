"""The input of a response as items: each with a type, an id and whatever else SDKs require of stored ones."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.api.chat.messages import part_text
from dragoman.api.responses.hosted_items import leaves
from dragoman.api.responses.item_kinds import KINDS, ItemDict, Parts
from dragoman.api.tools import wrong
from dragoman.errors import BadRequest
from dragoman.json_amount import values
from dragoman.limits import Limits, check_count

PARTED = ("content", "output", "outputs", "results", "summary")
"""Fields of items that may be lists of parts."""
_decode = msgspec.json.Decoder().decode


class ToldItems(Struct, frozen=True):
    """What a request is about: what it goes on from, and what it brings."""

    before: list[ItemDict]
    inputs: list[ItemDict]
    size: int
    """Bytes of all of it as JSON, about."""


def normalise(
    given: str | Sequence[ItemDict] | None,
    new_id: Callable[[str], str],
    field: str = "input",
    limits: Limits | None = None,
) -> list[ItemDict]:
    """The items as they are stored; raises at the first that cannot be used: `input[3].content[0].text`.

    `"hi"` is one message of the user. What has been normalised stays as it is.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    most = (limits or Limits()).content_parts
    check_count(sum(map(_parts, given or ())), most, field, "parts of content")
    return [_normal(item, f"{field}[{number}]", new_id) for number, item in enumerate(given or ())]


def _normal(given: ItemDict, place: str, new_id: Callable[[str], str]) -> ItemDict:
    item = {key: value for key, value in given.items() if value is not None}
    item["type"] = name = _type(item, place)
    kind = KINDS[name]
    kind.reader.convert(item, place)
    if name == "message":
        item["content"] = _content(item["content"], f"{place}.content", item["role"])
    if isinstance(item.get("output"), list) and name in ("function_call_output", "custom_tool_call_output"):
        item["output"] = _content(item["output"], f"{place}.output", "user")
    if kind.prefix and "id" not in item:
        item["id"] = new_id(kind.prefix)
    return {**{key: value for key, value in kind.defaults.items() if key not in item}, **item}


def _type(item: ItemDict, place: str) -> str:
    """An item without a type is a message if it has a role, and a reference if it has nothing but an id."""
    name = item.get(
        "type", "message" if "role" in item else "item_reference" if set(item) == {"id"} else None
    )
    if name == "configuration_update":
        message = "A request cannot change its settings midway; send reasoning and text as fields of it."
        raise BadRequest(message, param=place, code="unsupported_content")
    if name is None:
        raise BadRequest(f"'{place}.type' is required.", param=f"{place}.type", code="missing_field")
    if not isinstance(name, str):
        raise wrong(f"{place}.type", "must be a string")
    if name not in KINDS:
        raise wrong(f"{place}.type", f"is {name[:64]!r}, which is not the type of an item")
    return name


def _content(content: str | Parts, place: str, role: str) -> Parts:
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return [_part(part, part_text(part, f"{place}[{n}]"), role) for n, part in enumerate(content)]


def _part(part: dict[str, Any], text: str, role: str) -> dict[str, Any]:
    if role != "assistant":
        return {**part, "type": "input_text", "text": text}
    if part["type"] == "refusal":
        return part
    return {"annotations": [], **part, "type": "output_text", "text": text}


def without_logprobs(item: ItemDict) -> ItemDict:
    """Nobody is told them again, and they may be a thousand times as long as the text."""
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return item
    return {**item, "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in content]}


def references(items: Sequence[ItemDict]) -> list[str]:
    """The ids of items that the store must know."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def told(
    stored: Sequence[bytes],
    inputs: Sequence[ItemDict],
    found: Mapping[str, bytes],
    limits: Limits,
    field: str = "input",
    size: int = 0,
) -> ToldItems:
    """What was stored before, and the inputs with what their references stand for; `size` is that of both.

    How much that is, each item as often as it is meant, is compared with the limits before any is decoded.
    """
    meant = _meant(inputs, found, field)
    bodies = [*((body, 1) for body in stored), *((found[id_], times) for id_, times in meant.items())]
    _check_values(bodies, limits.json_values, field)
    known = {id_: _decode(found[id_]) for id_ in meant}
    before = [_decode(body) for body in stored]
    after = [known[item["id"]] if item["type"] == "item_reference" else item for item in inputs]
    check_size([*before, *after], limits, field)
    return ToldItems(before, after, size)


def _meant(inputs: Sequence[ItemDict], found: Mapping[str, bytes], field: str) -> Mapping[str, int]:
    """How often each stored item is referred to."""
    for number, item in enumerate(inputs):
        if item["type"] == "item_reference" and item["id"] not in found:
            message = f"No item {item['id'][:64]!r} was found; send the item itself."
            raise BadRequest(message, param=f"{field}[{number}].id", code="item_not_found")
    return Counter(references(inputs))


def _check_values(bodies: Sequence[tuple[bytes, int]], most: int, field: str) -> None:
    # A few counts tell that most are fine; of the others the texts are left out.
    for count in (_most_values, values):
        total = 0
        for body, times in bodies:
            total += times * count(body)
            if total > most:
                break
        else:
            return
    check_count(total, most, field, "JSON values of stored items")


def _most_values(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def check_size(items: Iterable[ItemDict], limits: Limits, field: str = "input") -> None:
    """The whole context has its limits: a chain of small requests may add up to a large one.

    An item that is there several times is looked at once. Nothing is added up beyond a limit.
    """
    known: dict[int, tuple[int, int]] = {}
    chars = parts = 0
    for count, item in enumerate(items, 1):
        if id(item) not in known:
            known[id(item)] = (sum(len(text) for _, text in leaves(item)), _parts(item))
        chars, parts = chars + known[id(item)][0], parts + known[id(item)][1]
        check_count(count, limits.messages, field, "items")
        check_count(chars, limits.content_chars, field, "characters of content")
        check_count(parts, limits.content_parts, field, "parts of content")


def _parts(item: ItemDict) -> int:
    return sum(len(given) for name in PARTED if isinstance(given := item.get(name), list))
