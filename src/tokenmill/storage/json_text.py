"""JSON as it is stored, hashed, sent and quoted. Existing stores depend on these formats; do not change them."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON without spaces. Keeps the key order, which matters for schemas, tools and arguments."""


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as stored and sent: one line of UTF-8 with lone surrogates replaced by question marks."""
    return compact_json(body).encode("utf-8", "replace")


def shown(value: Any) -> str:
    """A value as JSON for an error message, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class _BadJson(ValueError):
    pass


def _no_constant(name: str) -> None:
    raise _BadJson(f"{name} is not a JSON number")


_scan = json.JSONDecoder(parse_constant=_no_constant).raw_decode


def parse(text: str | bytes) -> dict[str, Any]:
    """Parse one JSON object without trailing data; ValueError says what is wrong and where. Bytes must be UTF-8."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):  # TypeError: a text with a lone surrogate
        value = _parse_exactly(text if isinstance(text, str) else text.decode())
    if type(value) is not dict:
        raise ValueError(f"must be a JSON object (got {shown(value)})")
    return value


def _parse_exactly(text: str) -> Any:
    """Slower fallback with deeper nesting, lone surrogates and readable errors (`from_json` is twice as fast)."""
    try:
        value, end = _scan(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.pos + 1}") from None
    except _BadJson as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except ValueError:  # from int(): too many digits
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from None
    if end != len(text):
        raise ValueError(f"not JSON: unexpected data after the object at column {end + 1}")
    return value
