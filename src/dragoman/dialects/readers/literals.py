"""Python's and Gemma's literals, converted to JSON while they are read. Nothing is evaluated.

Nesting is kept in a list, not on the stack, so deep nesting is cheap and safe.
"""

import json
import re
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from dragoman.dialects.declarations import BraceCalls, PythonCalls
from dragoman.dialects.marker_tables import marks_of
from dragoman.dialects.scan import MarkerSet, Scanner, TextSink, Wait
from dragoman.dialects.schema import NUMBER, WORDS, ArgumentSchema, escape_json, quote_json

if TYPE_CHECKING:
    from dragoman.dialects.state_machine import AnswerStateMachine

NAME = re.compile(r"\s*[\w.\-]*\s*")
KEY = re.compile(r"\s*[\w\-]*\s*")
PARENTHESIS, EQUALS, BRACE = MarkerSet(("(",)), MarkerSet(("=",)), MarkerSet(("{",))
KEY_END, NO_MARKS = MarkerSet((":", ",", "}")), MarkerSet(())
HEXADECIMAL = re.compile(r"[0-9a-fA-F]")
VALUE_START = re.compile(r"[\w\"'\[{(\-+.]")
# Possessive quantifiers (++) do not backtrack, so a long word costs only its length.
NUMBERISH = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F_]++|0[oO][0-7_]++|0[bB][01_]++|[0-9_]*+\.?[0-9_]*+(?:[eE][+-]?[0-9]++)?)"
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
ESCAPES |= {"\\": "\\", "'": "'", '"': '"'}
CODES = {"x": 2, "u": 4, "U": 8}
PLACELESS = ArgumentSchema(None, {})


class QuoteStyle(Struct, frozen=True):
    """How strings are quoted, and what ends a bare word."""

    quotes: tuple[str, ...]
    word_end: MarkerSet
    escapes: bool
    any_word: bool = True
    """Whether a bare word that is not a literal is text."""


PYTHON = QuoteStyle(("'", '"'), MarkerSet(" \n\t\r,[](){}:'\"="), escapes=True)
STRICT_PYTHON = msgspec.structs.replace(PYTHON, any_word=False)


@cache
def brace_style(quote: str) -> QuoteStyle:
    return QuoteStyle((quote,), MarkerSet((*",[]{}", quote)), escapes=False)


class _Level(Struct):
    """An open list or object."""

    is_object: bool
    argument_schema: ArgumentSchema
    item: ArgumentSchema
    """Schema of the next item."""
    at_key: bool
    empty: bool = True
    full: bool = False
    """Whether an item is complete, so a comma or the end must follow."""

    def may_be_followed_by(self, character: str) -> bool:
        """Whether the character may follow: `{"a": }`, `[1}` and `[1 2]` are not literals."""
        if character in "]})":
            return self.at_key and character == "}" if self.is_object else character != "}"
        return not self.full if character != "," else self.at_key or not self.is_object


def read_python_calls(m: "AnswerStateMachine", shape: PythonCalls) -> Wait[bool]:
    """Read `[f(a=1), g()]`; without brackets, calls are on successive lines."""
    following = yield from m.space()
    bracket = following == "[" and shape.brackets
    if bracket:
        m.at += 1
    elif shape.brackets and not shape.open:
        return False
    while True:
        m.begin_call(shape)
        if not (yield from _python_call(m, shape)):
            return False
        m.begin_trial()
        following = yield from m.space()
        if following == "," and (bracket or shape.separator.strip() == ","):
            m.at += 1
            following = yield from m.space()
        if following == "]" and bracket:
            m.at += 1
            m.commit_trial()
            return True
        if not (following.isidentifier() and (bracket or not shape.brackets)):
            m.sink(m.abort_trial())
            return True


def _python_call(m: "AnswerStateMachine", shape: PythonCalls) -> Wait[bool]:
    name, text = yield from m.collect(PARENTHESIS, NAME)
    if not text or not name.strip():
        return False
    lead, opened = "{", False
    while True:
        following = yield from m.space()
        if following == ")":
            m.at += 1
            if not opened:
                m.open_call(name.strip(), None, shape)
            m.arguments("{}" if lead == "{" else "}")
            m.close_call()
            return True
        if following == "," and opened:
            m.at += 1
            continue
        key, text = yield from m.collect(EQUALS, KEY)
        following = (yield from m.space()) if text else ""
        if not following or not VALUE_START.match(following) or not key.strip():
            if m.ended and m.at == len(m.text) and (opened or shape.open):
                # The answer ends here: the name is certain, and the key is incomplete.
                if not opened:
                    m.open_call(name.strip(), None, shape)
                m.arguments(f'{lead}"{escape_json(key.strip())}' if key.strip() else lead.rstrip(", "))
            elif opened:
                m.set_aside(key + text)
            return False
        if not opened:
            opened = True
            m.open_call(name.strip(), None, shape)
        m.arguments(f"{lead}{quote_json(key.strip())}: ")
        lead = ", "
        if not (yield from read_literal(m, m.arguments, PYTHON)):
            return False


def read_brace_call(m: "AnswerStateMachine", shape: BraceCalls) -> Wait[bool]:
    """Read `f{a:1}`."""
    name, text = yield from m.collect(BRACE, NAME)
    if not text or not name.strip():
        return False
    m.at -= 1
    schema = m.tools.arguments(name.strip())
    m.open_call(name.strip(), None, shape)
    stops = marks_of(shape.close)
    complete = yield from read_literal(m, m.arguments, brace_style(shape.quote), schema, stops)
    if complete:
        m.close_call()
    return complete


def read_literal(
    m: Scanner,
    sink: TextSink,
    style: QuoteStyle,
    schema: ArgumentSchema = PLACELESS,
    stops: MarkerSet = NO_MARKS,
) -> Wait[bool]:
    """Read one value and write it to the sink as JSON. Return False if the text ends before the value."""
    levels: list[_Level] = []
    quotes = MarkerSet(style.quotes)
    while True:
        following = yield from m.space()
        level = levels[-1] if levels else None
        if not following or (yield from m.peek_marker(stops)):
            return False
        if level is not None and not level.may_be_followed_by(following):
            return False
        if level is not None and following == ",":
            m.at += 1
            level.full = False
            continue
        if level is not None and following in "]})":
            m.at += 1
            sink("}" if level.is_object else "]")
            levels.pop()
        elif level is not None and level.at_key:
            if not (yield from _key(m, sink, level, style, quotes)):
                return False
            continue
        else:
            if level is not None and not level.is_object:
                sink("" if level.empty else ", ")
                level.empty = False
            inner = level.item if level else schema
            if following in "[{(":
                m.at += 1
                sink("{" if following == "{" else "[")
                levels.append(_Level(following == "{", inner, inner.item(), following == "{"))
                continue
            if not (yield from _scalar(m, sink, style, inner, quotes)):
                return False
        if not levels:
            return True
        levels[-1].at_key, levels[-1].full = levels[-1].is_object, True


def _key(m: Scanner, sink: TextSink, level: _Level, style: QuoteStyle, quotes: MarkerSet) -> Wait[bool]:
    parts: list[str] = []
    if (yield from m.peek_marker(quotes)):
        if not (yield from read_string(m, parts.append, style)):
            sink(("" if level.empty else ", ") + "".join(parts))
            return False
        key: str = json.loads("".join(parts))
    else:
        text = yield from m.until(KEY_END, parts.append)
        m.at -= len(text)
        key = "".join(parts).strip()
    sink(("" if level.empty else ", ") + quote_json(key) + ": ")
    level.empty, level.at_key, level.item = False, False, level.argument_schema.member(key)
    if (yield from m.space()) != ":":
        return False
    m.at += 1
    return True


def _scalar(
    m: Scanner, sink: TextSink, style: QuoteStyle, schema: ArgumentSchema, quotes: MarkerSet
) -> Wait[bool]:
    if (yield from m.peek_marker(quotes)):
        return (yield from read_string(m, sink, style))
    parts: list[str] = []
    text = yield from m.until(style.word_end, parts.append)
    m.at -= len(text)
    word = "".join(parts).strip()
    if not word:
        return False
    value = _word(word) if style.escapes else schema.json(word, "json" if schema.known else "text")
    if not style.any_word and value.startswith('"'):
        return False
    sink(value)
    return bool(text)


def _word(word: str) -> str:
    """Convert a bare word of Python to JSON; a word that is not a literal becomes a string."""
    if word in WORDS:
        return WORDS[word]
    if NUMBER.fullmatch(word):
        return word
    if not NUMBERISH.fullmatch(word) or not any(c.isdigit() for c in word):
        return quote_json(word)
    try:
        return str(int(word, 0)) if "." not in word and "e" not in word.lower() else repr(float(word))
    except (ValueError, OverflowError):
        return quote_json(word)


def read_string(m: Scanner, sink: TextSink, style: QuoteStyle) -> Wait[bool]:
    """Read a string with its quotes, as a JSON string."""
    quote = yield from m.match(MarkerSet(style.quotes))
    ends = MarkerSet((quote, "\\") if style.escapes else (quote,))
    pieces = m.escaping(sink)
    sink('"')
    while True:
        text = yield from m.until(ends, pieces)
        if text == quote:
            sink('"')
            return True
        if not text:
            return False
        sink((yield from _escape(m)))


def _escape(m: Scanner) -> Wait[str]:
    """Read what follows a backslash; return it as written in a JSON string."""
    character = yield from m.peek()
    m.at += len(character)
    if character not in CODES:
        return escape_json(ESCAPES.get(character, "\\" + character))
    digits = ""
    while len(digits) < CODES[character] and HEXADECIMAL.match((yield from m.peek())):
        digits += m.text[m.at]
        m.at += 1
    if len(digits) < CODES[character] or int(digits, 16) > 0x10FFFF:
        return escape_json("\\" + character + digits)
    # The halves of a surrogate pair come one after the other; JSON writes them the same way.
    return "\\u" + digits if character == "u" else escape_json(chr(int(digits, 16)))


def python_as_json(text: str) -> str | None:
    """Convert `{'a': True}` to JSON; return None if the text is not a literal."""
    scanner, parts = Scanner(), list[str]()
    scanner.append(text)
    scanner.ended = True
    reading = read_literal(scanner, parts.append, STRICT_PYTHON)
    try:
        next(reading)
    except StopIteration as done:
        return "".join(parts) if done.value and not text[scanner.at :].strip() else None
    return None
