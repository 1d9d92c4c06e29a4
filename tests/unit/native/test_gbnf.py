"""GBNF grammars accept the language of GBNF, whatever the names and the spelling of their rules."""

import pytest

from support.constrained import END, OTHER_END, allowed, compiled, follows
from tokenmill.errors import RequestRefused

JSON = r"""
# llama.cpp's own grammar of JSON
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yesno"]),
        ('root ::= item+\nitem ::= "- " [a-z ]+ "\\n"\n', ["- a\n", "- a b\n- c\n"], ["- \n", "- A\n", "- a"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= ", [""], ["a"]),
        ('root ::= "a" ("b" | )', ["a", "ab"], ["b", "abb"]),
        ('root ::= | "a"', ["", "a"], ["aa"]),
        ('root ::= "a" |\n "b"\n\n# a comment\n', ["a", "b"], ["ab"]),
        ('root ::=\n  "a"\r\nother ::= "b"', ["a"], ["b"]),
        ('root ::= ( # why\n "a"\n | "b" )+ "c"', ["abc", "bc"], ["c"]),
        ('root::="a"{2}"b"{ 1 , 2 }"c"{2,}', ["aabcc", "aabbccc"], ["abcc", "aabc", "aabbbcc"]),
        ('root ::= "a"{0,1000000000}', ["", "aaa"], ["b"]),
        ('root ::= "a"{0} "b"{00,0} ("c" | "d"){0,} "e"{0}', ["", "cd"], ["a", "b", "e"]),
        (f'root ::= {"(" * 500}"a"{")?" * 500} | "b"', ["", "a", "b"], ["aa", "ab"]),
        (f'root ::= {"(" * 500}"a" | "[" root "]"{")" * 500}', ["a", "[[a]]"], ["", "[]"]),
        ('root ::= "a"*? "b"+? "c"??', ["", "c", "ab", "aabbc"], ["cc"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\\[\]"', ['A\u00e9\U0001f600\t"\\[]'], ["A"]),
        (r"root ::= [\u0041-\u0043é/\]\[]+", ["ABCé", "/][/"], ["D", "\\"]),
        ("root ::= [-a] [a-] [&&b] [~~c] [+--]", ["--&~-", "aab~,"], ["&", "b"]),
        ("root ::= [^a\\n]", ["b", "é", "-"], ["a", "\n", "\0"]),
        ("root ::= .+", ["a\n", "é"], ["", "\0"]),
        ('root ::= Foo foo FOO\nFoo ::= "x"\nfoo ::= "y"\nFOO ::= "z"', ["xyz"], ["xyx"]),
        ('root ::= start-1 1a my_rule\nstart-1 ::= "x"\n1a ::= "y"\nmy_rule ::= "z"', ["xyz"], ["xy"]),
        ('root ::= start\nstart ::= "x"\nroot ::= start start', ["xx"], ["x"]),
        # a rule takes no more than it should, although it could
        ('root ::= .* "END"', ["END", "aEND", "ENDEND", "EENEND"], ["EN", ""]),
        ('root ::= [a-z]+ "x" | "(" root ")"', ["ax", "axxx", "(ax)"], ["x", "(a)"]),
        ('root ::= ([a-z] | "END")+ "!" | "(" root ")"', ["xENDy!", "(END!)"], ["ENx!", "E!"]),
        ('root ::= word (" " word)* "."\nword ::= [a-z.]+ | "(" root ")"', ["a b.", "a..", "(a.) b."], ["a b", "."]),
        # recursion on any side
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "x)"]),
        ('root ::= "x" root | "y"', ["y", "xxy"], ["xx"]),
        ('root ::= root "x" | "y"', ["y", "yxx"], ["x"]),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1+(20+3)"], ["1+", "(1"]),
        (JSON, ['{"a": [1, -2.5e3, {"\\u00e9": null}], "true": ""}', "{}"], ["[]", '{"a"}', '{"a":01}']),
        ('%llguidance {}\nstart: /[a-z]+/ "x"?', ["ab"], ["", "A"]),
    ],
)
def test_the_language_of_a_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    made = compiled(grammar=grammar)
    assert [text for text in good if not follows(made, text)] == []
    assert [text for text in bad if follows(made, text)] == []


def test_references_to_tokens() -> None:
    assert allowed(compiled(grammar="root ::= <stop> [a-z]")) == {OTHER_END}
    assert allowed(compiled(grammar='root ::= "a" | <[98]>')) == {97, 98}
    every = allowed(compiled(grammar="root ::= !<[98]> | <stop>"))
    assert 98 not in every
    assert {97, 99, END, OTHER_END} <= every


@pytest.mark.parametrize(
    "grammar",
    [
        "root",
        "root :: a",
        'root ::= "a" | missing',
        'start ::= "a"',
        'root ::= "a" other ::= "b"',
        'root ::= ("a"',
        'root ::= "a")',
        'root ::= "a',
        "root ::= [a",
        "root ::= *",
        'root ::= | * "a"',
        'root ::= "\\q"',
        'root ::= "\\u12"',
        'root ::= "\\ud800"',
        'root ::= "\\UFFFFFFFF"',
        'root ::= "\0"',
        'root ::= "a"{x}',
        'root ::= "a"{99999999999}',
        'root ::= "a"{2}*',
        "root ::= <nothing>",
        "root ::= <[]>",
        "root ::= []",
        "root ::= [z-a]",
        'root ::= $"a"',
        '"a"',
        "root ::= root",
        "root ::= [^\\x00-\\U0010FFFF]",
        "%llguidance {}\nstart: missing",
    ],
)
def test_invalid_grammars_are_refused(grammar: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        compiled(grammar=grammar)
    assert caught.value.code == "invalid_request"
    assert caught.value.hint
