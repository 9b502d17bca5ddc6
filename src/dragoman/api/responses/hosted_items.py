"""Items of tools that only hosted services have, told in plain text."""

from collections.abc import Iterator
from typing import Any

from dragoman.api.responses.item_kinds import ItemDict

# What names an item rather than says something, and what SDKs require whether it says something or not.
ENVELOPE = ("id", "type", "status", "call_id", "caller", "created_by", "fingerprint", "execution")


def plainly(item: ItemDict) -> str:
    """`{"type": "web_search_call", "action": {"query": "tides"}, ...}` gives `query: tides`."""
    told = {key: value for key, value in item.items() if key not in ENVELOPE}
    if item["type"] == "image_generation_call":
        told.pop("result", None)
    if item["type"] == "tool_search_output":
        # The tools themselves are offered to the model.
        told["tools"] = [tool.get("name") for tool in item["tools"]]
    only = told.get("output") if len(told) == 1 else None
    return only if isinstance(only, str) else "\n".join(lines(told))


def lines(value: Any, name: str = "") -> Iterator[str]:
    """Pictures are left out: a model of text could only read their bytes."""
    for key, text in leaves(value, name):
        yield f"{key}: {'[data]' if text.startswith('data:') else text}"


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The texts, numbers and truths of a JSON value, each as a text with its key. It may be nested deeply."""
    waiting = [(name, value)]
    while waiting:
        key, one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(reversed(one.items()))
        elif isinstance(one, list):
            waiting.extend((key, each) for each in reversed(one))
        elif one is not None:
            yield key, str(one)
