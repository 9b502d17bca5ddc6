"""Schemas of tools, and arguments that are in them."""

from typing import Any

from hypothesis import strategies as st

WORDS = ["city", "n", "unit", "tags", "filter_by", "kind", "q", "item"]
PATTERNS = {
    "^[a-z]{2,5}$": "[a-z]{2,5}",
    "^(on|off)$": "on|off",
    "[0-9]+": "[a-z]{0,3}[0-9]{1,3}",
    "^x|y$": "x[a-z]{0,2}|[a-z]{0,2}y",
}
FORMATS = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "10:00:00.5+02:00"],
    "date-time": ["2024-01-02T03:04:05Z"],
    "email": ["a.b@example.org"],
    "ipv4": ["127.0.0.1", "255.1.20.3"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="ĠĊ"), max_size=12
)
"""Characters that every syntax can hold; what they spell is up to chance."""


def strings() -> st.SearchStrategy[dict[str, Any]]:
    plain = st.just({"type": "string"})
    sized = st.tuples(st.integers(0, 4), st.integers(4, 9)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}
    )
    spelled = st.sampled_from(sorted(PATTERNS)).map(lambda pattern: {"type": "string", "pattern": pattern})
    formed = st.sampled_from(sorted(FORMATS)).map(lambda name: {"type": "string", "format": name})
    return plain | plain | sized | spelled | formed


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.tuples(st.integers(-50, 0), st.integers(1, 900)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}
    )
    listed = st.lists(
        st.sampled_from(["red", "GREEN 1", "l'été", "a b", "x"]), min_size=1, max_size=3, unique=True
    )
    others: list[dict[str, Any]] = [
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "number", "minimum": 0},
        {"enum": ["a", 1, None, True]},
        {"const": "fixed"},
        {"type": ["string", "null"]},
        {"type": ["integer", "null"]},
        {"$ref": "#/$defs/level"},
    ]
    return (
        strings()
        | bounded
        | listed.map(lambda values: {"type": "string", "enum": values})
        | st.sampled_from(others)
    )


def objects(inner: st.SearchStrategy[dict[str, Any]], least: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(WORDS), inner, min_size=least, max_size=3)

    def required(declared: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        some = st.lists(st.sampled_from(sorted(declared)), unique=True) if declared else st.just([])
        return some.map(lambda names: {"type": "object", "properties": declared, "required": names})

    return properties.flatmap(required)


def values_of_schemas(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(2, 4)).map(
        lambda one: {"type": "array", "items": one[0], "minItems": one[1], "maxItems": one[2]}
    )
    unions = st.lists(scalars(), min_size=2, max_size=2).map(lambda options: {"anyOf": options})
    return objects(inner, least=1) | arrays | inner.map(lambda one: {"type": "array", "items": one}) | unions


schemas = st.recursive(scalars(), values_of_schemas, max_leaves=5)
parameters = objects(schemas).map(lambda schema: {**schema, "$defs": {"level": {"enum": ["low", "high"]}}})


def values(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows."""
    if "$ref" in schema:
        return values(root["$defs"]["level"], root)
    if "anyOf" in schema:
        return st.one_of([values(option, root) for option in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if isinstance(kind, list):
        return st.one_of([values({"type": one}, root) for one in kind])
    return OF_TYPES[kind](schema, root)


def _strings(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return st.from_regex(f"(?:{PATTERNS[schema['pattern']]})", fullmatch=True)
    if "format" in schema:
        return st.sampled_from(FORMATS[schema["format"]])
    least, most = schema.get("minLength", 0), schema.get("maxLength", 12)
    return texts.map(lambda text: (text + "abcd")[: max(least, len(text))][:most])


def _arrays(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
    return st.lists(values(schema["items"], root), min_size=least, max_size=most)


def arguments(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """An object; its properties come in the order in which they are declared."""
    keys = schema["properties"]
    optional = [key for key in keys if key not in schema["required"]]
    some = st.lists(st.sampled_from(optional), unique=True) if optional else st.just([])
    drawn = some.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {key: values(inner, root) for key, inner in keys.items() if key not in optional or key in chosen}
        )
    )
    return drawn.map(lambda match: {key: match[key] for key in keys if key in match})


OF_TYPES = {
    "string": _strings,
    "integer": lambda schema, root: st.integers(
        schema.get("minimum", -(10**9)), schema.get("maximum", 10**9)
    ),
    "number": lambda schema, root: st.floats(
        schema.get("minimum", -1e6), 1e6, allow_nan=False, allow_infinity=False
    ).map(lambda number: round(number, 3)),
    "boolean": lambda schema, root: st.booleans(),
    "null": lambda schema, root: st.none(),
    "array": _arrays,
    "object": arguments,
}
