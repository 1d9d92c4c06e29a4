"""The access log line of a request; contains no bodies and no keys."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tokenmill.gateway.state import AccessLog


def request_log(form: str, write: Callable[[str], object]) -> AccessLog | None:
    """A log that passes each line to `write`, as JSON or key=value pairs; None if `form` is `off`."""
    if form == "off":
        return None

    def log(line: Mapping[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if form == "json":
            write(json.dumps({"time": time, **line}))
        else:
            write(" ".join((time, *(f"{name}={_quoted(value)}" for name, value in line.items()))))

    return log


def _quoted(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(mark in text for mark in ' "=\n') else text
