"""JSON as it is stored, hashed, sent and quoted. The formats are part of every store and do not change."""

import json
from collections.abc import Mapping
from typing import Any

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON without spaces. Keeps the order of keys: schemas, tools and arguments mean something else in another order."""


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as the bytes that are stored and sent: one line of UTF-8, lone surrogates replaced by question marks."""
    return compact_json(body).encode("utf-8", "replace")


def shown(value: Any) -> str:
    """A value as JSON for an error message, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
