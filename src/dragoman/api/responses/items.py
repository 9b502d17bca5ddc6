"""The input of a response as items: each with a type, an id and whatever else SDKs require of stored ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dragoman.api.messages import part_text
from dragoman.api.responses.hosted_items import leaves
from dragoman.api.responses.item_kinds import KINDS, ItemDict, Parts
from dragoman.api.tools import wrong
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count


def normalise(
    given: str | Sequence[ItemDict] | None, new_id: Callable[[str], str], field: str = "input"
) -> list[ItemDict]:
    """The items as they are stored; raises at the first that cannot be used: `input[3].content[0].text`.

    `"hi"` is one message of the user. What has been normalised stays as it is.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
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


def references(items: Sequence[ItemDict]) -> list[str]:
    """The ids of items that the store must know."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def resolved(
    items: Sequence[ItemDict], found: Mapping[str, ItemDict], field: str = "input"
) -> list[ItemDict]:
    """The items, with those in the place of references that these stand for."""
    return [_resolved(item, found, f"{field}[{number}].id") for number, item in enumerate(items)]


def _resolved(item: ItemDict, found: Mapping[str, ItemDict], place: str) -> ItemDict:
    if item["type"] != "item_reference":
        return item
    if item["id"] not in found:
        message = f"No item {item['id'][:64]!r} was found; send the item itself."
        raise BadRequest(message, param=place, code="item_not_found")
    return found[item["id"]]


def check_size(items: Sequence[ItemDict], limits: Limits) -> int:
    """The characters of the whole context: a chain of small requests may add up to a large one."""
    check_count(len(items), limits.messages, "input", "items")
    size = sum(len(text) for item in items for _, text in leaves(item))
    check_count(size, limits.content_chars, "input", "characters of content")
    return size
