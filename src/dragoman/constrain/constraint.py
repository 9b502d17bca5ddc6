"""A language that an answer must be in: declared once, stepped by token ids."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from msgspec import Struct

from dragoman.constrain.vocabulary import Matcher, Vocabulary
from dragoman.errors import BadRequest


class Constraint(Struct, frozen=True):
    """`grammar` is Lark text as llguidance reads it: `start: "<" %json {"type": "integer"} ">"`.

    `Constraint.from_regex("[ab]+").accepts("abba")` is true.
    """

    grammar: str

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | bool | str, param: str = "schema") -> "Constraint":
        """JSON that the schema allows, with properties in the order in which the schema names them."""
        value = json.loads(schema) if isinstance(schema, str) else schema
        return cls(f"start: %json {json.dumps(value)}")

    @classmethod
    def from_json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls.from_json_schema({"type": "object"})

    @classmethod
    def from_regex(cls, pattern: str, param: str = "regex") -> "Constraint":
        """Text that the expression matches from end to end."""
        return cls(f"start: TEXT\nTEXT: /{regex_to_lark(pattern)}/")

    @classmethod
    def from_gbnf(cls, grammar: str, param: str = "grammar") -> "Constraint":
        """A grammar in llama.cpp's notation; its start is `root`."""
        raise NotImplementedError

    @classmethod
    def from_lark(cls, grammar: str, param: str = "grammar") -> "Constraint":
        """A grammar in Lark's notation, as llguidance reads it; its start is `start`."""
        return cls(grammar)

    @classmethod
    def from_choice(cls, choices: Sequence[str], param: str = "choice") -> "Constraint":
        """One of these texts."""
        return cls("start: TEXT\nTEXT: " + " | ".join(json.dumps(choice) for choice in choices))

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the language; asked of the same masks that answers are made with."""
        matcher = self.start(_bytes())
        for byte in text.encode():
            if not matcher.allowed(byte):
                return False
            matcher.accept(byte)
        return matcher.allowed(_END)

    def start(self, vocabulary: Vocabulary) -> Matcher:
        """A matcher for one answer, which is stepped by token ids."""
        native = LLMatcher(vocabulary.native, _FIRST + self.grammar + _LAST, log_level=0)
        if native.is_error():
            raise BadRequest("The grammar cannot be compiled.", code="invalid_grammar")
        return Matcher(vocabulary, native)


_END = 256
# The first line makes sure that the text is read as Lark. The last one overrules what a grammar says of
# itself: without it only one way to cut a forced text into tokens is allowed, and that is not the model's.
_FIRST = "%llguidance {}\n"
_LAST = '\n%llguidance {"no_forcing": true}\n'


@cache
def _bytes() -> Vocabulary:
    """A vocabulary in which every byte is an id, and 256 ends."""
    return Vocabulary([*(bytes([byte]) for byte in range(256)), b""], {}, [_END])
