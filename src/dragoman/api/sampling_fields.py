"""Request fields that many servers have under their own names: constraints, samplers, fields without effect.

Each group is a struct that the next one extends; `SharedFields` extends the last.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct, field

from dragoman.errors import BadRequest
from dragoman.turns.spec import OutputConstraint
from dragoman.types import LARK_LINE, SAMPLER_ORDER, ExtraSamplers, SamplerName

# Fields without effect, accepted because clients send them to every server.


Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

Told: TypeAlias = Annotated[str, Meta(max_length=1024)]
"""Text of a field without effect; some are returned with the reply."""


class NoEffectFields(Struct, kw_only=True):
    """Fields that are accepted and have no effect on the answer: this is the complete published list."""

    user: Told | None = None
    safety_identifier: Told | None = None
    prompt_cache_key: Told | None = None
    prompt_cache_retention: Told | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Told | None = None
    metadata: Metadata | None = None
    client_metadata: Any = None
    request_id: Told | None = None
    rid: Told | None = None
    prediction: Any = None
    id_slot: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n_cache_reuse: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    spaces_between_special_tokens: bool | None = None


IDLE = tuple(name for name in NoEffectFields.__annotations__ if name != "metadata")
"""Fields that are reported as ignored. `metadata` is not among them: it is stored with the answer."""


# Constraints on the text of an answer, under the names that other servers use.


JsonSchema: TypeAlias = dict[str, Any] | bool
SchemaOrText: TypeAlias = dict[str, Any] | bool | str
"""A schema, or its JSON as a string, which vLLM accepts too."""
SchemaName: TypeAlias = Annotated[str, Meta(max_length=256)]
Description: TypeAlias = Annotated[str, Meta(max_length=64 * 1024)]
"""Description of a schema; name and description are returned with stored answers."""
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
    """OpenAI's wrapper of a schema. The answer matches the schema with or without `strict`."""

    name: SchemaName | None = None
    description: Description | None = None
    schema_: JsonSchema | None = field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = field(name="schema", default=None)
    """The schema where llama-server has it."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    """Structural tags in the newer form; `structures` and `triggers` are the older."""


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's newer object for constraints."""

    exact: ClassVar[bool] = True
    echoed: ClassVar[frozenset[str]] = frozenset({"backend", "disable_fallback"})
    json: SchemaOrText | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class ConstraintFields(NoEffectFields, kw_only=True):
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

    def formats(self) -> Iterator[OutputConstraint]:
        """Yield the constraints in OpenAI's own field, which differs between the APIs."""
        return _response_format(self.response_format) if self.response_format is not None else iter(())


_beside = attrgetter("structured_outputs", *_FIELDS, *_GRAMMARS)
_NOTHING = _beside(ConstraintFields())


def read_wanted(fields: ConstraintFields) -> OutputConstraint | None:
    """Return the constraint of a request, or None for free text.

    Two different constraints are an error, but clients for several versions of a server may send the same
    constraint under an older and a newer name.
    """
    constraints = list(fields.formats())
    if _beside(fields) != _NOTHING:
        constraints += _all_beside(fields)
    for other in constraints[1:]:
        if (other.syntax, other.value) != (constraints[0].syntax, constraints[0].value):
            first, second = constraints[0].param, other.param
            message = f"'{second}' and '{first}' are different constraints; send one of them."
            raise BadRequest(message, param=second, code="invalid_value")
    return constraints[0] if constraints else None


def _all_beside(fields: ConstraintFields) -> Iterator[OutputConstraint]:
    if fields.structured_outputs is not None:
        yield from _read_structured(fields.structured_outputs)
    for name, syntax in _FIELDS.items():
        if (value := getattr(fields, name)) not in (None, ""):
            yield OutputConstraint(syntax=syntax, value=value, param=name)
    for name in _GRAMMARS:
        yield from _grammar(getattr(fields, name), name)


def _read_given(
    syntax: Literal["json_schema", "regex", "choice", "structural_tag"], value: Any, param: str
) -> Iterator[OutputConstraint]:
    if value is not None:
        yield OutputConstraint(syntax=syntax, value=value, param=param)


def _grammar(text: str | None, param: str) -> Iterator[OutputConstraint]:
    """Tell apart the two notations of these fields: rules defined with `::=` are GBNF, all else is Lark."""
    if not text:
        return
    if text.startswith(LARK_LINE):
        yield OutputConstraint(syntax="lark", value=text.removeprefix(LARK_LINE), param=param)
    else:
        yield OutputConstraint(syntax="gbnf" if "::=" in text else "lark", value=text, param=param)


def _read_structured(asked: StructuredOutputs) -> Iterator[OutputConstraint]:
    constraints = [
        *_read_given("json_schema", asked.json, "structured_outputs.json"),
        *_read_given("regex", asked.regex, "structured_outputs.regex"),
        *_read_given("choice", asked.choice, "structured_outputs.choice"),
        *_grammar(asked.grammar, "structured_outputs.grammar"),
        *_read_given("structural_tag", asked.structural_tag, "structured_outputs.structural_tag"),
    ]
    if asked.json_object:
        constraints.append(OutputConstraint(syntax="json_object", param="structured_outputs.json_object"))
    if not constraints:
        names = "json, regex, choice, grammar, json_object and structural_tag"
        message = f"'structured_outputs' must have one of {names}."
        raise BadRequest(message, param="structured_outputs", code="invalid_value")
    yield from constraints


def _response_format(asked: ResponseFormat) -> Iterator[OutputConstraint]:
    if asked.type == "structural_tag":
        tags = {"format": asked.format, "structures": asked.structures, "triggers": asked.triggers}
        yield OutputConstraint(syntax="structural_tag", value=tags, param="response_format")
        return
    named = asked.json_schema.schema_ if asked.json_schema else None
    param = "response_format.schema" if named is None else "response_format.json_schema.schema"
    schema = asked.schema_ if named is None else named
    if asked.type == "text":
        if schema is not None:
            message = "A response_format of type text has no schema; its type must be json_schema."
            raise BadRequest(message, param="response_format.type", code="invalid_value")
        return
    if schema is not None:
        yield OutputConstraint(syntax="json_schema", value=schema, param=param)
    elif asked.type == "json_object":
        yield OutputConstraint(syntax="json_object", param="response_format")
    else:
        param = "response_format.json_schema.schema"
        raise BadRequest(f"'{param}' is required.", param=param, code="missing_field")


# Fields of less common samplers, under the names of llama.cpp's server and TabbyAPI.
#
# Clients with a slider for each sampler send all of them, mostly at the neutral value. A sampler that is not
# supported is therefore rejected only if its value would have an effect.


Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Factor: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Window: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Breakers: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(max_length=64)]
_OTHER_NAMES: Mapping[str, tuple[SamplerName, ...]] = {
    "typical": ("typical_p",),
    "typ_p": ("typical_p",),
    "tfs_z": ("tfs",),
    "top_nsigma": ("top_n_sigma",),
    "top_p_top_k": ("top_k", "top_p"),
    "dynamic_temperature": ("temperature",),
    "quadratic": ("smoothing",),
    "quadratic_sampling": ("smoothing",),
    "repetition_penalty": ("penalties",),
    "presence_penalty": ("penalties",),
    "frequency_penalty": ("penalties",),
    "adaptive_p": (),
    "encoder_repetition_penalty": (),
    "epsilon_cutoff": (),
    "eta_cutoff": (),
    "mirostat": (),
    "no_repeat_ngram": (),
}
"""Names that other servers use in a sampler order; some stand for several of ours. Names without samplers are
not supported or have no position; the field that enables such a sampler rejects it."""
_LETTERS: Mapping[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typical_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "f": "tfs",
    "t": "temperature",
}
"""llama.cpp's short form, such as `edskypmxt`."""
_FIRST: tuple[SamplerName, ...] = ("penalties", "dry")
_DOES_NOTHING: Mapping[str, Callable[[float], bool]] = {
    "use_beam_search": lambda value: not value,
    "length_penalty": lambda value: value == 1,
    "skew": lambda value: value == 0,
    "adaptive_target": lambda value: value < 0,
}
"""Samplers that are not supported, with a test for their neutral values."""


class SamplerFields(ConstraintFields, kw_only=True):
    samplers: Annotated[list[str], Meta(max_length=64)] | Annotated[str, Meta(max_length=64)] | None = None
    sampler_priority: Annotated[list[str], Meta(max_length=64)] | None = None
    temperature_last: bool | None = None
    typical: Share | None = None
    top_a: Share | None = None
    tfs: Share | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_mode: Literal[0, 1, 2] | None = None
    mirostat_tau: Factor | None = None
    mirostat_eta: Share | None = None
    dynatemp_range: Annotated[float, Meta(ge=0, le=5)] | None = None
    dynatemp_exponent: Factor | None = None
    min_temp: Annotated[float, Meta(ge=0, le=5)] | None = None
    max_temp: Annotated[float, Meta(ge=0, le=5)] | None = None
    temp_exponent: Factor | None = None
    penalty_last_n: Window | None = None
    smoothing_factor: Factor | None = None
    smoothing_curve: Annotated[float, Meta(ge=1, le=3)] | None = None
    dry_multiplier: Factor | None = None
    dry_base: Factor | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_range: Window | None = None
    dry_sequence_breakers: Breakers | None = None
    # Accepted only with neutral values.
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    skew: Annotated[float, Meta(ge=-100, le=100)] | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = None
    adaptive_decay: Share | None = None


_sampler_values = attrgetter(*SamplerFields.__annotations__)
_NO_SAMPLERS = _sampler_values(SamplerFields())


def check_samplers(fields: SamplerFields) -> None:
    if _sampler_values(fields) == _NO_SAMPLERS:
        return
    for name, does_nothing in _DOES_NOTHING.items():
        value = getattr(fields, name)
        if value is not None and not does_nothing(value):
            message = f"'{name}' is not supported: the server does not have this sampler; leave it out."
            raise BadRequest(message, param=name, code="unsupported_field")
    if fields.dry_multiplier and fields.dry_base is not None and fields.dry_base < 1:
        raise BadRequest("dry_base must be at least 1.", param="dry_base", code="invalid_value")
    if (fields.max_temp or 0) < (fields.min_temp or 0) and fields.max_temp is not None:
        raise BadRequest("max_temp must not be less than min_temp.", param="max_temp", code="invalid_value")


def samplers(fields: SamplerFields, *, penalises: bool) -> ExtraSamplers | None:
    """Return the samplers of the request beyond the usual ones, or None if none has an effect."""
    mapping = given_samplers(fields)
    if not penalises:
        mapping.pop("penalty_range", None)
    asked = msgspec.convert(mapping, ExtraSamplers) if mapping else None
    return asked if asked is not None and asked.acts else None


def given_samplers(fields: SamplerFields) -> dict[str, Any]:
    """Return all sampler values of the request by the names of `ExtraSamplers`, neutral ones included."""
    if _sampler_values(fields) == _NO_SAMPLERS:
        return {}
    mapping = {
        "order": _order(fields),
        "penalty_range": _window(fields.penalty_last_n),
        "smoothing_factor": fields.smoothing_factor,
        "smoothing_curve": fields.smoothing_curve,
        "dynatemp_range": _range(fields),
        "dynatemp_exponent": _first(fields.dynatemp_exponent, fields.temp_exponent),
        "top_n_sigma": None if fields.top_n_sigma is None else max(fields.top_n_sigma, 0.0),
        "top_a": fields.top_a,
        "tfs": fields.tfs,
        "xtc_probability": fields.xtc_probability,
        "xtc_threshold": fields.xtc_threshold,
        "mirostat": _first(fields.mirostat, fields.mirostat_mode),
        "mirostat_tau": fields.mirostat_tau,
        "mirostat_eta": fields.mirostat_eta,
        "dry_multiplier": fields.dry_multiplier,
        "dry_base": fields.dry_base,
        "dry_allowed_length": fields.dry_allowed_length,
        "dry_range": _window(_first(fields.dry_penalty_last_n, fields.dry_range)),
    }
    return {name: value for name, value in mapping.items() if value is not None}


def middle_temperature(fields: SamplerFields) -> float | None:
    """Return the mean of TabbyAPI's `min_temp` and `max_temp`, or None if there is no such range."""
    low, high = fields.min_temp, fields.max_temp
    return None if low is None or high is None or low >= high else (low + high) / 2


def _range(fields: SamplerFields) -> float | None:
    if middle_temperature(fields) is not None:
        return ((fields.max_temp or 0.0) - (fields.min_temp or 0.0)) / 2
    return fields.dynatemp_range


def _window(value: float | None) -> int | None:
    """Convert a window of tokens; llama.cpp's -1 and TabbyAPI's 0 both mean all tokens."""
    return None if value is None or value <= 0 else int(value)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _order(fields: SamplerFields) -> tuple[SamplerName, ...] | None:
    if fields.samplers:
        order = _read_names(fields.samplers, "samplers")
    elif fields.sampler_priority:
        order = _read_names(fields.sampler_priority, "sampler_priority")
    elif fields.temperature_last is None:
        return None
    else:
        order = SAMPLER_ORDER
    # The last of the samplers in the order.
    last = [name for name in ("smoothing", "temperature") if name in order] if fields.temperature_last else []
    return (*(name for name in order if name not in last), *last)


def _read_names(value: list[str] | str, param: str) -> tuple[SamplerName, ...]:
    """Read an order such as `["top_k", "temperature"]`, `"top_k;temperature"` or `"kt"`."""
    if isinstance(value, str):
        short = ";" not in value and value not in SAMPLER_ORDER
        value = [_LETTERS.get(letter, letter) for letter in value] if short else value.split(";")
    for name in value:
        if name not in SAMPLER_ORDER and name not in _OTHER_NAMES:
            message = f"{name!r} is not a known sampler; known are {', '.join(SAMPLER_ORDER)}."
            raise BadRequest(message, param=param, code="invalid_value")
    if len(set(value)) < len(value):
        raise BadRequest(f"{param} names a sampler twice; name each once.", param=param, code="invalid_value")
    # If several names stand for one sampler, the first determines its position.
    order = list(
        dict.fromkeys(own for name in value for own in _OTHER_NAMES.get(name, (cast(SamplerName, name),)))
    )
    first = [name for name in order if name in _FIRST]
    if order[: len(first)] != first:
        message = "penalties and dry change all logits; put them first in the order."
        raise BadRequest(message, param=param, code="invalid_value")
    return tuple(order)
