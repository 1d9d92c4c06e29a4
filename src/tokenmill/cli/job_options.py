"""Options about jobs: default sampling values."""

import json
import time
from dataclasses import dataclass
from typing import Any

from cyclopts import Parameter

from tokenmill.api.run_options import check_defaults
from tokenmill.errors import UsageError


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Values for jobs whose lines do not say."""

    max_tokens: int | None = None
    """Tokens of an answer at most, for lines that do not say."""

    temperature: float | None = None
    """0 always takes the likeliest token; for lines that do not say."""

    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; for lines that do not say."""

    seed: int | None = None
    """Of the draws, for lines that do not say."""

    body: str | None = None
    """More of the same as a JSON object with keys of OpenAI's bodies, such as '{"response_format": ...}'."""

    def defaults(self) -> dict[str, Any]:
        """As keys of a body; UsageError where one is wrong."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        given = _object(self.body) | {key: value for key, value in named.items() if value is not None}
        check_defaults(given)
        return given


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--body is not JSON: {error}", hint="""--body '{"min_p": 0.1}'""") from error
    if not isinstance(value, dict):
        raise UsageError("--body is not a JSON object", hint="""--body '{"min_p": 0.1}'""")
    return value


def when(time_s: float) -> str:
    """A time for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
