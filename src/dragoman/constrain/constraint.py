"""A language that an answer must be in: declared once, compiled and kept, stepped by token ids."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from llguidance import LLMatcher
from msgspec import Struct

from dragoman.constrain.budget import check_text, compile_grammar
from dragoman.constrain.grammar.expressions import (
    PatternError,
    read_pattern,
    write_pattern,
    write_search,
)
from dragoman.constrain.grammar.gbnf import GbnfError, gbnf_to_lark
from dragoman.constrain.grammar.rules import check_lark
from dragoman.constrain.grammar.trees import Tree
from dragoman.constrain.schema.json_schema import check_inner_schemas, prepare_schema, write_json
from dragoman.constrain.schema.keywords import Problems
from dragoman.constrain.schema.unique import UniqueWatch, WatchedMatcher
from dragoman.constrain.vocabulary import END, GrammarMatcher, Vocabulary, byte_vocabulary
from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import get_dialect
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import LARK_LINE

_LIMITS = Limits()
# Without the rule that `start` adds it does not compile, so no grammar can hold it that is not watched.
_WATCHED = "start: watched"


class Constraint(Struct, frozen=True):
    """`grammar` is Lark text as llguidance reads it: `start: "<" %json {"type": "integer"} ">"`.

    `Constraint.from_regex("[ab]+").accepts("abba")` is true.

    `param` is what messages call the source: the field of a request that it came from.
    """

    grammar: str
    watched: str = ""
    """A schema, as JSON, of which a grammar cannot say all."""

    @classmethod
    def from_json_schema(
        cls, schema: Mapping[str, Any] | bool | str, param: str = "schema", limits: Limits = _LIMITS
    ) -> "Constraint":
        """JSON that the schema allows, with properties in the order in which the schema names them."""
        problems = Problems()
        prepared = prepare_schema(schema, problems, param, limits, watched=True)
        problems.check(param)
        if problems.watched:
            return cls(_WATCHED, msgspec.json.encode(prepared).decode())
        return cls(f"start: {write_json(prepared)}")

    @classmethod
    def from_json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls.from_json_schema({"type": "object"})

    @classmethod
    def from_regex(cls, pattern: str, param: str = "regex", limits: Limits = _LIMITS) -> "Constraint":
        """Text that the expression matches from end to end."""
        return cls._from_pattern(pattern, write_pattern, param, limits)

    @classmethod
    def from_search(cls, pattern: str, param: str = "pattern", limits: Limits = _LIMITS) -> "Constraint":
        """Text in which the expression matches somewhere, as in a JSON Schema."""
        return cls._from_pattern(pattern, write_search, param, limits)

    @classmethod
    def _from_pattern(
        cls, pattern: str, write: Callable[[Tree], str], param: str, limits: Limits
    ) -> "Constraint":
        check_text(pattern, limits.pattern_chars, param, "characters of an expression")
        try:
            native = write(read_pattern(pattern))
        except PatternError as error:
            raise BadRequest(f"'{param}' {error}.", param=param, code="invalid_grammar") from error
        return cls(f"start: TEXT\nTEXT: /{native}/").check(param, "is no expression that can be enforced")

    @classmethod
    def from_gbnf(cls, grammar: str, param: str = "grammar", limits: Limits = _LIMITS) -> "Constraint":
        """A grammar in llama.cpp's notation; its start is `root`."""
        check_text(grammar, limits.grammar_chars, param, "characters of a grammar")
        try:
            made = cls(gbnf_to_lark(grammar))
        except GbnfError as error:
            raise BadRequest(
                f"'{param}' is no grammar in GBNF: {error}.", param=param, code="invalid_grammar"
            ) from error
        return made.check(param, "is too large, or allows no text at all")

    @classmethod
    def from_lark(cls, grammar: str, param: str = "grammar", limits: Limits = _LIMITS) -> "Constraint":
        """A grammar in Lark's notation, as llguidance reads it; its start is `start`."""
        check_text(grammar, limits.grammar_chars, param, "characters of a grammar")
        check_lark(grammar, param, limits)
        return cls(check_inner_schemas(grammar, param, limits)).check(
            param, "is no grammar in Lark that compiles"
        )

    @classmethod
    def from_choice(
        cls, choices: Sequence[str], param: str = "choice", limits: Limits = _LIMITS
    ) -> "Constraint":
        """One of these texts."""
        check_count(len(choices), limits.grammar_choices, param, "texts to choose from")
        if not choices:
            raise BadRequest(f"'{param}' must name at least one text.", param=param, code="invalid_value")
        for number, choice in enumerate(choices):
            check_text(choice, limits.grammar_chars, f"{param}[{number}]", "characters of a text")
        check_count(sum(map(len, choices)), limits.grammar_chars, param, "characters of all texts")
        texts = " | ".join(json.dumps(choice) for choice in choices)
        return cls(f"start: TEXT\nTEXT: {texts}").check(param, "cannot be compiled")

    @classmethod
    def from_dialect(
        cls, dialect: str | Dialect, tools: Sequence[Mapping[str, Any]], **how: Any
    ) -> "Constraint":
        """Calls in a model's own syntax: `from_dialect("hermes", tools, parallel=False)`."""
        # Here for the cycle: the grammar of an answer may hold a constraint of its text.
        from dragoman.constrain.calls.answer_grammar import answer_grammar

        return answer_grammar(get_dialect(dialect) if isinstance(dialect, str) else dialect, tools, **how)

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the language; asked of the same masks that answers are made with."""
        matcher = compile_cached(self, byte_vocabulary())
        for byte in text.encode():
            if not matcher.allowed(byte):
                return False
            matcher.accept(byte)
        return matcher.allowed(END)

    def start(self, vocabulary: Vocabulary) -> GrammarMatcher:
        """A matcher for one answer, which is stepped by token ids."""
        schema = msgspec.json.decode(self.watched) if self.watched else None
        inner = f"\nwatched: {write_json(schema)}" if self.watched else ""
        native = compile_grammar(vocabulary, self.grammar + inner, tried=True)
        if native.is_error():
            message = "The grammar of this answer cannot be compiled; make it smaller."
            if _WATCHED in self.grammar:
                message = "'uniqueItems' cannot be enforced in an answer that also holds reasoning or calls."
            raise BadRequest(message, code="invalid_grammar")
        return (
            WatchedMatcher(vocabulary, native, UniqueWatch(schema))
            if self.watched
            else GrammarMatcher(vocabulary, native)
        )

    def check(self, param: str, otherwise: str) -> "Constraint":
        """Itself, if it compiles; special tokens are not looked up, since they belong to a model."""
        wrong, said = LLMatcher.validate_grammar_with_warnings(LARK_LINE + self.grammar)
        wrong = wrong or any(not warning.startswith("no tokenizer") for warning in said)
        if wrong:
            raise BadRequest(f"'{param}' {otherwise}{_line(said[0])}.", param=param, code="invalid_grammar")
        native = compile_grammar(byte_vocabulary(), self.grammar)
        if not native.is_error():
            native.compute_bitmask()
            if native.is_error():
                raise BadRequest(f"'{param}' allows no text at all.", param=param, code="invalid_grammar")
        return self


def _line(said: str) -> str:
    """Where it is, out of `at 3(14): ...`; our own first line does not count."""
    number = said.removeprefix("at ").partition("(")[0]
    return f" (line {int(number) - 1})" if number.isdecimal() else ""


# Compiled constraints, kept for the next request that asks for the same. Bounded by what they take.


LEAST_BYTES = 192 * 1024
"""Of the smallest grammar, compiled: measured, with some room."""


class MatcherCache:
    """Matchers at their start, by constraint, for one vocabulary. Threads may share it.

    Compiling happens outside the lock, so one large schema does not hold up the others; two threads that
    ask for the same one at once may both compile it.
    """

    def __init__(self, vocabulary: Vocabulary, most_bytes: int = Limits().grammar_cache_bytes) -> None:
        self._vocabulary = vocabulary
        self._most = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Constraint, GrammarMatcher] = OrderedDict()
        self.bytes = 0

    def start(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher of one's own, at the beginning of an answer."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.copy()
        made = constraint.start(self._vocabulary)
        fresh = made.copy()
        self._keep(constraint, made)
        return fresh

    def _keep(self, constraint: Constraint, matcher: GrammarMatcher) -> None:
        size = _size(constraint)
        if size > self._most:
            return
        with self._lock:
            if constraint not in self._kept:
                self._kept[constraint] = matcher
                self.bytes += size
            while self.bytes > self._most:
                dropped, _ = self._kept.popitem(last=False)
                self.bytes -= _size(dropped)


_CACHES: "WeakKeyDictionary[Vocabulary, MatcherCache]" = WeakKeyDictionary()
_CACHES_LOCK = Lock()


def compile_cached(
    constraint: Constraint, vocabulary: Vocabulary, most_bytes: int = Limits().grammar_cache_bytes
) -> GrammarMatcher:
    """`constraint.start(vocabulary)`, from the cache of that vocabulary if it is there."""
    with _CACHES_LOCK:
        cache = _CACHES.get(vocabulary)
        if cache is None:
            cache = _CACHES[vocabulary] = MatcherCache(vocabulary, most_bytes)
    return cache.start(constraint)


def _size(constraint: Constraint) -> int:
    """About what it takes, which llguidance does not tell: much for the least, and then with its length."""
    return LEAST_BYTES + 16 * len(constraint.grammar.encode())
