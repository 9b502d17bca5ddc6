"""The fields that say what the text of an answer must be, under the names that servers have for them."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from dragoman.api.fields.harmless import HarmlessFields
from dragoman.errors import BadRequest
from dragoman.turns.spec import Wanted
from dragoman.types import LARK_LINE

JsonSchema: TypeAlias = dict[str, Any] | bool
SchemaOrText: TypeAlias = dict[str, Any] | bool | str
"""A schema, or its JSON as text, which vLLM takes too."""
SchemaName: TypeAlias = Annotated[str, Meta(max_length=256)]
Description: TypeAlias = Annotated[str, Meta(max_length=64 * 1024)]
"""Of a schema. Both are told again with an answer that is stored."""
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1)]
_FIELDS: dict[str, Literal["json_schema", "regex", "choice"]] = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "regex_pattern": "regex",
    "guided_choice": "choice",
}
_GRAMMARS = ("guided_grammar", "ebnf", "grammar", "grammar_string")


class NamedSchema(Struct, forbid_unknown_fields=True):
    """OpenAI's envelope. With or without `strict`, the answer is in the schema."""

    name: SchemaName | None = None
    description: Description | None = None
    schema_: JsonSchema | None = field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = field(name="schema", default=None)
    """llama-server's place for it."""
    structures: Any = None
    triggers: Any = None
    format: Any = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's newer form."""

    json: SchemaOrText | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class ConstraintFields(HarmlessFields, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    regex_pattern: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    grammar_string: str | None = None

    def formats(self) -> Iterator[Wanted]:
        """What OpenAI's own field asks for; its place differs between the APIs."""
        return _response_format(self.response_format) if self.response_format is not None else iter(())


_beside = attrgetter("structured_outputs", *_FIELDS, *_GRAMMARS)
_NOTHING = _beside(ConstraintFields())


def wanted(fields: ConstraintFields) -> Wanted | None:
    """What the text must be; None: whatever the model writes. Two constraints are one too many."""
    found = list(fields.formats())
    if _beside(fields) != _NOTHING:
        found += _all_beside(fields)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        message = f"'{second}' and '{first}' both say what the answer must be; send one of them."
        raise BadRequest(message, param=second, code="invalid_value")
    return found[0] if found else None


def _all_beside(fields: ConstraintFields) -> Iterator[Wanted]:
    if fields.structured_outputs is not None:
        yield from _structured(fields.structured_outputs)
    for name, syntax in _FIELDS.items():
        if (value := getattr(fields, name)) is not None:
            yield Wanted(syntax=syntax, value=value, param=name)
    for name in _GRAMMARS:
        yield from _grammar(getattr(fields, name), name)


def _given(syntax: Literal["json_schema", "regex", "choice"], value: Any, param: str) -> Iterator[Wanted]:
    if value is not None:
        yield Wanted(syntax=syntax, value=value, param=param)


def _grammar(text: str | None, param: str) -> Iterator[Wanted]:
    """Two notations share these fields: what defines its rules with `::=` is GBNF, anything else Lark."""
    if text is None:
        return
    if text.startswith(LARK_LINE):
        yield Wanted(syntax="lark", value=text.removeprefix(LARK_LINE), param=param)
    else:
        yield Wanted(syntax="gbnf" if "::=" in text else "lark", value=text, param=param)


def _structured(asked: StructuredOutputs) -> Iterator[Wanted]:
    if asked.structural_tag is not None:
        raise _no_structural_tag("structured_outputs.structural_tag")
    found = [
        *_given("json_schema", asked.json, "structured_outputs.json"),
        *_given("regex", asked.regex, "structured_outputs.regex"),
        *_given("choice", asked.choice, "structured_outputs.choice"),
        *_grammar(asked.grammar, "structured_outputs.grammar"),
    ]
    if asked.json_object:
        found.append(Wanted(syntax="json_object", param="structured_outputs.json_object"))
    if not found:
        message = "'structured_outputs' must have one of json, regex, choice, grammar and json_object."
        raise BadRequest(message, param="structured_outputs", code="invalid_value")
    yield from found


def _response_format(asked: ResponseFormat) -> Iterator[Wanted]:
    if asked.type == "structural_tag":
        raise _no_structural_tag("response_format")
    named = asked.json_schema.schema_ if asked.json_schema else None
    place = "response_format.schema" if named is None else "response_format.json_schema.schema"
    schema = asked.schema_ if named is None else named
    if asked.type == "text":
        if schema is not None:
            message = "A response_format of type text has no schema; its type must be json_schema."
            raise BadRequest(message, param="response_format.type", code="invalid_value")
        return
    if schema is not None:
        yield Wanted(syntax="json_schema", value=schema, param=place)
    elif asked.type == "json_object":
        yield Wanted(syntax="json_object", param="response_format")
    else:
        place = "response_format.json_schema.schema"
        raise BadRequest(f"'{place}' is required.", param=place, code="missing_field")


def _no_structural_tag(param: str) -> BadRequest:
    message = "Structural tags are not supported: send tools with tool_choice, or a schema, or a grammar."
    return BadRequest(message, param=param, code="unsupported_field")
