"""Constraints as text, for engines that keep to one by themselves instead of stepping a matcher."""

import json
from collections.abc import Iterator

from dragoman.constrain.constraint import Constraint
from dragoman.dialects.declare import Dialect
from dragoman.engines.protocol import ModelCard
from dragoman.turns.spec import TurnSpec, Wanted
from dragoman.types import ConstraintSource


def source_of(
    spec: TurnSpec, dialect: Dialect, whole: Constraint, card: ModelCard, *, in_reasoning: bool
) -> ConstraintSource | None:
    """The first form in which the engine takes it; `whole` is the grammar of everything the answer may be."""
    ways = [*_alone(spec, dialect, card, in_reasoning)]
    if not whole.watched:
        ways.append(ConstraintSource("lark", whole.grammar))
    return next((way for way in ways if way.form in card.sources), None)


def _alone(
    spec: TurnSpec, dialect: Dialect, card: ModelCard, in_reasoning: bool
) -> Iterator[ConstraintSource]:
    """Where text is all there is, or all that follows reasoning, what the client sent is the constraint."""
    if spec.wanted is None:
        return
    if spec.reading is None:
        yield from _written(spec.wanted)
        return
    if spec.reading.calls or dialect.channels is not None or dialect.text_open:
        return
    begins_with_it = spec.thinking is not None and not spec.thinking.tokens
    reasons = dialect.reasoning is not None and spec.reading.reasoning and not begins_with_it
    after = card.skips_reasoning and (in_reasoning or reasons)
    if after or not in_reasoning:
        for way in _written(spec.wanted):
            yield ConstraintSource(way.form, way.text, after)


def _written(wanted: Wanted) -> Iterator[ConstraintSource]:
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
        case "regex" | "gbnf" | "lark":
            yield ConstraintSource(wanted.syntax, value)
