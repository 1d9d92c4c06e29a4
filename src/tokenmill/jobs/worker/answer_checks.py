"""Counts answers of a run that are complete but useless: cut off by a limit, or not the JSON that their job asked for.

Engines with constrained sampling write valid JSON unless it is cut off; other servers may ignore the schema.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from tokenmill.engine.engine import Answer
from tokenmill.jobs.openai.call import Call


@dataclass(frozen=True, slots=True)
class AnswerChecks:
    """Numbers of answers."""

    cut_by_max_tokens: int = 0
    cut_by_context: int = 0  # before max_tokens, or without one
    json: int = 0  # that had to be JSON
    invalid_json: int = 0  # of those: not JSON, or against their schema

    @property
    def cut(self) -> int:
        """Answers that are incomplete."""
        return self.cut_by_max_tokens + self.cut_by_context

    def __add__(self, other: "AnswerChecks") -> "AnswerChecks":
        return AnswerChecks(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def checked(call: Call, answer: Answer) -> AnswerChecks:
    """The checks of one answer."""
    cut = answer.finish_reason == "length"
    limit: int | None = call.values.get("max_tokens")
    by_max_tokens = cut and limit is not None and answer.usage.completion_tokens >= limit
    schema: str | None = call.values.get("json_schema")
    has_json = schema is not None and not answer.tool_calls
    invalid = has_json and schema is not None and not follows(schema, answer.text)
    return AnswerChecks(int(by_max_tokens), int(cut and not by_max_tokens), int(has_json), int(invalid))


def follows(schema: str, text: str) -> bool:
    """Whether a text is JSON that follows a schema; a schema that cannot be used accepts any JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    try:
        return _validator(schema)(value)
    except Exception:  # noqa: BLE001  an unresolvable reference, or a keyword with a wrong value
        return True


@lru_cache(maxsize=64)
def _validator(schema: str) -> Callable[[Any], bool]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415  most jobs have no schema
    from referencing import Registry  # noqa: PLC0415

    # An empty registry: references to other documents are not fetched.
    valid: Callable[[Any], bool] = Draft202012Validator(json.loads(schema), registry=Registry()).is_valid
    return valid
