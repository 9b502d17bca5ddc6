"""A language that an answer must be in: declared once, stepped by token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from dragoman.constrain.vocabulary import Matcher, Vocabulary


class Constraint(Struct, frozen=True):
    """`grammar` is what llguidance compiles: Lark text, or one of its JSON grammars."""

    grammar: str

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Constraint":
        raise NotImplementedError

    @classmethod
    def from_regex(cls, pattern: str) -> "Constraint":
        raise NotImplementedError

    @classmethod
    def from_gbnf(cls, grammar: str) -> "Constraint":
        raise NotImplementedError

    @classmethod
    def from_lark(cls, grammar: str) -> "Constraint":
        raise NotImplementedError

    @classmethod
    def from_choice(cls, choices: Sequence[str]) -> "Constraint":
        raise NotImplementedError

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the language."""
        raise NotImplementedError

    def start(self, vocabulary: Vocabulary) -> Matcher:
        """A matcher for one answer, which is stepped by token ids."""
        raise NotImplementedError
