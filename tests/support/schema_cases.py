"""JSON schemas with accepted and refused documents, handwritten after the JSON Schema specification."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A schema and documents as JSON text."""

    name: str
    schema: Any
    allowed: tuple[str, ...]
    refused: tuple[str, ...]


LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "required": ["v"],
            "additionalProperties": False,
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        }
    },
}
CLOSED = {"type": "object", "additionalProperties": False}
CAT = {**CLOSED, "required": ["kind"], "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = {**CLOSED, "required": ["kind"], "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}}}
AB = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}}

CASES = (
    Case(
        "required",
        {**CLOSED, "properties": AB, "required": ["a", "b", "c"]},
        ('{"a":1,"b":"x","c":null}', '{"a": 1, "b": "", "c": null}', '{\n  "a": 1,\n  "b": "x",\n  "c": null\n}'),
        ("{}", '{"a":1}', '{"a":1,"b":"x"}', '{"a":"1","b":"x","c":null}', '{"a":1,"b":"x","c":null,"d":1}', "[]"),
    ),
    Case(
        "optional",
        {**CLOSED, "properties": AB},
        ("{}", '{"a":1}', '{"b":"x"}', '{"c":null}', '{"a":1,"c":null}', '{"a":1,"b":"x","c":null}'),
        ('{"d":1}', '{"a":1,}', '{,"a":1}', '{"a":null}', "{"),
    ),
    Case(
        "middle required",
        {**CLOSED, "properties": AB, "required": ["b"]},
        ('{"b":"x"}', '{"a":1,"b":"x"}', '{"b":"x","c":null}', '{"a":1,"b":"x","c":null}'),
        ("{}", '{"a":1}', '{"a":1,"c":null}', '{"c":null}'),
    ),
    Case(
        "further properties",
        {"type": "object", "properties": AB, "additionalProperties": {"type": "boolean"}},
        ("{}", '{"a":1,"z":true}', '{"z":true,"y":false}', '{"aa":true}', '{"":true}', '{"b":"x","ab":true}'),
        ('{"z":1}', '{"a":true}', '{"z":true,"a":true}', '{"c":true}'),
    ),
    Case(
        "open by default",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ('{"a":1}', '{"a":1,"b":[{}]}'),
        ("{}", '{"b":1}', '{"a":"x"}'),
    ),
    Case(
        "map",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ("{}", '{"x":1}', '{"x":1,"y":2}'),
        ('{"x":"1"}', '{"x":1,}'),
    ),
    Case(
        "required elsewhere",
        {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
        ('{"z":1}', '{"z":1,"y":2}'),
        ("{}", '{"z":"1"}', '{"y":1}'),
    ),
    Case(
        "enum",
        {"enum": ["red", "reddish", "blue", 3, None, True, 1.5]},
        ('"red"', '"reddish"', '"blue"', "3", "null", "true", "1.5"),
        ('"re"', '"redd"', "4", "false", '"green"'),
    ),
    Case("enum and type", {"type": "string", "enum": ["a", 1, None]}, ('"a"',), ("1", "null")),
    Case("const", {"const": 'say "hi"\\\n\u00e9'}, ('"say \\"hi\\"\\\\\\n\u00e9"',), ('"say"', '""', "1")),
    Case(
        "const object",
        {"const": {"a": [1, {"b": None}]}},
        ('{"a":[1,{"b":null}]}', '{"a": [1, {"b": null}]}'),
        ('{"a":[1]}', "{}", '{"a":[1,{"b":0}]}'),
    ),
    Case("types", {"type": ["string", "null", "integer"]}, ('"x"', "null", "-7"), ("true", "1.5", "[]", "{}")),
    Case(
        "nullable ref",
        {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"type": "string"}}},
        ('"x"', "null"),
        ("1",),
    ),
    Case(
        "array",
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        ("[true]", "[true,false]", "[true, false, true]"),
        ("[]", "[true,true,true,true]", "[1]", "[true,]"),
    ),
    Case(
        "any number of items",
        {"type": "array", "items": {"type": "integer"}},
        ("[]", "[1]", "[1,2,3,4,5,6]"),
        ("[,]", '["x"]'),
    ),
    Case("empty array", {"type": "array", "maxItems": 0}, ("[]",), ("[1]",)),
    Case(
        "two items at least",
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        ("[1,2]", "[1,2,3,4]"),
        ("[]", "[1]"),
    ),
    Case(
        "tuple",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        ("[]", "[1]", '[1,"x"]'),
        ('["x"]', '[1,"x",2]', "[1,2]"),
    ),
    Case(
        "tuple and more",
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}],
            "items": {"type": "string"},
            "minItems": 2,
            "maxItems": 3,
        },
        ('[1,"x"]', '[1,"x","y"]'),
        ("[1]", "[]", '[1,"x","y","z"]', "[1,2]"),
    ),
    Case(
        "recursion",
        LINKED,
        ('{"v":1}', '{"v":1,"next":{"v":2}}', '{"v":1,"next":{"v":2,"next":{"v":3}}}'),
        ("{}", '{"next":{"v":1}}', '{"v":1,"next":{}}', '{"v":1,"next":null}'),
    ),
    Case(
        "tree",
        {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
            "additionalProperties": False,
        },
        ("{}", '{"kids":[]}', '{"kids":[{},{"kids":[{}]}]}'),
        ('{"kids":[1]}', '{"kids":{}}'),
    ),
    Case("definitions", {"definitions": {"a/b": {"type": "integer"}}, "$ref": "#/definitions/a~1b"}, ("5",), ('"5"',)),
    Case(
        "anyOf",
        {"anyOf": [CAT, DOG, {"type": "string", "maxLength": 2}]},
        ('{"kind":"cat"}', '{"kind":"dog","good":true}', '"ab"'),
        ('{"kind":"cat","good":true}', '"abc"', '{"kind":"cow"}'),
    ),
    Case("oneOf", {"oneOf": [CAT, DOG]}, ('{"kind":"cat","lives":9}', '{"kind":"dog"}'), ('{"kind":"cow"}', "{}")),
    Case(
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        ('{"a":1,"b":"x"}', '{"a":1,"b":"x","c":2}'),
        ('{"a":1}', '{"b":"x"}', '{"a":1,"b":2}'),
    ),
    Case(
        "allOf of one property",
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        ("3", "4", "5"),
        ("2", "6", "4.5"),
    ),
    Case(
        "length",
        {"type": "string", "minLength": 2, "maxLength": 4},
        ('"ab"', '"abcd"', '"\u00e9\u00e9"', '"\\n\\""', '"\U0001f600a"', '"\\ud83d\\ude00a"'),
        ('"a"', '"abcde"', '""', '"\\n"', '"\U0001f600"'),
    ),
    Case(
        "long",
        {"type": "string", "minLength": 1500, "maxLength": 4500},
        tuple(f'"{"x" * size}"' for size in (1500, 1501, 2499, 2500, 3000, 4499, 4500)),
        tuple(f'"{"x" * size}"' for size in (0, 1499, 4501, 5000)),
    ),
    Case(
        "strings",
        {"type": "string"},
        ('""', '"\\u00e9"', '"\\/"', '"\u65e5\u672c"'),
        ('"', '"\n"', '"\\x"', '"a"b"', "'a'"),
    ),
    Case("integers", {"type": "integer"}, ("0", "7", "-12", "1234567890123"), ("01", "1.5", "-", "+1", "1e", '"1"')),
    Case(
        "integer range",
        {"type": "integer", "minimum": -13, "maximum": 117},
        ("-13", "-9", "0", "9", "10", "99", "100", "117"),
        ("-14", "118", "200", "-20", "1000", "0.5"),
    ),
    Case("integer from", {"type": "integer", "minimum": 38}, ("38", "39", "40", "100", "12345"), ("37", "0", "-40")),
    Case("integer to", {"type": "integer", "exclusiveMaximum": -7}, ("-8", "-70", "-1234"), ("-7", "0", "8")),
    Case("odd bounds", {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 5}, ("3", "4"), ("2", "5")),
    Case("numbers", {"type": "number"}, ("0", "-1.5", "2e5", "1.25E-3", "-0.5"), (".5", "1.", "00", "1e", "NaN")),
    Case(
        "share",
        {"type": "number", "minimum": 0, "maximum": 1},
        ("0", "1", "0.5", "0.999", "1.0", "0.0"),
        ("1.01", "2", "-1", "-0.5", "10", "1.5"),
    ),
    Case(
        "number range",
        {"type": "number", "minimum": -1.25, "exclusiveMaximum": 12.5},
        ("-1.25", "-1.2", "-0.5", "0", "12.4", "12.49", "9.9", "12"),
        ("-1.26", "-1.3", "12.5", "12.51", "13", "20"),
    ),
    Case("above", {"type": "number", "exclusiveMinimum": 0}, ("0.1", "0.001", "1", "123.5"), ("0", "-1", "0.0")),
    Case(
        "date",
        {"type": "string", "format": "date"},
        ('"2024-02-29"', '"2023-12-31"', '"2000-02-29"'),
        ('"2024-13-01"', '"2024-1-1"', '"2024-00-10"', '"x"'),
    ),
    Case(
        "time",
        {"type": "string", "format": "time"},
        ('"10:20:30Z"', '"23:59:59.5+02:00"'),
        ('"24:00:00Z"', '"10:20"', '"10:60:00Z"'),
    ),
    Case(
        "date-time",
        {"type": "string", "format": "date-time"},
        ('"2024-02-29T10:20:30Z"',),
        ('"2024-02-29"', '"2024-02-29 10:20"'),
    ),
    Case(
        "uuid",
        {"type": "string", "format": "uuid"},
        ('"123e4567-e89b-12d3-a456-426614174000"',),
        ('"123e4567"', '"123e4567-e89b-12d3-a456-42661417400g"'),
    ),
    Case(
        "pattern",
        {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
        ('"AB-1"', '"ZZ-123"'),
        ('"A-1"', '"AB-"', '"AB-1x"', '"ab-1"'),
    ),
    Case(
        "pattern groups",
        {"type": "string", "pattern": "^(?:foo|ba[rz])(\\.[^.\\s]{1,3})?$"},
        ('"foo"', '"bar"', '"baz.x"', '"foo.abc"'),
        ('"ba"', '"foo."', '"foo.abcd"', '"foo.a b"'),
    ),
    Case("pattern anywhere", {"type": "string", "pattern": "ab"}, ('"ab"', '"xaby"', '"aab"'), ('"a"', '"ba"', '""')),
    Case("pattern escapes", {"type": "string", "pattern": '^["\\\\\\n]+$'}, ('"\\""', '"\\\\\\n"'), ('"x"', '"\\t"')),
    Case("anything", {"type": "array", "items": {}}, ('[1,"x",{"a":[null]},[],true]',), ("[1,]", "{}")),
    Case("nothing of it", {**CLOSED, "properties": {"a": False, "b": True}}, ("{}", '{"b":1}'), ('{"a":1}',)),
    Case(
        "annotations",
        {"type": "boolean", "title": "t", "description": "d", "default": True, "examples": [1]},
        ("true", "false"),
        ("1",),
    ),
)
