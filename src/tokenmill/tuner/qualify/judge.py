"""Judges answers: a number, JSON of a given shape, code that parses. Pure.

A judge returns None for a correct answer, else a description of the fault.
"""

import ast
import json
import re
import warnings
from functools import cache
from typing import Any

import tree_sitter
import tree_sitter_c
import tree_sitter_java
import tree_sitter_javascript

from tokenmill.tuner.qualify.tasks import Language

_THOUGHT = re.compile(r"^\s*<think>.*?(</think>|\Z)", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```(?P<language>[^\n]*)(?:\n(?P<inside>.*?))?(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_DECODER = json.JSONDecoder()
_CODE = re.compile(
    r"^(?:def |class |import |from |@|async def |#include|public |static |int |void |function |const )", re.M
)
_PROSE = re.compile(r"\n\s*\n(?=[A-Z][a-z]+ [a-z]+ )")  # a sentence after the code
_NAMES = {";": "a semicolon", '"': "a double quote", "'": "a single quote"} | {
    sign: f"a bracket '{sign}'" for sign in "()[]{}"
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def spoken(text: str) -> str:
    """The answer without the model's reasoning."""
    return _THOUGHT.sub("", text).strip()


def has_number(answer: str, number: str) -> str | None:
    """Check that the answer contains the number as a separate word."""
    found = re.findall(r"\d+", spoken(answer).replace(",", ""))
    if number in found:
        return None
    return f"answered {found[0]} instead of {number}" if found else f"answered without a number; expected {number}"


def is_json(answer: str, shape: Any) -> str | None:
    """Check that the answer contains JSON of that shape, fenced or not."""
    text = _unfenced(spoken(answer))
    start = text.find("{")
    if start < 0:
        return "the answer has no JSON"
    try:
        value, _ = _DECODER.raw_decode(text, start)  # text after the JSON is accepted
    except (ValueError, RecursionError) as error:
        return f"does not parse: {error}"
    return _unlike(value, shape, "")


def _unlike(value: Any, shape: Any, where: str) -> str | None:
    """The first difference between a value and its shape; None if there is none."""
    if isinstance(shape, dict):
        return _unlike_object(value, shape, where)
    if isinstance(shape, list):
        return _unlike_list(value, shape, where)
    right = isinstance(value, _TYPES[shape]) and (shape == "boolean" or not isinstance(value, bool))
    return None if right else f"{where or 'the value'} must be of type {shape}"


def _unlike_object(value: Any, shape: dict[str, Any], where: str) -> str | None:
    at = where or "the value"
    if not isinstance(value, dict):
        return f"{at} must be an object"
    missing = sorted(shape.keys() - value.keys())
    extra = sorted(value.keys() - shape.keys())
    if missing or extra:
        return f"{at} " + (f"lacks {missing[0]!r}" if missing else f"has an unexpected key {extra[0]!r}")
    for key, wanted in shape.items():
        if found := _unlike(value[key], wanted, f"{where}.{key}".strip(".")):
            return found
    return None


def _unlike_list(value: Any, shape: list[Any], where: str) -> str | None:
    """A shape list with one item matches one or more such items; a longer one matches exactly its items."""
    if not isinstance(value, list):
        return f"{where or 'the value'} must be a list"
    if not value or (len(shape) > 1 and len(value) != len(shape)):
        return f"{where or 'the value'} has {len(value)} items"
    shapes = shape if len(shape) > 1 else shape * len(value)
    for place, (item, wanted) in enumerate(zip(value, shapes, strict=True)):
        if found := _unlike(item, wanted, f"{where}[{place}]"):
            return found
    return None


def code_in(answer: str) -> str:
    """The code of an answer: between fences, or from the first line that looks like code until prose begins."""
    text = spoken(answer)
    inside = _unfenced(text)
    if inside != text:
        return inside
    start = _CODE.search(text)
    if start is None:
        return ""
    return _PROSE.split(text[start.start() :])[0]


def _unfenced(text: str) -> str:
    """The text between the first fences; before the first fence if it only closes."""
    first = _FENCE.search(text)
    if first is None:
        return text
    before = text[: first.start()]
    if not first["language"] and (_CODE.search(before) or before.lstrip().startswith("{")):
        return before
    return first["inside"] or ""


def is_code(answer: str, language: Language) -> str | None:
    """Check that the answer contains code that parses."""
    code = code_in(answer)
    if not code.strip():
        return "the answer has no code"
    if language == "Python":
        return _python(code)
    if "{" not in code:
        return "the code has no function"
    faults = syntax_faults(code, language)
    return faults[0] + (f", and {len(faults) - 1} more" if len(faults) > 1 else "") if faults else None


def syntax_faults(code: str, language: Language) -> list[str]:
    """Syntax errors of C, Java or JavaScript code, in order, with line numbers."""
    faults = []
    pending = [_parser(language).parse(code.encode(errors="replace")).root_node]
    while pending:
        node = pending.pop()
        line = node.start_point[0] + 1
        if node.is_missing:
            faults.append(f"line {line}: {_NAMES.get(node.type, node.type)} is missing")
        elif node.is_error:
            faults.append(_unparsed((node.text or b"").decode(errors="replace"), line))
        elif node.has_error:
            pending += reversed(node.children)
    return faults


def _unparsed(text: str, line: int) -> str:
    """Describe the error in unparsed text that begins on `line`."""
    lines = text.splitlines() or [""]
    for number, one in enumerate(lines, line):
        for name, quote in (("double", '"'), ("single", "'")):
            if one.count(quote) % 2:
                return f"line {number}: a {name} quote is not closed"
    return f"line {line}: {lines[0][:40]!r} does not parse"


@cache
def _parser(language: Language) -> tree_sitter.Parser:
    grammars = {"C": tree_sitter_c, "Java": tree_sitter_java, "JavaScript": tree_sitter_javascript}
    return tree_sitter.Parser(tree_sitter.Language(grammars[language].language()))


def _python(code: str) -> str | None:
    try:
        with warnings.catch_warnings():  # warnings about invalid escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"does not parse: {error}"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return None if any(isinstance(node, kinds) for node in ast.walk(tree)) else "the code has no function"
