"""A request's JSON schema, GBNF grammar or Lark grammar as the text that llguidance compiles.

Nothing is compiled here; see compiler.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.engine.engine import Sampling
from tokenmill.engine.schema_bounds import bounded
from tokenmill.errors import RequestRefused
from tokenmill.native.constraints.gbnf import lark_of

MOST_SCHEMA_BYTES = 256 << 10
MOST_GRAMMAR_BYTES = 1 << 20
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"  # as in llama.cpp; unlimited, small models write it until max_tokens
_LARK = "%llguidance"  # the beginning of a Lark grammar, as in llama-server


@dataclass(frozen=True, slots=True)
class GrammarText:
    """What llguidance compiles. GBNF needs more parser items per token than llguidance allows by default."""

    text: str
    is_gbnf: bool = False


def is_constrained(sampling: Sampling) -> bool:
    """Whether a request has a grammar or a JSON schema."""
    return sampling.json_schema is not None or bool(sampling.grammar)


def grammar_of(sampling: Sampling, context_tokens: int | None, token_id: Callable[[str], int | None]) -> GrammarText:
    """The grammar of a constrained request; RequestRefused where it is malformed or too large."""
    if sampling.json_schema is not None:
        return GrammarText(schema_grammar(sampling.json_schema, context_tokens))
    text = sampling.grammar or ""
    if len(text) > MOST_GRAMMAR_BYTES:
        raise RequestRefused(
            f"a grammar of {len(text)} characters is too long", hint=f"at most {MOST_GRAMMAR_BYTES} are allowed"
        )
    if "\0" in text:
        raise RequestRefused("the grammar contains a NUL character", hint=r"write it as \x00")
    if text.lstrip().startswith(_LARK):
        return GrammarText(text)
    return GrammarText(lark_of(text, token_id), is_gbnf=True)


def schema_grammar(json_schema: str, context_tokens: int | None = None) -> str:
    """The grammar of all JSON that a schema allows; an empty schema allows any object.

    RequestRefused for a text that is not a JSON object or whose bounds are too large (see schema_bounds.py).
    """
    if len(json_schema) > MOST_SCHEMA_BYTES:
        raise RequestRefused(
            f"a JSON schema of {len(json_schema)} characters is too long",
            hint=f"at most {MOST_SCHEMA_BYTES} are allowed",
        )
    try:
        schema = json.loads(json_schema)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise RequestRefused(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestRefused("the JSON schema is not an object", hint='for any JSON object send {"type": "object"}')
    try:
        schema = {**bounded(schema or {"type": "object"}, context_tokens)}
        schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        return json.dumps({"grammars": [{"json_schema": schema}]})
    except RecursionError as error:
        raise RequestRefused("the JSON schema is nested too deeply", hint="move inner schemas to $defs") from error
