"""Constraints as text, for engines that keep to one by themselves instead of stepping a matcher."""

import json
from collections.abc import Iterator

from dragoman.constrain.calls.structural_tag import Format, after_reasoning, calls_format, either
from dragoman.constrain.calls.tool_schemas import read_tools, strict_names
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.declare import Dialect
from dragoman.engines.protocol import ModelCard
from dragoman.turns.spec import Calling, TurnSpec, Wanted
from dragoman.types import ConstraintSource


def source_of(
    spec: TurnSpec, dialect: Dialect, whole: Constraint, card: ModelCard, *, in_reasoning: bool
) -> ConstraintSource | None:
    """The first form in which the engine takes it; `whole` is the grammar of everything the answer may be."""
    ways = [*_alone(spec, dialect, card, in_reasoning)]
    if "structural_tag" in card.sources:
        ways += _tagged(spec, dialect, card, in_reasoning)
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
    if spec.reading.calls or _wraps_text(dialect):
        return
    after = card.skips_reasoning and _reasons(spec, dialect, in_reasoning)
    if after or not in_reasoning:
        for way in _written(spec.wanted):
            yield ConstraintSource(way.form, way.text, after)


def _wraps_text(dialect: Dialect) -> bool:
    return dialect.channels is not None or bool(dialect.text_open)


def _reasons(spec: TurnSpec, dialect: Dialect, in_reasoning: bool) -> bool:
    """Whether reasoning may come before what is wanted."""
    unwanted = spec.thinking is not None and not spec.thinking.tokens
    exclude = spec.reading is not None and spec.reading.reasoning
    return in_reasoning or (dialect.reasoning is not None and exclude and not unwanted)


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


def _tagged(
    spec: TurnSpec, dialect: Dialect, card: ModelCard, in_reasoning: bool
) -> Iterator[ConstraintSource]:
    """Calls, and text after reasoning, as far as xgrammar's tags can say it."""
    inside = _format(spec, dialect)
    if inside is None:
        return
    reasons = _reasons(spec, dialect, in_reasoning)
    if reasons and not card.skips_reasoning:
        inside = after_reasoning(dialect, inside, begun=in_reasoning)
    text = json.dumps({"type": "structural_tag", "format": inside})
    yield ConstraintSource("structural_tag", text, reasons and card.skips_reasoning)


def _format(spec: TurnSpec, dialect: Dialect) -> Format | None:
    reading, calling = spec.reading, spec.calling or Calling()
    text = None if spec.wanted is None or _wraps_text(dialect) else _text_format(spec.wanted)
    if reading is None or not reading.calls:
        return text
    if spec.wanted is not None and text is None and not calling.required:
        return None
    alone = calling.required or text is not None
    held = None if calling.required else strict_names(reading.tools)
    tools = read_tools(reading.tools, calling.names, held, reading.custom, reading.places)
    calls = calls_format(dialect, tools, required=alone, parallel=reading.most_calls is None)
    return calls if calls is None or text is None or calling.required else either([calls, text])


def _text_format(wanted: Wanted) -> Format | None:
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
            return {"type": "grammar", "grammar": value}
        case "choice":
            return either([{"type": "const_string", "value": choice} for choice in value])
        case "lark":
            return None
