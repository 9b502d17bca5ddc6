"""Turns the format that a client requires of an answer into a constraint on token ids."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property
from hashlib import sha256
from threading import Lock
from typing import Any

from msgspec.msgpack import encode
from msgspec.structs import replace

from dragoman.constrain.calls.answer_grammar import CallMode, answer_constraint
from dragoman.constrain.calls.structural_tag import (
    Format,
    after_reasoning,
    calls_format,
    either,
    read_format,
    read_tags,
)
from dragoman.constrain.calls.tool_schemas import read_tools, strict_names
from dragoman.constrain.compile_limits import enable_compile_checks
from dragoman.constrain.constraint import Constraint, compile_cached
from dragoman.constrain.grammar.gbnf import write_plain
from dragoman.constrain.reasoning_budget import BudgetedConstraint, ConstraintSpec, ReasoningBudget
from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary
from dragoman.dialects.declarations import Dialect
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import BadRequest, ParamKey
from dragoman.limits import Limits
from dragoman.turns.spec import OutputConstraint, ToolCallPolicy, TurnSpec
from dragoman.types import ConstraintSource, JobConstraint

# Constraints as text, for engines that enforce them instead of stepping a matcher.


def source_of(
    spec: TurnSpec, dialect: Dialect, whole: Constraint, card: ModelCard, *, in_reasoning: bool
) -> ConstraintSource | None:
    """Return the first form that the engine accepts; `whole` is the grammar of the complete answer."""
    ways = [*_alone(spec, dialect, card, in_reasoning)]
    if "structural_tag" in card.constraint_formats:
        ways += _write_tagged(spec, dialect, card, in_reasoning)
    if not whole.watched:
        ways.append(ConstraintSource("lark", whole.grammar))
    return next((way for way in ways if way.format in card.constraint_formats), None)


def _alone(
    spec: TurnSpec, dialect: Dialect, card: ModelCard, in_reasoning: bool
) -> Iterator[ConstraintSource]:
    """Yield the client's own constraint, if the answer is only text or only text follows the reasoning."""
    if spec.output_constraint is None:
        return
    if spec.parsing is None:
        yield from _write_source(spec.output_constraint)
        return
    if spec.parsing.calls or _wraps_text(dialect):
        return
    after = card.constrains_after_reasoning and _reasons(spec, dialect, in_reasoning)
    if after or not in_reasoning:
        for way in _write_source(spec.output_constraint):
            yield ConstraintSource(way.format, way.text, after)


def _wraps_text(dialect: Dialect) -> bool:
    return dialect.channels is not None or bool(dialect.text_open)


def _reasons(spec: TurnSpec, dialect: Dialect, in_reasoning: bool) -> bool:
    """Whether reasoning may come before the constrained text."""
    unwanted = spec.reasoning_limit is not None and not spec.reasoning_limit.tokens
    exclude = spec.parsing is not None and spec.parsing.reasoning
    return in_reasoning or (dialect.reasoning is not None and exclude and not unwanted)


def _write_source(wanted: OutputConstraint) -> Iterator[ConstraintSource]:
    value = wanted.value
    match wanted.syntax:
        case "json_object":
            yield ConstraintSource("json_schema", '{"type": "object"}')
        case "json_schema":
            yield ConstraintSource("json_schema", value if isinstance(value, str) else json.dumps(value))
        case "choice":
            texts = [json.dumps(choice, ensure_ascii=False) for choice in value]
            yield ConstraintSource("choice", f"[{', '.join(texts)}]")
            yield ConstraintSource("gbnf", f"root ::= {' | '.join(texts)}")
        case "structural_tag":
            tags = {"type": "structural_tag", "format": read_format(value, wanted.param)}
            yield ConstraintSource("structural_tag", json.dumps(tags))
        case "gbnf":
            yield ConstraintSource("gbnf", write_plain(value))
        case "regex" | "lark":
            yield ConstraintSource(wanted.syntax, value)


def _write_tagged(
    spec: TurnSpec, dialect: Dialect, card: ModelCard, in_reasoning: bool
) -> Iterator[ConstraintSource]:
    """Yield calls, and text after reasoning, if xgrammar's tags can express them."""
    inside = _format(spec, dialect)
    if inside is None:
        return
    reasons = _reasons(spec, dialect, in_reasoning)
    if reasons and not card.constrains_after_reasoning:
        inside = after_reasoning(dialect, inside, begun=in_reasoning)
    text = json.dumps({"type": "structural_tag", "format": inside})
    yield ConstraintSource("structural_tag", text, reasons and card.constrains_after_reasoning)


def _format(spec: TurnSpec, dialect: Dialect) -> Format | None:
    reading, calling = spec.parsing, spec.tool_policy or ToolCallPolicy()
    text = (
        None
        if spec.output_constraint is None or _wraps_text(dialect)
        else _text_format(spec.output_constraint)
    )
    if reading is None or not reading.calls:
        return text
    if spec.output_constraint is not None and text is None and not calling.required:
        return None
    alone = calling.required or text is not None
    held = None if calling.required else strict_names(reading.tools)
    tools = read_tools(reading.tools, calling.names, held, reading.custom, reading.params)
    calls = calls_format(dialect, tools, required=alone, parallel=reading.most_calls is None)
    return calls if calls is None or text is None or calling.required else either([calls, text])


def _text_format(wanted: OutputConstraint) -> Format | None:
    value = wanted.value
    match wanted.syntax:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {
                "type": "json_schema",
                "json_schema": json.loads(value) if isinstance(value, str) else value,
            }
        case "regex":
            return {"type": "regex", "pattern": value}
        case "gbnf":
            return {"type": "grammar", "grammar": write_plain(value)}
        case "choice":
            return either([{"type": "const_string", "value": choice} for choice in value])
        case "structural_tag":
            return read_format(value, wanted.param)
        case "lark":
            return None


# Constraints on ids.


LEAST_BYTES = 1024
"""Bytes that a cached grammar takes in addition to its text."""


class CompiledConstraint:
    """A compiled constraint; every answer gets its own copy of the matcher."""

    source = None

    def __init__(self, matcher: GrammarMatcher, recipe: ConstraintSpec | None = None) -> None:
        self._matcher = matcher
        self.recipe = recipe

    def new_matcher(self) -> GrammarMatcher:
        return self._matcher.copy()


class DelegatedConstraint:
    """A constraint that the engine enforces; compiled only if a matcher is needed after all."""

    def __init__(self, source: ConstraintSource, compile: Callable[[], GrammarMatcher]) -> None:
        self.source = source
        self.recipe = None
        self._compile = compile

    def new_matcher(self) -> GrammarMatcher:
        return self._compile()


class ConstraintBuilder:
    """Builds the constraints of one model. Safe to call from worker threads."""

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, limits: Limits, *, checks: bool = False
    ) -> None:
        """With `checks`, constraints that the engine cannot enforce are accepted, because answers are
        checked.
        """
        self._card = card
        self._checks = checks
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = GrammarCache(limits.grammar_cache_bytes)
        enable_compile_checks()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, built on first use, because that takes a while for a large one."""
        tokenizer = self._tokenizer
        return Vocabulary(tokenizer.pieces, tokenizer.special_ids, tokenizer.end_ids)

    def check(self, spec: TurnSpec) -> None:
        """Raise if the engine cannot enforce what is required: the answer could violate it."""
        if self._card.constrains:
            return
        hard = spec.reasoning_limit is not None and not spec.reasoning_limit.soft
        forced = None if self._card.constraint_formats else required_constraint(spec)
        if forced is not None and self._can_check(forced):
            forced = None
        asked = forced or (hard and spec.reasoning_limit)
        if asked:
            message = f"This engine cannot constrain its answers; leave out '{asked.param}'."
            raise BadRequest(message, param=asked.param, code="unsupported_field")

    def _can_check(self, asked: OutputConstraint | ToolCallPolicy) -> bool:
        """Whether the answer can be checked instead. Raises if the constraint itself is not valid."""
        if not self._checks or isinstance(asked, ToolCallPolicy):
            return self._checks
        if asked.syntax == "structural_tag":
            # Structural tags contain special tokens, which a text does not have.
            return False
        text_constraint(asked, self._limits)
        return True

    def check_grammar(self, spec: TurnSpec, dialect: Dialect) -> None:
        """Raise if no grammar can express the request. Nothing is compiled: some tools may not be known
        yet.
        """
        asked = spec.output_constraint or spec.tool_policy
        if asked is not None and (self._card.constrains or self._card.constraint_formats):
            try:
                self._whole(spec, dialect, in_reasoning=False)
            except BadRequest as error:
                raise _name_field(error, asked) from None

    def constraint(self, spec: TurnSpec, dialect: Dialect, *, in_reasoning: bool) -> JobConstraint | None:
        """Return the constraint for the engine. Errors name the request field."""
        if not self._card.constrains and not self._card.constraint_formats:
            return None
        # A limit of one call needs no constraint: the turn ends before a second call.
        asked = spec.constrained if self._card.constrains else spec.output_constraint or spec.tool_policy
        grammar = self._grammar(spec, dialect, in_reasoning) if asked else None
        if spec.reasoning_limit is None or spec.parsing is None or not self._card.constrains:
            return grammar
        if grammar is not None and not spec.reasoning_limit.tokens and not in_reasoning:
            # The grammar has no reasoning in it.
            return grammar
        budget = ReasoningBudget(
            dialect, spec.reasoning_limit.tokens, self._tokenizer, starts_in_reasoning=in_reasoning
        )
        if not budget.applies:
            return grammar
        if grammar is None:
            return BudgetedConstraint(budget)
        return BudgetedConstraint(budget, grammar.new_matcher, grammar.recipe)

    def _grammar(
        self, spec: TurnSpec, dialect: Dialect, in_reasoning: bool
    ) -> CompiledConstraint | DelegatedConstraint | None:
        asked = spec.output_constraint or spec.tool_policy
        try:
            parts = (
                spec.output_constraint,
                spec.tool_policy,
                spec.parsing,
                spec.reasoning_limit,
                dialect.name,
                in_reasoning,
            )
            whole = self._grammars.get(parts, lambda: self._whole(spec, dialect, in_reasoning))
            if not self._card.constrains:
                return self._handed(spec, dialect, whole, in_reasoning)
            return CompiledConstraint(self._compiled(whole), ConstraintSpec(whole))
        except BadRequest as error:
            if asked is None:
                # Only the number of calls is limited, and the turn ends before a second one without a
                # grammar, too.
                return None
            raise _name_field(error, asked) from None

    def _compiled(self, whole: Constraint) -> GrammarMatcher:
        return compile_cached(whole, self.vocabulary, self._limits.grammar_cache_bytes)

    def _handed(
        self, spec: TurnSpec, dialect: Dialect, whole: Constraint, in_reasoning: bool
    ) -> DelegatedConstraint | None:
        source = source_of(spec, dialect, whole, self._card, in_reasoning=in_reasoning)
        forced = required_constraint(spec)
        if source is None and (forced is None or self._can_check(forced)):
            return None
        if source is None:
            taken = ", ".join(self._card.constraint_formats)
            message = f"This engine cannot enforce this kind of constraint; it can enforce: {taken}."
            raise BadRequest(message, code="unsupported_field")
        return DelegatedConstraint(source, lambda: self._compiled(whole))

    def _whole(self, spec: TurnSpec, dialect: Dialect, in_reasoning: bool) -> Constraint:
        """Return the grammar of the complete answer: reasoning in the model's format, then text or calls."""
        text = None if spec.output_constraint is None else self._text(spec.output_constraint)
        reading, calling = spec.parsing, spec.tool_policy or ToolCallPolicy()
        if reading is None:
            assert text is not None
            return text
        if text is not None and not reading.reasoning:
            dialect = _reasoning_as_text(dialect, in_reasoning)
        if spec.reasoning_limit is not None and not spec.reasoning_limit.tokens and not in_reasoning:
            dialect = _without_reasoning(dialect)
        choice: CallMode = "none"
        if reading.calls:
            choice = "required" if calling.required else "auto"
        return answer_constraint(
            dialect,
            reading.tools,
            choice=choice,
            names=calling.names,
            parallel=reading.most_calls is None,
            strict=strict_names(reading.tools),
            starts_in_reasoning=in_reasoning,
            text=text,
            special=self._tokenizer.special_ids,
            custom=reading.custom,
            pointers=reading.params,
        )

    def _text(self, wanted: OutputConstraint) -> Constraint:
        if wanted.syntax == "structural_tag":
            return read_tags(wanted.value, wanted.param, self._limits, self._tokenizer.special_ids)
        return text_constraint(wanted, self._limits)


def text_constraint(wanted: OutputConstraint, limits: Limits) -> Constraint:
    """Return the constraint for formats that do not depend on the model."""
    match wanted.syntax:
        case "json_schema":
            return Constraint.from_json_schema(wanted.value, wanted.param, limits)
        case "regex":
            return Constraint.from_regex(wanted.value, wanted.param, limits)
        case "choice":
            return Constraint.from_choice(wanted.value, wanted.param, limits)
        case "gbnf":
            return Constraint.from_gbnf(wanted.value, wanted.param, limits)
        case "lark":
            return Constraint.from_lark(wanted.value, wanted.param, limits)
    return Constraint.from_json_object()


def _name_field(error: BadRequest, asked: OutputConstraint | ToolCallPolicy) -> BadRequest:
    """Add the field of the request to an error that names none."""
    error.param = error.param or asked.param
    return error


def _reasoning_as_text(dialect: Dialect, in_reasoning: bool) -> Dialect:
    """Remove reasoning from a dialect that leaves it in the text, because constrained text has no place for
    it.
    """
    if in_reasoning or dialect.channels is not None:
        message = "Reasoning that is left in the text cannot be constrained; have it separated."
        raise BadRequest(message, param=ParamKey("separate_reasoning"), code="invalid_value")
    return _without_reasoning(dialect)


def _without_reasoning(dialect: Dialect) -> Dialect:
    """Return the dialect without reasoning, for answers that begin with the constrained part."""
    if dialect.channels is None:
        return replace(dialect, reasoning=None)
    written = ("", *dialect.channels.written[1:])
    return replace(dialect, channels=replace(dialect.channels, written=written))


def required_constraint(spec: TurnSpec) -> OutputConstraint | ToolCallPolicy | None:
    """Return what makes an answer wrong if violated. An optional call of a strict tool does not count."""
    return spec.output_constraint or (
        spec.tool_policy if spec.tool_policy is not None and spec.tool_policy.required else None
    )


class GrammarCache:
    """Cache of grammars by request fields: a long list of tools is compiled once, not in every turn.

    Bounded by the bytes of the grammars. Safe for threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Constraint] = OrderedDict()
        self.bytes = 0

    def get(self, asked: Any, make: Callable[[], Constraint]) -> Constraint:
        """Return the cached grammar, or create it. `asked` is anything that msgpack can encode."""
        key = sha256(encode(asked)).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        constraint = make()
        self._keep(key, constraint)
        return constraint

    def _keep(self, key: bytes, file: Constraint) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = file
                self.bytes += _size(file)
            while self.bytes > self._most:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= _size(dropped)


def _size(constraint: Constraint) -> int:
    return LEAST_BYTES + len(constraint.grammar.encode())
