"""JSON schemas as GBNF grammars, by llama.cpp's own converter."""

import json
from functools import lru_cache

from tokenmill.engine.schema_bounds import bounded
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.native.abi import INSTALL_HINT

MOST_SCHEMA_BYTES = 256 << 10
MOST_GRAMMAR_BYTES = 1 << 20


@lru_cache(maxsize=64)
def grammar_of(json_schema: str, context_tokens: int | None = None) -> str:
    """The grammar of all JSON that a schema allows; an empty schema allows any object.

    RequestRefused for a schema that is not valid or whose bounds are too large (see schema_bounds.py).
    """
    if len(json_schema) > MOST_SCHEMA_BYTES:
        raise RequestRefused(
            f"a JSON schema of {len(json_schema)} characters is too long", hint=f"{MOST_SCHEMA_BYTES} are allowed"
        )
    try:
        schema = json.loads(json_schema)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise RequestRefused(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestRefused("the JSON schema is no object", hint='for any JSON object send {"type": "object"}')
    try:
        from xllamacpp import json_schema_to_grammar  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EngineError("xllamacpp is not installed: no converter of JSON schemas", hint=INSTALL_HINT) from error
    try:
        text = json.dumps(bounded(schema or {"type": "object"}, context_tokens))
        grammar = str(json_schema_to_grammar(text))
    except (RuntimeError, ValueError, TypeError, RecursionError) as error:
        raise RequestRefused(f"the JSON schema cannot become a grammar: {error}") from error
    check_size(grammar)
    return grammar


def check_size(grammar: str) -> None:
    """Refuse a grammar that would take llama.cpp too long to follow."""
    if len(grammar) > MOST_GRAMMAR_BYTES:
        raise RequestRefused(
            f"a grammar of {len(grammar)} characters is too long", hint=f"{MOST_GRAMMAR_BYTES} are allowed"
        )
