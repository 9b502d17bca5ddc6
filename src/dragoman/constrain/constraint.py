"""Constraint: a language that an answer must be in; declared once, compiled, cached, and stepped by token
ids.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from llguidance import LLMatcher
from msgspec import Struct

from dragoman.constrain.compile_limits import check_text, compile_grammar
from dragoman.constrain.grammar.expressions import (
    PatternError,
    read_pattern,
    write_pattern,
    write_search,
)
from dragoman.constrain.grammar.gbnf import GbnfError, gbnf_to_lark
from dragoman.constrain.grammar.lark_builder import check_lark
from dragoman.constrain.grammar.trees import Tree
from dragoman.constrain.schema.json_schema import check_inner_schemas, prepare_schema, write_json
from dragoman.constrain.schema.keywords import SchemaProblems
from dragoman.constrain.schema.unique_items import UniqueItemsMatcher, UniqueItemsTracker
from dragoman.constrain.vocabulary import END, GrammarMatcher, Vocabulary, byte_vocabulary
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.registry import get_dialect
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import LARK_LINE

_LIMITS = Limits()
# Without the rule `watched` that `start` adds, this does not compile, so no grammar can embed it unwatched.
_WATCHED = "start: watched"


class Constraint(Struct, frozen=True):
    """A constraint of an answer. `grammar` is Lark for llguidance: `start: "<" %json {"type": "integer"}
    ">"`.

    `Constraint.from_regex("[ab]+").accepts("abba")` is true.

    `param` is the source in error messages: the field of the request that it came from.
    """

    grammar: str
    watched: str = ""
    """A schema, as JSON, that a grammar cannot fully express."""

    @classmethod
    def from_json_schema(
        cls, schema: Mapping[str, Any] | bool | str, param: str = "schema", limits: Limits = _LIMITS
    ) -> "Constraint":
        """Require JSON that the schema allows, with properties in the order of the schema."""
        problems = SchemaProblems()
        prepared = prepare_schema(schema, problems, param, limits, watched=True)
        problems.check(param)
        if problems.watched:
            return cls(_WATCHED, msgspec.json.encode(prepared).decode())
        return cls(f"start: {write_json(prepared)}")

    @classmethod
    def from_json_object(cls) -> "Constraint":
        """Require a JSON object."""
        return cls.from_json_schema({"type": "object"})

    @classmethod
    def from_regex(cls, pattern: str, param: str = "regex", limits: Limits = _LIMITS) -> "Constraint":
        """Require text that the expression matches from end to end."""
        return cls._from_pattern(pattern, write_pattern, param, limits)

    @classmethod
    def from_search(cls, pattern: str, param: str = "pattern", limits: Limits = _LIMITS) -> "Constraint":
        """Require text in which the expression matches somewhere, as in a JSON Schema."""
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
        return cls(f"start: TEXT\nTEXT: /{native}/").check(param, "is an expression that cannot be enforced")

    @classmethod
    def from_gbnf(cls, grammar: str, param: str = "grammar", limits: Limits = _LIMITS) -> "Constraint":
        """Require text in a grammar in llama.cpp's notation, which starts at `root`."""
        check_text(grammar, limits.grammar_chars, param, "characters of a grammar")
        try:
            constraint = cls(gbnf_to_lark(grammar))
        except GbnfError as error:
            raise BadRequest(
                f"'{param}' is not a valid GBNF grammar: {error}.", param=param, code="invalid_grammar"
            ) from error
        return constraint.check(param, "is too large or allows no text")

    @classmethod
    def from_lark(cls, grammar: str, param: str = "grammar", limits: Limits = _LIMITS) -> "Constraint":
        """Require text in a Lark grammar as llguidance reads it, which starts at `start`."""
        check_text(grammar, limits.grammar_chars, param, "characters of a grammar")
        check_lark(grammar, param, limits)
        return cls(check_inner_schemas(grammar, param, limits)).check(param, "is not a valid Lark grammar")

    @classmethod
    def from_choice(
        cls, choices: Sequence[str], param: str = "choice", limits: Limits = _LIMITS
    ) -> "Constraint":
        """Require one of these texts."""
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
        """Require calls in a model's own syntax: `from_dialect("hermes", tools, parallel=False)`."""
        # Imported here to break a cycle: the grammar of an answer may contain a constraint of its text.
        from dragoman.constrain.calls.answer_grammar import answer_constraint

        return answer_constraint(get_dialect(dialect) if isinstance(dialect, str) else dialect, tools, **how)

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the language, by the same masks that constrain answers."""
        matcher = compile_cached(self, byte_vocabulary())
        for byte in text.encode():
            if not matcher.allowed(byte):
                return False
            matcher.accept(byte)
        return matcher.allowed(END)

    def start(self, vocabulary: Vocabulary) -> GrammarMatcher:
        """Return a matcher for one answer, which is stepped by token ids."""
        schema = msgspec.json.decode(self.watched) if self.watched else None
        inner = f"\nwatched: {write_json(schema)}" if self.watched else ""
        native = compile_grammar(vocabulary, self.grammar + inner, tried=True)
        if native.is_error():
            message = "The grammar of this answer cannot be compiled; simplify it."
            if _WATCHED in self.grammar:
                message = (
                    "'uniqueItems' cannot be enforced in an answer that may have reasoning or calls; "
                    "leave it out."
                )
            raise BadRequest(message, code="invalid_grammar")
        return (
            UniqueItemsMatcher(vocabulary, native, UniqueItemsTracker(schema))
            if self.watched
            else GrammarMatcher(vocabulary, native)
        )

    def check(self, param: str, otherwise: str) -> "Constraint":
        """Return the constraint if it compiles, else raise. Special tokens are not looked up: they belong to
        a model.
        """
        wrong, warnings = LLMatcher.validate_grammar_with_warnings(LARK_LINE + self.grammar)
        wrong = wrong or any(not warning.startswith("no tokenizer") for warning in warnings)
        if wrong:
            raise BadRequest(
                f"'{param}' {otherwise}{_line(warnings[0])}.", param=param, code="invalid_grammar"
            )
        native = compile_grammar(byte_vocabulary(), self.grammar)
        if not native.is_error():
            native.compute_bitmask()
            if native.is_error():
                raise BadRequest(f"'{param}' allows no text.", param=param, code="invalid_grammar")
        return self


def _line(warning: str) -> str:
    """Return the line number in `at 3(14): ...`, without our own first line."""
    number = warning.removeprefix("at ").partition("(")[0]
    return f" (line {int(number) - 1})" if number.isdecimal() else ""


# A cache of compiled constraints for later requests with the same one, bounded by bytes.


LEAST_BYTES = 192 * 1024
"""Minimum estimate of one compiled grammar: the measured size of the smallest, rounded up."""


class MatcherCache:
    """LRU cache of matchers at their start, by constraint, for one vocabulary. Threads may share it.

    Compiling happens outside the lock, so a large schema does not delay other requests; two threads that need
    the same constraint at once may both compile it.
    """

    def __init__(self, vocabulary: Vocabulary, most_bytes: int = Limits().grammar_cache_bytes) -> None:
        self._vocabulary = vocabulary
        self._most = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Constraint, GrammarMatcher] = OrderedDict()
        self.bytes = 0

    def start(self, constraint: Constraint) -> GrammarMatcher:
        """Return a new matcher at the beginning of an answer."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.copy()
        matcher = constraint.start(self._vocabulary)
        fresh = matcher.copy()
        self._keep(constraint, matcher)
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
    """Return `constraint.start(vocabulary)`, from the cache of the vocabulary if possible."""
    with _CACHES_LOCK:
        cache = _CACHES.get(vocabulary)
        if cache is None:
            cache = _CACHES[vocabulary] = MatcherCache(vocabulary, most_bytes)
    return cache.start(constraint)


def _size(constraint: Constraint) -> int:
    """Estimate the bytes of a compiled constraint, which llguidance does not report: a minimum plus its
    length.
    """
    return LEAST_BYTES + 16 * len(constraint.grammar.encode())
