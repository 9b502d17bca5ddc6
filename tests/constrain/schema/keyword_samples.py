"""For every word of JSON Schema: schemas with texts that are accepted and texts that are not."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Sample(NamedTuple):
    schema: Any
    accepted: Sequence[str] = ()
    rejected: Sequence[str] = ()


TREE = {"type": "object", "properties": {"kids": {"items": {"$ref": "#"}}}, "additionalProperties": False}
SHAPES = {
    "circle": {"type": "object", "properties": {"kind": {"const": "circle"}}, "required": ["kind"]},
    "square": {"type": "object", "properties": {"kind": {"const": "square"}}, "required": ["kind"]},
}

ENFORCED: dict[str, list[Sample]] = {
    "type": [
        Sample({"type": "integer"}, ["1", "-20"], ["1.5", '"1"', "01", "true"]),
        Sample({"type": ["string", "null"]}, ['"a"', "null"], ["1", "{}"]),
    ],
    "enum": [Sample({"enum": ["a", 1, None, ["x"]]}, ['"a"', "1", "null", '["x"]'], ['"b"', "11", "[]"])],
    "const": [Sample({"const": {"a": 1}}, ['{"a": 1}'], ['{"a": 2}', "{}", '{"a": 1, "b": 1}'])],
    "anyOf": [
        Sample({"anyOf": [{"type": "string"}, {"minimum": 5, "type": "integer"}]}, ['"a"', "5"], ["4"])
    ],
    "oneOf": [
        Sample({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
        Sample(
            {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}], "$defs": SHAPES},
            ['{"kind": "circle"}', '{"kind": "square"}'],
            ['{"kind": "line"}', "{}"],
        ),
        Sample({"oneOf": [{"const": 1}, {"minimum": 2, "type": "integer"}]}, ["1", "2"], ["0"]),
        Sample(
            {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
            ['"ax"', '"b"'],
            ['"c"', "1"],
        ),
    ],
    "allOf": [Sample({"allOf": [{"minLength": 2}, {"maxLength": 3}]}, ['"ab"', "1"], ['"a"', '"abcd"'])],
    "$ref": [Sample(TREE, ['{"kids": [{"kids": []}, {}]}'], ['{"kids": [1]}', '{"kid": []}'])],
    "$defs": [Sample({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, ["null"], ["1"])],
    "definitions": [
        Sample({"$ref": "#/definitions/n", "definitions": {"n": {"type": "null"}}}, ["null"], ["1"])
    ],
    "$anchor": [Sample({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}}, ["null"], ["1"])],
    "nullable": [Sample({"type": "string", "nullable": True}, ["null", '"a"'], ["1"])],
    "properties": [
        Sample({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}', '{"b": "x"}'], ['{"a": "x"}', "1"]),
        Sample({"properties": {"a": {"type": "integer"}}}, [], ['{"\\u0061": "x"}', '{"b": 1, "a": "x"}']),
    ],
    "required": [Sample({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}", '{"b": 1}'])],
    "additionalProperties": [
        Sample({"additionalProperties": False}, ["{}"], ['{"a": 1}', "[]"]),
        Sample(
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            ['{"a": 1, "b": null}'],
            ['{"b": 1}'],
        ),
    ],
    "patternProperties": [
        Sample({"patternProperties": {"^a": {"type": "null"}}}, ['{"ab": null, "b": 1}'], ['{"ab": 1}'])
    ],
    "propertyNames": [
        Sample({"propertyNames": {"pattern": "^a"}}, ['{"ab": 1}', "{}"], ['{"b": 1}']),
        Sample({"propertyNames": {"enum": ["a.b", "c"]}}, ['{"a.b": 1}'], ['{"axb": 1}']),
        Sample({"propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    ],
    "minProperties": [
        Sample({"minProperties": 1}, ['{"a": 1}'], ["{}"]),
        Sample(
            {"required": ["a"], "minProperties": 2}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "a": 1}']
        ),
    ],
    "maxProperties": [Sample({"maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 1}'])],
    "dependentRequired": [
        Sample(
            {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            ['{"a": 1, "b": 1}', '{"b": 1}'],
            ['{"a": 1}'],
        )
    ],
    "dependentSchemas": [
        Sample(
            {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
            ['{"b": 1}', "{}"],
            ['{"a": 1}'],
        )
    ],
    "dependencies": [
        Sample(
            {"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"], "b": {}}},
            ['{"b": 1}'],
            ['{"a": 1}'],
        )
    ],
    "unevaluatedProperties": [
        Sample({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}'])
    ],
    "items": [
        Sample({"items": {"type": "null"}}, ["[null, null]", "[]"], ["[1]"]),
        Sample({"items": [{"type": "null"}]}, ["[null, 1]", "[]"], ["[1]"]),
    ],
    "prefixItems": [
        Sample({"prefixItems": [{"type": "null"}], "items": False}, ["[null]", "[]"], ["[1]", "[null, 1]"])
    ],
    "additionalItems": [
        Sample({"items": [{}], "additionalItems": {"type": "null"}}, ["[1, null]"], ["[1, 1]"])
    ],
    "unevaluatedItems": [Sample({"prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"])],
    "minItems": [Sample({"minItems": 2}, ["[1, 2]"], ["[1]", "[]", "1"])],
    "maxItems": [Sample({"maxItems": 2}, ["[1, 2]", "[]"], ["[1, 2, 3]"])],
    "uniqueItems": [
        Sample({"uniqueItems": False}, ["[1, 1]"]),
        Sample({"uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
        Sample(
            {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            ['["a", "b", "aa", ""]', "[]", '["\\n", "n"]'],
            ['["a", "b", "a"]', '["", ""]', '["a","a"]', "[1]"],
        ),
        Sample(
            {
                "properties": {"a": {"items": {"$ref": "#/$defs/e"}, "uniqueItems": True}},
                "$defs": {"e": {"enum": ["x", "xy"]}},
            },
            ['{"a": ["xy", "x"], "b": ["x", "x"]}', '{"a": []}', '{"a": 1}'],
            ['{"a": ["x", "x"]}', '{"a": ["x", "xy", "x"]}'],
        ),
    ],
    "minLength": [Sample({"minLength": 2}, ['"éé"', '"\\n\\n"'], ['"é"', '"\\n"', "1"])],
    "maxLength": [Sample({"maxLength": 2}, ['"éé"', '"😀😀"'], ['"abc"'])],
    "pattern": [
        Sample({"pattern": "^a+$|b"}, ['"aa"', '"xbx"'], ['"ac"', '""', "1"]),
        Sample({"pattern": "^[a&&c]\\s$"}, ['"& "'], ['"ab"', '"a\u0085"']),
    ],
    "format": [Sample({"format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"today"', "1"])],
    "minimum": [Sample({"type": "number", "minimum": 1.5}, ["1.5", "2", "10.25"], ["1.4", "-3"])],
    "maximum": [Sample({"type": "integer", "maximum": 10}, ["10", "-5"], ["11", "100"])],
    "exclusiveMinimum": [
        Sample({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "-1"]),
        Sample({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    ],
    "exclusiveMaximum": [Sample({"type": "integer", "exclusiveMaximum": 3}, ["2"], ["3", "4"])],
    "multipleOf": [Sample({"type": "number", "multipleOf": 0.25}, ["0.75", "2"], ["0.3"])],
}

REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "/not"),
    "if": ({"if": {"minimum": 1}, "then": {"maximum": 5}}, "/if"),
    "then": ({"if": {"minimum": 1}, "then": {"maximum": 5}}, "/if"),
    "else": ({"if": {"minimum": 1}, "else": {"maximum": 5}}, "/if"),
    "contains": ({"contains": {"const": 1}}, "/contains"),
    "minContains": ({"contains": {}, "minContains": 2}, "/contains"),
    "maxContains": ({"contains": {}, "maxContains": 2}, "/contains"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "/$dynamicRef"),
    "$dynamicAnchor": ({"$dynamicAnchor": "a"}, "/$dynamicAnchor"),
    "$recursiveRef": ({"$recursiveRef": "#"}, "/$recursiveRef"),
    "$recursiveAnchor": ({"$recursiveAnchor": True}, "/$recursiveAnchor"),
    "x-guidance": ({"x-guidance": {"lenient": True}}, "/x-guidance"),
}
"""A schema with the word, and the place that the message names."""

PARTLY: list[tuple[Any, str]] = [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "/oneOf"),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"const": 1}], "$defs": {"a": {"type": "integer"}}}, "/oneOf"),
    ({"oneOf": [{"const": "Unsatisfiable schema"}, {"type": "string"}]}, "/oneOf"),
    ({"items": {"uniqueItems": True}}, "/items/uniqueItems"),
    ({"uniqueItems": True, "items": {"type": "string", "maxLength": 1}}, "/uniqueItems"),
    ({"allOf": [{"uniqueItems": True, "items": {"type": "string"}}]}, "/allOf/0/uniqueItems"),
    ({"minProperties": 2}, "/minProperties"),
    ({"properties": {"a": {}}, "maxProperties": 1, "type": "object"}, ""),
    ({"properties": {"x/y": {"pattern": "\\bx"}}}, "/properties/x~1y/pattern"),
    ({"pattern": "(?=a)b"}, "/pattern"),
    ({"pattern": "(a)\\1"}, "/pattern"),
    ({"format": "idn-email"}, "/format"),
    ({"minimum": 2**53 + 1}, "/minimum"),
    ({"const": 2**60}, "/const"),
    ({"enum": ["a\u0001"]}, "/enum"),
    ({"multipleOf": 123456789}, "/multipleOf"),
    ({"$ref": "https://example.com/x.json"}, "/$ref"),
    ({"$ref": "#/$defs/none"}, "/$ref"),
    ({"$ref": "#/x-hidden", "x-hidden": {"format": "date"}}, "/$ref"),
    ({"$ref": "#"}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
    ({"properties": {"a": {"$id": "https://example.com/a"}}}, "/properties/a/$id"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}, "type": "object"}, ""),
    ({"propertyNames": {"format": "date"}}, "/propertyNames"),
    ({"type": "any"}, "/type"),
    ({"type": "string", "required": "a"}, "/required"),
    ({"minLenght": 3}, "/minLenght"),
    ({"properties": {"a": {"items": "string"}}}, "/properties/a/items"),
    ({"minItems": -1}, "/minItems"),
    ({"anyOf": []}, "/anyOf"),
    (False, ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, ""),
]
"""Words that are enforced, where they cannot be; or that are not what they must be."""
