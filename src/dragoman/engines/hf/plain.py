"""A tokenizer that cannot write control tokens, whatever the text says.

The library's own switch is not enough: a Unigram model still finds `</s>` in its vocabulary, like any word.
So the control tokens get names that no text can hold, and keep their ids.
"""

import secrets
from collections.abc import Collection
from typing import Any

import msgspec
from tokenizers import Tokenizer


def plain_tokenizer(definition: dict[str, Any], control: Collection[str]) -> Tokenizer:
    secret = f"\ufdd0{secrets.token_hex(16)}"
    names = {text: f"{secret}{number}" for number, text in enumerate(control)}
    model = dict(definition["model"])
    model["vocab"] = _renamed(model.get("vocab"), names)
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if _apart(merge, names)]
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in definition.get("added_tokens") or ()
    ]
    whole = {"truncation": None, "padding": None}
    return Tokenizer.from_str(
        msgspec.json.encode({**definition, **whole, "model": model, "added_tokens": added}).decode()
    )


def going_on(definition: dict[str, Any]) -> dict[str, Any] | None:
    """The description for text in the middle, if it differs: some put a space before the first word only."""
    found = _unprefixed(definition.get("pre_tokenizer"))
    return None if found == definition.get("pre_tokenizer") else {**definition, "pre_tokenizer": found}


def _unprefixed(part: Any) -> Any:
    if isinstance(part, list):
        return [_unprefixed(each) for each in part]
    if not isinstance(part, dict):
        return part
    inside = {name: _unprefixed(value) for name, value in part.items()}
    return {**inside, "prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else inside


def _renamed(tokens: Any, names: dict[str, str]) -> Any:
    if isinstance(tokens, list):
        return [[names.get(token, token), score] for token, score in tokens]
    return {names.get(token, token): id_ for token, id_ in (tokens or {}).items()}


def _apart(merge: Any, names: dict[str, str]) -> bool:
    """Whether a merge neither makes a control token nor is made of one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right not in names and left not in names and right not in names
