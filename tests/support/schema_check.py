"""Checks documents against JSON schemas, for tests."""

from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry


def satisfies(schema: Any, value: Any) -> bool:
    """Whether a document follows a schema; an unknown keyword or format is not checked."""
    return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
