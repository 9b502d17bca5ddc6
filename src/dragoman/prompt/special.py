"""Where control tokens stand in a text, and how a client's text is kept from being one.

Rules of this file:
- a control token is what the template writes, or what a raw prompt says; never what a message says;
- in a client's string that contains a control token's text, a mark (a Unicode noncharacter that occurs
  nowhere else) is set behind its first character, so that neither template nor tokenizer finds it;
- a string that begins or ends with a part of one gets a mark there, so that what stands beside it cannot
  complete it;
- marks are gone before anything is tokenized, so the ids are those of the very characters;
- reasoning markers in an assistant's own messages are left alone: templates look for them, to drop old
  reasoning.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_REASONING_MARKER = re.compile(r"[<\[]/?[\w:|]*think\w*[|>\]]+", re.IGNORECASE)


class SpecialText:
    """The control tokens of a model, to be found in text.

    `SpecialText({"<s>": 1}).split("<s>a")` gives `(1, "<s>")`, then `(None, "a")`.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._ids = {text: id for text, id in special.items() if text}
        self._pattern = _pattern(self._ids)
        self._hostile = _pattern(self._ids, re.IGNORECASE)
        foreign = [text for text in self._ids if not _REASONING_MARKER.fullmatch(text)]
        self._hostile_in_assistant = _pattern(foreign, re.IGNORECASE)
        self._longest = max(map(len, self._ids), default=0)
        self._heads = {text[:end].lower() for text in self._ids for end in range(1, len(text))}
        self._tails = {text[start:].lower() for text in self._ids for start in range(1, len(text))}
        self._first = frozenset(head[0] for head in self._heads)
        self._last = frozenset(tail[-1] for tail in self._tails)

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Pieces of a text: control tokens with their ids, and what stands between them with None."""
        start = 0
        for found in self._pattern.finditer(text):
            if found.start() > start:
                yield None, text[start : found.start()]
            yield self._ids[found.group()], found.group()
            start = found.end()
        if start < len(text):
            yield None, text[start:]

    def shield(self, value: Any, mark: str, *, assistant: bool = False) -> Any:
        """Plain data with every control token's text in it broken by the mark."""
        if isinstance(value, str):
            return self._shield_text(value, mark, assistant)
        if isinstance(value, dict):
            return {
                self._shield_text(key, mark, False): self.shield(each, mark, assistant=assistant)
                for key, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.shield(each, mark, assistant=assistant) for each in value]
        return value

    def _shield_text(self, text: str, mark: str, assistant: bool) -> str:
        pattern = self._hostile_in_assistant if assistant else self._hostile
        if pattern.search(text):
            text = pattern.sub(lambda found: f"{found.group()[0]}{mark}{found.group()[1:]}", text)
        if self._begins_like_a_tail(text):
            text = mark + text
        if self._ends_like_a_head(text):
            text += mark
        return text

    def _begins_like_a_tail(self, text: str) -> bool:
        start = text[: self._longest].lower()
        if self._last.isdisjoint(start):
            return False
        return any(start[:end] in self._tails for end in range(1, len(start) + 1))

    def _ends_like_a_head(self, text: str) -> bool:
        end = text[-self._longest :].lower()
        if self._first.isdisjoint(end):
            return False
        return any(end[start:] in self._heads for start in range(len(end)))


def choose_marks(texts: Iterable[str], count: int) -> list[str]:
    """Noncharacters that occur in none of the texts, neither as themselves nor escaped as JSON."""
    free = _NONCHARACTERS
    for text in texts:
        if any(each in text for each in free) or "\\ufd" in text.lower():
            lower = text.lower()
            free = [each for each in free if each not in text and _escaped(each) not in lower]
    return free[:count]


def erase(text: str, mark: str) -> str:
    """The text without its marks; `tojson(ensure_ascii=true)` writes them as escapes."""
    return text.replace(mark, "").replace(_escaped(mark), "")


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from strings(each)


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _pattern(texts: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    """Any of the texts, the longest that fits; a tree, because some models have thousands."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else r"(?!)", flags)


def _branches(node: dict[str, Any]) -> str:
    """`ab` and `ac` and `a` give `a(?:b|c)?`."""
    options = [re.escape(letter) + _branches(inner) for letter, inner in node.items() if letter]
    if not options:
        return ""
    whole = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return whole + ("?" if "" in node else "")
