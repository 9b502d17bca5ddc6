"""What compiling may cost. Sizes and depths are checked before anything that recurses or compiles.

llguidance counts its work, but not all of it: `/(.{97})*/ & /(.{89})*/ & /(.{83})*/` keeps it busy for
minutes. Nothing stops it in our own process, so such grammars are tried out in one that can be killed.
"""

import logging
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from threading import Lock
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from dragoman.constrain.vocabulary import Vocabulary
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.types import LARK_LINE

_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
# The first line makes sure that the text is read as Lark. The last one overrules what a grammar says of
# itself: without it only one way to cut a forced text into tokens is allowed, and that is not the model's.
_LAST = '\n%llguidance {"no_forcing": true}\n'


def parser_limits() -> LLParserLimits:
    """About 0.1 s to compile and 10 ms a step at the very most; an ordinary schema takes far less."""
    return LLParserLimits(
        max_items_in_row=5000,
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(vocabulary: Vocabulary, grammar: str, *, tried: bool = False) -> LLMatcher:
    """It may be in an error state; see `LLMatcher.get_error`. `tried`: its parts were compiled before."""
    if not tried:
        check_examined(grammar)
    return LLMatcher(vocabulary.native, LARK_LINE + grammar + _LAST, log_level=0, limits=parser_limits())


def read_schema(schema: Any, param: str, limits: Limits) -> Any:
    """The schema as plain values, if it is neither large nor deep."""
    try:
        text = schema if isinstance(schema, str) else None
        if text is None:
            _check_depth(schema, param, limits)
            text = msgspec.json.encode(schema).decode()
        check_count(len(text.encode()), limits.schema_bytes, param, "bytes of a schema")
        _check_text_depth(text.encode(), param, limits)
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, UnicodeError) as error:
        raise BadRequest(f"'{param}' must be JSON.", param=param, code="invalid_schema") from error


def _check_depth(value: Any, param: str, limits: Limits) -> None:
    """Level by level, without recursion. A value that holds itself is too deep as well."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limits.schema_depth:
            _too_deep(param, limits)
        level = [
            inner for one in level for inner in _inside(one) if isinstance(inner, Mapping | list | tuple)
        ]
        check_count(len(level), limits.schema_bytes, param, "values of a schema")


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()


def _check_text_depth(text: bytes, param: str, limits: Limits) -> None:
    depth, in_string, escaped = 0, False, False
    for byte in text:
        if in_string:
            in_string = escaped or byte != 0x22
            escaped = byte == 0x5C and not escaped
        elif byte == 0x22:
            in_string = True
        elif byte in _OPENING:
            depth += 1
            if depth > limits.schema_depth:
                _too_deep(param, limits)
        elif byte in _CLOSING:
            depth -= 1


def _too_deep(param: str, limits: Limits) -> None:
    message = (
        f"'{param}' has values within each other more than {limits.schema_depth} deep; use $defs and $ref."
    )
    raise BadRequest(message, param=param, code="limit_exceeded")


def check_text(text: Any, most: int, param: str, what: str) -> str:
    """`check_text(pattern, limits.pattern_chars, "regex", "characters of an expression")`"""
    if not isinstance(text, str):
        raise BadRequest(f"'{param}' must be a string.", param=param, code="invalid_value")
    check_count(len(text), most, param, what)
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise BadRequest(f"'{param}' holds half of a surrogate pair.", param=param, code="invalid_value")
    return text


logger = logging.getLogger("dragoman.constrain")

MOST_KEPT = 4096
"""Verdicts, the last ones."""
LENGTH = struct.Struct("!I")
FINE, REFUSED = b"+", b"-"


class Examiner:
    """Threads may share it: they are answered one after the other."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Raises where it cannot be compiled within the budget."""
        key = sha256(grammar.encode()).digest()
        with self._lock:
            fine = self._verdicts.get(key)
            if fine is None:
                fine = self._verdicts[key] = self._ask(grammar.encode())
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > MOST_KEPT:
                self._verdicts.popitem(last=False)
        if not fine:
            message = "This takes too long to compile, or too much memory; make it simpler."
            raise BadRequest(message, code="limit_exceeded")

    def _ask(self, grammar: bytes) -> bool:
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(LENGTH.pack(len(grammar)) + grammar)
            process.stdin.flush()
            return process.stdout.read(1) == FINE
        except OSError:
            logger.exception("Grammars cannot be tried out beforehand")
            return False

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dragoman.constrain.examiner"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process


_examiner: Examiner | None = None


def examine() -> None:
    """From now on. A server does so; who compiles grammars of their own need not."""
    global _examiner
    if _examiner is None and sys.platform == "linux":
        _examiner = Examiner()


def check_examined(grammar: str) -> None:
    """Raises for a grammar that takes too much, where grammars are examined.

    Only where languages are intersected or inverted can few characters mean very many states.
    """
    if _examiner is not None and ("&" in grammar or "~" in grammar):
        _examiner.check(grammar)
