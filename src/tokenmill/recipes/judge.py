"""The second pass: the same model gives what it wrote a score. Pure."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenmill.recipes.expand_prompts import Prompt, shown, values_of
from tokenmill.recipes.expand_schema import document, response_format
from tokenmill.recipes.expand_seeds import Example, Shape
from tokenmill.recipes.expand_transforms import Variant
from tokenmill.recipes.runner import Answered, Line, chat_line, text_of

HIGHEST = 5
MAX_TOKENS = 64
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    # The score first: it stands even where the reason is cut.
    "properties": {
        "score": {"type": "integer", "enum": list(range(1, HIGHEST + 1))},
        "reason": {"type": "string", "maxLength": 120},
    },
    "required": ["score"],
    "additionalProperties": False,
}
_BEGINNING = re.compile(r'\s*\{\s*"score"\s*:\s*([1-5])\s*[,}]')


class Verdict(NamedTuple):
    """A score from 1 to 5, and why."""

    score: int
    reason: str | None


def judge_line(name: str, new: Example, old: Example, variant: Variant, prompt: Prompt, shape: Shape) -> Line:
    """The line that asks for a score; nothing is drawn."""
    way = " ".join([variant.way, *variant.words.values()])
    values = {**values_of(new, shape), "original": shown(old, shape), "way": way}
    return chat_line(
        f"judge-{name}",
        prompt.messages(values),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        response_format=response_format("verdict", _SCHEMA),
    )


def verdict_of(answer: Answered) -> Verdict | None:
    """The verdict; None: there is no answer, or none that can be read."""
    text = text_of(answer)
    if text is None:
        return None
    try:
        value = document(text)
    except (ValueError, RecursionError):
        found = _BEGINNING.match(text)
        return None if found is None else Verdict(int(found[1]), None)
    score, reason = (value.get("score"), value.get("reason")) if isinstance(value, dict) else (None, None)
    if not isinstance(score, int) or isinstance(score, bool) or not 1 <= score <= HIGHEST:
        return None
    return Verdict(score, reason if isinstance(reason, str) else None)
