"""GBNF, character by character: what llama.cpp accepts is accepted, and nothing else."""

import pytest

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.gbnf import GbnfError, read_gbnf
from dragoman.errors import BadRequest

JSON = r"""
# the usual grammar of JSON
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (
        JSON,
        ['{"a": [1, -2.5e3, {"b": null}], "é": "\\u00e9"}', "{}", '{"a" :1}'],
        ["[]", '{"a":01}', '{"a"', ""],
    ),
    ('root ::= [a-z]* "b"', ["b", "ab", "bbb", "abab"], ["a", ""]),
    ('root ::= "abc" | "a" x\nx ::= "bd" | "x" root', ["abc", "abd", "axabd"], ["ab", "ax", "axab"]),
    ('root ::= "(" root ")" | ""', ["", "()", "(())"], ["(", ")("]),
    ("root ::= [^a-c\\]\\-^]+", ["x", "[", "é😀"], ["a", "]", "-", "^"]),
    ("root ::= [a-]{2} [-a]", ["a-a", "--a"], ["ab-"]),
    ("root ::= . .", ["a\n", "😀é"], ["a"]),
    ('root ::= "\\x41\\u00e9\\U0001F600\\n\\t\\"\\\\"', ['Aé😀\n\t"\\'], ["A"]),
    ('root ::= a{2,3} "."\na ::= "x" | "yy"', ["xx.", "xyyx."], ["x.", "xxxx."]),
    ('root ::= ("a"\n | "b"\n)+ # comment\nunused ::= "c"', ["ab"], ["", "c"]),
    ('root ::= "a"\n  | "b"', ["a", "b"], ["ab"]),
    ('root-1 ::= "a"\nroot ::= root-1 root_1\nroot_1 ::= "b"', ["ab"], ["a"]),
    ("root ::= ( [x]* )*", ["", "xx"], ["y"]),
    ('root ::= ""', [""], ["a"]),
    ('root ::= "a" | "b" x | "c" x*\nx ::= x', ["a", "c"], ["b", "cc"]),
    ('start ::= "a" x "!";\nx ::= "b" | "c";\n', ["ab!", "ac!"], ["ab", "b"]),
    ('start ::= "a" ; root ::= start start ;', ["aa"], ["a"]),
]


@pytest.mark.parametrize(("grammar", "accepted", "rejected"), CASES, ids=range(len(CASES)))
def test_the_language(grammar: str, accepted: list[str], rejected: list[str]) -> None:
    constraint = Constraint.from_gbnf(grammar)
    assert [text for text in accepted if not constraint.accepts(text)] == []
    assert [text for text in rejected if constraint.accepts(text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "root ::= x",
        'root ::= "a',
        "root ::= [a",
        "root ::= (",
        "root ::= )",
        "root ::= *",
        "root ::= [z-a]",
        'root ::= "a"{3,2}',
        'root ::= "\\q"',
        "root = 1",
        'root ::= "a"{9999999}',
        'root ::= "\\ud800"',
        "root",
    ],
)
def test_what_is_wrong(grammar: str) -> None:
    with pytest.raises(GbnfError):
        read_gbnf(grammar)


def test_rules_that_never_end_are_refused() -> None:
    for grammar in ("root ::= root", 'root ::= "a" x\nx ::= "b" root | "c" x'):
        with pytest.raises(BadRequest, match="refers to itself"):
            Constraint.from_gbnf(grammar)


def test_deep_groups_are_refused_at_once() -> None:
    with pytest.raises(BadRequest, match="nested groups"):
        Constraint.from_gbnf("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000)
