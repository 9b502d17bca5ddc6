"""Limits on the cost of compiling a grammar. Sizes and depths are checked before anything recurses or
compiles.

llguidance counts its work, but not all of it: `/(.{97})*/ & /(.{89})*/ & /(.{83})*/` takes it minutes, which
nothing can interrupt in the server's own process. Such grammars are first compiled in a process that can be
killed.
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
# The first line, `LARK_LINE`, makes llguidance read the text as Lark. The last line overrides options of the
# grammar: otherwise only one tokenization of a forced text is allowed, and not the model's.
_LAST = '\n%llguidance {"no_forcing": true}\n'


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits: about 0.1 s to compile and 10 ms per step at most. Typical schemas take far
    less.
    """
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
    """Compile a grammar; the matcher may be in an error state, see `LLMatcher.get_error`.

    `tried` means that its parts were compiled before.
    """
    if not tried:
        check_compiles(grammar)
    return LLMatcher(vocabulary.native, LARK_LINE + grammar + _LAST, log_level=0, limits=parser_limits())


def read_schema(schema: Any, param: str, limits: Limits) -> Any:
    """Return the schema as plain values, if it is neither too large nor too deep."""
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
    """Check the depth level by level, without recursion. A value that contains itself is also too deep."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limits.schema_depth:
            _too_deep(param, limits)
        level = [
            inner for value in level for inner in _inside(value) if isinstance(inner, Mapping | list | tuple)
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
    message = f"'{param}' is nested more than {limits.schema_depth} levels deep; use $defs and $ref."
    raise BadRequest(message, param=param, code="limit_exceeded")


def check_text(text: Any, most: int, param: str, what: str) -> str:
    """Check a string, as in `check_text(pattern, limits.pattern_chars, "regex", "characters of an
    expression")`.
    """
    if not isinstance(text, str):
        raise BadRequest(f"'{param}' must be a string.", param=param, code="invalid_value")
    check_count(len(text), most, param, what)
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise BadRequest(
            f"'{param}' contains half of a surrogate pair; remove it.", param=param, code="invalid_value"
        )
    return text


logger = logging.getLogger("dragoman.constrain")

MOST_KEPT = 4096
"""Maximum number of cached verdicts."""
LENGTH = struct.Struct("!I")
FINE, REFUSED = b"+", b"-"


class CompileChecker:
    """Client of the process that tries grammars. Threads may share it: calls are answered one after the
    other.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Raise `BadRequest` if the grammar cannot be compiled within the budget."""
        key = sha256(grammar.encode()).digest()
        with self._lock:
            fine = self._verdicts.get(key)
            if fine is None:
                fine = self._verdicts[key] = self._ask(grammar.encode())
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > MOST_KEPT:
                self._verdicts.popitem(last=False)
        if not fine:
            message = "The grammar takes too much time or memory to compile; simplify it."
            raise BadRequest(message, code="limit_exceeded")

    def _ask(self, grammar: bytes) -> bool:
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(LENGTH.pack(len(grammar)) + grammar)
            process.stdin.flush()
            return process.stdout.read(1) == FINE
        except OSError:
            logger.exception("The process that tries grammars failed")
            return False

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dragoman.constrain.compile_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process


_examiner: CompileChecker | None = None


def enable_compile_checks() -> None:
    """Try costly grammars in another process from now on. The server does so; a program that compiles only
    its own grammars need not.
    """
    global _examiner
    if _examiner is None and sys.platform == "linux":
        _examiner = CompileChecker()


def check_compiles(grammar: str) -> None:
    """Raise `BadRequest` for a grammar that takes too much to compile, if grammars are tried.

    Only intersections and complements of languages can turn a few characters into very many states.
    """
    if _examiner is not None and ("&" in grammar or "~" in grammar):
        _examiner.check(grammar)
