"""Lines of a stage as the bytes that name its batch: whoever writes the same lines means the same batch."""

import json

from tokenmill.jobs.json_text import compact_json
from tokenmill.recipes.runner import Line


def written(line: Line) -> bytes:
    """One line, with its end."""
    try:
        return compact_json(line).encode() + b"\n"
    except UnicodeEncodeError:  # half a character: the line's own outcome says so
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"
